"""Base and tuned policy on all sets: adapters, answers, and the report."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.data.rows import TooLong
from pipeline.data.splits import LoadedSplit
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.evaluate.comparison import document, lines
from pipeline.evaluate.examples import COUNT, recorded_examples
from pipeline.evaluate.measurement import Measured, measure
from pipeline.evaluate.protocol import data_facts, protocol
from pipeline.rollout.mismatch import MismatchError
from pipeline.run.run_folder import RunFolder
from pipeline.types import Completion, DecodeWork, OpenedAdapter, RolloutRequest
from tests.run_process import Script
from tests.samples import CharTokenizer, completion, make_config, make_prompts

TUNED = "/runs/a"


class FakeAdapterSampler:
    """Right with the adapter; right for every second prompt without it; silent to prompt 4."""

    def __init__(self, script: Script, *, salt: str = "") -> None:
        self.script, self.salt = script, salt
        self.version, self.adapter = -1, ""
        self.asked: list[tuple[RolloutRequest, float]] = []

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        self.script.note(f"open {path}")
        self.version = 0 if path is None else 7
        self.adapter = hashlib.sha256(f"{path}{self.salt}".encode()).hexdigest()
        return OpenedAdapter(self.version, self.adapter, "the base" if path is None else "step 7")

    async def generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float, **_: Any
    ) -> list[Completion]:
        self.asked += [(request, temperature) for request in requests]
        return [self._answer(request) for request in requests]

    async def work(self) -> DecodeWork:
        return DecodeWork()

    def _answer(self, request: RolloutRequest) -> Completion:
        name = request.name
        right = self.version or (name.prompt_id % 2 and name.sample == 0)
        text = f"<reasoning>x</reasoning><answer>{2 * name.prompt_id + (not right)}</answer>"
        return completion(
            request,
            text if name.prompt_id != 4 else "",
            version=self.version,
            adapter_sha256=self.adapter,
        )


TESTS = {"test": make_prompts(5), "more": make_prompts(2)}


def run(config: Config, samplers: Sequence[Any], path: str | None, told: list[int]) -> Measured:
    return asyncio.run(
        measure(
            samplers,
            TESTS,
            config=config,
            tokenizer=CharTokenizer(),
            path=path,
            advance=told.append,
        )
    )


def test_each_set_is_answered_under_the_adapter(tmp_path: Path):
    config, told = make_config(tmp_path), list[int]()
    samplers = [FakeAdapterSampler(Script()) for _ in range(2)]
    base = run(config, samplers, None, told)
    tuned = run(config, samplers, TUNED, told)
    assert [sampler.script.calls for sampler in samplers] == [["open None", f"open {TUNED}"]] * 2
    assert base.evaluations["test"].correct.tolist() == [[True], [False], [True], [False], [True]]
    assert tuned.evaluations["test"].correct.tolist() == [[True], [True], [True], [False], [True]]
    assert tuned.evaluations["more"].accuracy.accuracy == 1.0
    assert told == [5, 2] * 2


def test_samplers_must_hold_the_same_adapter(tmp_path: Path):
    samplers = [FakeAdapterSampler(Script(), salt=salt) for salt in "ab"]
    with pytest.raises(MismatchError):
        run(make_config(tmp_path), samplers, TUNED, [])


def told(config: Config) -> dict[str, Any]:
    sampler = FakeAdapterSampler(Script())
    base, too_long = run(config, [sampler], None, []), (TooLong(8, 99), TooLong(9, 99))
    split = LoadedSplit(make_prompts(5), malformed=(), too_long=too_long, duplicates=0)
    facts = data_facts(config.data.test, split)
    return document(
        protocol=protocol(config),
        data={"test": facts, "more": {**facts, "too_long": 0}},
        base=base,
        tuned=run(config, [sampler], TUNED, []),
        notes=["something"],
    )


def test_the_document_and_its_text(tmp_path: Path):
    found = told(make_config(tmp_path))
    assert json.loads(json.dumps(found))["sets"]["test"]["base"]["accuracy"] == 0.6
    one = found["sets"]["test"]
    assert (one["tuned"]["accuracy"], one["paired_difference"]) == (0.8, pytest.approx(0.2))
    assert (one["gained"], one["lost"], one["paired_p"]) == (1, 0, 1.0)
    assert (one["prompts"], one["malformed"], one["too_long"]) == (5, 0, 2)
    assert found["base"]["what"] == "the base"
    assert (found["tuned"]["version"], found["tuned"]["what"]) == (7, "step 7")
    assert found["protocol"]["extraction"] == "tags"
    assert "seed" not in found["protocol"]
    shown = list(lines(found))
    assert shown[0].startswith("base: the base, sha256 ")
    table = """\
set   policy  prompts  accuracy              95%  well formed  form only  no answer  cut off  tokens
test  base          5     60.0%   [23.1%, 88.2%]        80.0%      20.0%      20.0%     0.0%    34.8
test  tuned         5     80.0%   [37.6%, 96.4%]        80.0%       0.0%      20.0%     0.0%    34.8
more  base          2     50.0%    [9.5%, 90.5%]       100.0%      50.0%       0.0%     0.0%    43.0
more  tuned         2    100.0%  [34.2%, 100.0%]       100.0%       0.0%       0.0%     0.0%    43.0
"""
    assert "\n".join(shown[3:8]) + "\n" == table
    assert shown[9].startswith("test: 60.0% -> 80.0%: +20.0 points [")
    assert shown[9].endswith("], p = 1.0e+00 (McNemar, exact); prompts gained: 1, lost: 0")
    assert shown[10] == "test: 2 rows are left out and not counted"
    assert shown[11].startswith("more: 50.0% -> 100.0%: +50.0 points [")
    assert shown[12:] == ["note: something"]


def test_a_reward_is_part_of_the_protocol(tmp_path: Path):
    part = {"name": "brief", "function": "a:b", "weight": 0.5}
    config = make_config(tmp_path, rewards={"functions": [part]}, eval={"metric": "brief"})
    assert protocol(config)["rewards"] == [{**part, "args": {}}]


# --- texts on which an export is compared


DEMO = Path(__file__).parents[3] / "launch" / "demo" / "tiny_gemma3"
DEMO_TOKENIZER = read_tokenizer(DEMO)


def test_texts_of_the_run_are_compared(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    assert recorded_examples(folder, DEMO_TOKENIZER, max_tokens=20) == ()
    folder.write_rollouts("step_000002", [{"text": "<answer>2</answer>"}])
    folder.write_rollouts("step_000010", [{"text": ""}, {"text": "<answer>10</answer>"}])
    (example,) = recorded_examples(folder, DEMO_TOKENIZER, max_tokens=200)
    assert DEMO_TOKENIZER.decode(example.tokens) == "<answer>10</answer>"
    assert example.prompt_tokens.tolist() == [DEMO_TOKENIZER.bos_id]
    folder.write_rollouts("test_before", [{"text": "books " * 50}] * 40)
    examples = recorded_examples(folder, DEMO_TOKENIZER, max_tokens=20)
    assert [len(example.tokens) for example in examples] == [19] * COUNT
    assert len({example.name for example in examples}) == COUNT
