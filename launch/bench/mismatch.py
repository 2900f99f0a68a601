"""`python -m launch.bench mismatch`: what rounding and planted faults do to the probe.

Random adapters go through the rollout engine and the learner, without Ray on one device; see
`pipeline.rollout.mismatch.probe_statistic`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from configs.schema import Config
from launch.bench.harness import Benchmark, Row, Section
from launch.bench.small_gemma import preset
from pipeline.compute.decode import cache
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

FORMATS: dict[str, dict[str, str]] = {
    "float32": {"model__dtype": "float32"},
    "bfloat16": {},
    "merged": {"plan__rollout_weights": "merged"},
    "int8_weights": {"plan__rollout_weights": "int8"},
    "int8_base": {"model__quantization": "int8"},
    "int8_caches": {"plan__kv_cache": "int8"},
    "int8_matmul": {"plan__rollout_weights": "int8_matmul"},
}
"""Changes of a bfloat16 run's settings, by name of the format."""

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
NEW, LONGEST, WINDOW = 64, 40, 16

Admit = Callable[[np.ndarray], None]
"""Changes the table of `SlotAdmissions`."""


def probe_config(model: str, *, number_format: str) -> Config:
    """Settings of a run of this format with eight slots."""
    changes = FORMATS[number_format]
    settings: dict[str, Any] = {
        "model__path": model,
        "model__dtype": "bfloat16",
        "rollout__group_size": len(TEXTS),
        "rollout__prompts_per_step": 1,
        "rollout__max_prompt_tokens": LONGEST,
        "rollout__max_new_tokens": NEW,
        "rollout__stop_tokens": '["<eos>"]',
        "plan__placement": "colocated",
        "plan__samplers": "none",
        "plan__sampler_devices": "none",
        "plan__learner_devices": 1,
        "plan__slots": len(TEXTS),
        "plan__slot_buckets": [],
        "plan__segment_steps": 32,
        "plan__prefill_tokens": 4096,
        "plan__row_tokens": 128,
        "plan__micro_batch_tokens": 1024,
    }
    if "plan__rollout_weights" in changes:
        settings["learner__importance_cap"] = 2.0
    return preset("demo", **settings | changes)


class Probe:
    """Sampler and learner of one number format.

    Args:
        model: Hugging Face folder.
        number_format: a key of `FORMATS`.
    """

    def __init__(self, model: str, *, number_format: str) -> None:
        config = probe_config(model, number_format=number_format)
        tokenizer = read_tokenizer(Path(model))
        self.policy, self._base = open_policy(
            Path(model),
            dtype=config.model.dtype,
            lora=config.lora,
            mesh=make_mesh(jax.devices()[:1]),
            quantization=config.model.quantization,
        )
        vocabulary = Vocabulary.of(tokenizer, config.rollout)
        self._weights = RolloutWeights(self.policy, self._base, config)
        self._config, self._vocabulary = config, vocabulary
        self._engine = self._new_engine()
        self._scorer = Scorer(self.policy, config, vocabulary)
        self._requests = []
        for number, text in enumerate(TEXTS):
            tokens = [tokenizer.bos_id, *tokenizer.encode(text)][:LONGEST]
            name = RolloutName("probe", 0, number, 0)
            self._requests.append(RolloutRequest(name, np.array(tokens, np.int32)))

    def _new_engine(self) -> Engine:
        return Engine(self._weights.policy, None, self._config, self._vocabulary)

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

    def adapter_faults(self, seed: int) -> Iterator[tuple[str, float]]:
        """The statistic under each fault of the adapters."""
        whole, none = self.policy.probe_adapter(seed), self.policy.no_adapter()
        yield "sampler without LoRA", self.statistic(none, whole)
        yield "learner without LoRA", self.statistic(whole, none)
        yield "another adapter", self.statistic(self.policy.probe_adapter(seed + 1000), whole)
        layers = range(self.policy.architecture.shape.layers)
        missing = [("one layer without its adapter", f"layers.{layer}.") for layer in layers]
        down = f"layers.{layers.stop // 2}.mlp.down_proj"
        missing += [("keys and values without it", "kv_einsum"), ("one matrix without it", down)]
        for name, mark in missing:
            part = {key: value * (mark not in key) for key, value in whole.items()}
            yield name, self.statistic(part, whole)

    def engine_faults(self, seed: int) -> Iterator[tuple[str, float]]:
        """The statistic under each fault of the decoding program."""
        whole = self.policy.probe_adapter(seed)
        for name, admit in _ADMISSIONS.items():
            with _admitting(admit):
                yield name, self.statistic(whole, whole)
        for name, mask in _MASKS.items():
            with mock.patch.object(cache, "visible_slots", mask):
                self._engine = self._new_engine()
            yield name, self.statistic(whole, whole)
        self._engine = self._new_engine()


