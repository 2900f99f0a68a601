"""The probe of sampler against learner finds planted faults, and rounding does not trip it.

Random adapters go through the rollout engine and the learner, without Ray on one device; see
`pipeline.rollout.mismatch.probe_statistic`. docs/benchmarks.md has figures of a real model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from configs.schema import Config
from launch.bench.shapes import one_device
from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.rollout_weights import RolloutWeights
from pipeline.compute.decode.state import SlotAdmissions
from pipeline.compute.learner.scorer import Scorer
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_policy
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.rollout.mismatch import probe_statistic
from pipeline.types import Completion, RolloutName, RolloutRequest

TINY = Path(__file__).parents[3] / "launch" / "demo" / "tiny_gemma3"
FORMATS: dict[str, dict[str, object]] = {
    "float32": {"model__dtype": "float32"},
    "bfloat16": {},
    "merged": {"plan__rollout_weights": "merged"},
    "int8_weights": {"plan__rollout_weights": "int8"},
    "int8_base": {"model__quantization": "int8"},
    "int8_caches": {"plan__kv_cache": "int8"},
}
"""Changes of a bfloat16 run's settings, by name of the format."""
HIDDEN = {"int8_caches": ["one layer without its adapter", "one matrix without it"]}
"""Faults of this small model below the bound, by format: it is wide enough for the rounding of a
real model, which is five times as large."""

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "3 + 5 = 8\n12 + 7 = 19\n14 + 3 =",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "The three primary colours are red,",
    "Q: What is the largest planet?\nA:",
    "In 1969, the first man",
)
NEW, LONGEST = 64, 40

Admit = Callable[[np.ndarray], None]
"""Changes the table of `SlotAdmissions`."""


def make_config(number_format: str) -> Config:
    """Settings of a run of this format with eight slots."""
    changes = FORMATS[number_format]
    settings: dict[str, object] = {
        "model__path": TINY,
        "model__dtype": "bfloat16",
        "rollout__stop_tokens": '["<eos>"]',
        "plan__prefill_tokens": 4096,
        "plan__row_tokens": 128,
        "plan__micro_batch_tokens": 1024,
    }
    if "plan__rollout_weights" in changes:
        settings["learner__importance_cap"] = 2.0
    return one_device("demo", slots=len(TEXTS), prompt=LONGEST, new=NEW, **settings | changes)


class Probe:
    """Sampler and learner of one number format."""

    def __init__(self, number_format: str) -> None:
        config = make_config(number_format)
        tokenizer = read_tokenizer(TINY)
        self.policy, self._base = open_policy(
            TINY,
            dtype=config.model.dtype,
            lora=config.lora,
            mesh=make_mesh(jax.devices()[:1]),
            quantization=config.model.quantization,
        )
        vocabulary = Vocabulary.of(tokenizer, config.rollout)
        self._weights = RolloutWeights(self.policy, self._base, config)
        self._engine = Engine(self._weights.policy, None, config, vocabulary)
        self._scorer = Scorer(self.policy, config, vocabulary)
        self._requests = []
        for number, text in enumerate(TEXTS):
            tokens = [tokenizer.bos_id, *tokenizer.encode(text)][:LONGEST]
            name = RolloutName("probe", 0, number, 0)
            self._requests.append(RolloutRequest(name, np.array(tokens, np.int32)))

    def statistic(self, sampler: Params, learner: Params) -> float:
        """The probe's statistic, with these adapters of sampler and learner.

        Infinite if the learner's adapter changes nothing, which the probe refuses, too.
        """
        drawn = self._sample(sampler)
        sampled = np.concatenate([completion.logprobs for completion in drawn])
        scored, without = (
            np.concatenate(self._scorer.score(drawn, adapter=adapter, base=self._base))
            for adapter in (learner, self.policy.no_adapter())
        )
        if np.array_equal(scored, without):
            return float("inf")
        return probe_statistic(sampled, scored, without)

    def _sample(self, adapter: Params) -> Sequence[Completion]:
        self._weights.load(adapter)
        return self._engine.generate(
            self._requests,
            adapter=self._weights.adapter,
            base=self._weights.base,
            version=0,
            adapter_sha256="",
            temperature=1.0,
        )

    def adapter_faults(self) -> Iterator[tuple[str, float]]:
        """The statistic under each fault of the adapters."""
        whole, none = self.policy.probe_adapter(0), self.policy.no_adapter()
        yield "sampler without LoRA", self.statistic(none, whole)
        yield "learner without LoRA", self.statistic(whole, none)
        yield "another adapter", self.statistic(self.policy.probe_adapter(1000), whole)
        layers = range(self.policy.architecture.shape.layers)
        missing = [("one layer without its adapter", f"layers.{layer}.") for layer in layers]
        down = f"layers.{layers.stop // 2}.mlp.down_proj"
        missing += [("keys and values without it", "kv_einsum"), ("one matrix without it", down)]
        for name, mark in missing:
            part = {key: value * (mark not in key) for key, value in whole.items()}
            yield name, self.statistic(part, whole)

    def engine_faults(self) -> Iterator[tuple[str, float]]:
        """The statistic under each fault of what the decoding program is given."""
        whole = self.policy.probe_adapter(0)
        original = Engine._admissions
        for name, admit in ADMISSIONS.items():

            def admissions(engine: Engine, *given: Any, admit: Admit = admit) -> np.ndarray:
                table = original(engine, *given)
                admit(table)
                return table

            with mock.patch.object(Engine, "_admissions", admissions):
                yield name, self.statistic(whole, whole)


def shift(by: int) -> Admit:
    def admit(table: np.ndarray) -> None:
        new = SlotAdmissions.of(table)
        new.length[:] += by * new.admitted

    return admit


def swap(table: np.ndarray) -> None:
    rows = SlotAdmissions.of(table).rows
    rows[:2] = rows[1::-1].copy()


ADMISSIONS: dict[str, Admit] = {
    "position + 1": shift(1),
    "position - 1": shift(-1),
    "prompts of two slots swapped": swap,
}


def check(number_format: str, *, adapters: int) -> None:
    probe = Probe(number_format)
    bound = make_config(number_format).mismatch_bounds.probe
    for seed in range(adapters):
        adapter = probe.policy.probe_adapter(seed)
        assert probe.statistic(adapter, adapter) < bound, seed
    faults = [*probe.adapter_faults(), *probe.engine_faults()]
    assert len(faults) == 15
    hidden = [name for name, value in faults if value <= bound]
    assert hidden == HIDDEN.get(number_format, []), faults


def test_planted_faults_are_found():
    check("float32", adapters=1)


@pytest.mark.slow
@pytest.mark.parametrize("number_format", FORMATS)
def test_planted_faults_are_found_and_rounding_is_allowed(number_format: str):
    check(number_format, adapters=20)