def _shift(by: int) -> Admit:
    def admit(table: np.ndarray) -> None:
        new = SlotAdmissions.of(table)
        new.length[:] += by * new.admitted

    return admit


def _swap(table: np.ndarray) -> None:
    rows = SlotAdmissions.of(table).rows
    rows[:2] = rows[1::-1].copy()


_ADMISSIONS: dict[str, Admit] = {
    "position + 1": _shift(1),
    "position - 1": _shift(-1),
    "prompts of two slots swapped": _swap,
}


@contextmanager
def _admitting(admit: Admit) -> Iterator[None]:
    original = Engine._admissions  # noqa: SLF001

    def admissions(self: Engine, *given: Any) -> np.ndarray:
        table = original(self, *given)
        admit(table)
        return table

    with mock.patch.object(Engine, "_admissions", admissions):
        yield


_visible = cache.visible_slots


def _without_first(held: Any, positions: Any, *, window: int | None) -> Any:
    return _visible(held, positions, window=window) & (held > 0)


def _without_own(held: Any, positions: Any, *, window: int | None) -> Any:
    return _visible(held, positions, window=window) & (held < positions[:, None])


def _short_window(held: Any, positions: Any, *, window: int | None) -> Any:
    return _visible(held, positions, window=None if window is None else min(window, WINDOW))


_MASKS = {
    "first token masked": _without_first,
    "own position masked": _without_own,
    f"window of {WINDOW}": _short_window,
}


def measure(
    *, model: str, number_format: str, adapters: int, faulty: int, engine: bool = True
) -> dict[str, Any]:
    """The statistic by rounding (largest) and by fault (smallest).

    Args:
        model: Hugging Face folder.
        number_format: a key of `FORMATS`.
        adapters: random adapters for rounding.
        faulty: random adapters for each fault.
        engine: whether to plant the faults of the decoding program, which compile it again.
    """
    probe = Probe(model, number_format=number_format)
    whole = [probe.policy.probe_adapter(seed) for seed in range(adapters)]
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "rounding": max(probe.statistic(adapter, adapter) for adapter in whole),
    }
    for seed in range(faulty):
        faults = [*probe.adapter_faults(seed), *(probe.engine_faults(seed) if engine else ())]
        for name, value in faults:
            found[name] = min(value, found.get(name, value))
    return found


def benchmark(request: argparse.Namespace) -> Benchmark:
    """A row for each number format.

    Raises:
        FileNotFoundError: if there is no such model.
    """
    if not Path(request.model).is_dir():
        raise FileNotFoundError(f"command line: {request.model}: no such folder")
    given = {"model": request.model, "adapters": request.adapters, "faulty": request.faulty}
    return Benchmark(
        [
            Section(
                "formats",
                f"The probe's statistic: the largest value by rounding, with {request.adapters} "
                f"random adapters, and the smallest under each fault, with {request.faulty}",
                [Row(name, measure, {**given, "number_format": name}) for name in FORMATS],
                environment={},
            )
        ]
    )
