"""Probes of reward functions, and a trial of rows without reference answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, get_args

import pytest

from configs.task import AnswerPlace, RewardFunction, Rewards
from rewards.answers import is_correct
from rewards.base import RewardInput, Tags
from rewards.checks.findings import find
from rewards.checks.probes import Probe, ProbeRow, make_probes
from rewards.checks.trial import Trial, run_trial
from rewards.processes.host import RewardHost
from rewards.processes.log import RewardLog

TAGS = Tags("<r>", "</r>", "<a>", "</a>")


def row(
    answer: str | None,
    *,
    number: int = 1,
    prompt: str = "ask",
    place: AnswerPlace = "tags",
    prefix: str = "",
) -> ProbeRow:
    of_row = replace(TAGS, answer=place, prefix=prefix)
    return ProbeRow(RewardInput(prompt, "", "eos", answer, {}, of_row, prompt_id=number))


def probes(one: ProbeRow, **settings: Any) -> dict[str, Probe]:
    return {probe.name: probe for probe in make_probes([one], **settings)}


def block(text: str) -> str:
    """The last answer block."""
    return text[text.rindex("<a>") + 3 : text.rindex("</a>")]


@pytest.mark.parametrize(
    ("answer", "near"),
    [
        ("72", {"answer + 1": "73", "answer - 1": "71", "digits swapped": "27"}),
        ("0", {"answer + 1": "1"}),
        ("1,099", {"answer + 1": "1,100", "answer - 1": "1,098", "digits swapped": "1,909"}),
        ("$12.50", {"answer + 1": "$12.51", "answer - 1": "$12.49"}),
        ("33 apples", {"answer + 1": "34 apples", "answer - 1": "32 apples"}),
    ],
)
def test_near_misses(answer: str, near: dict[str, str]):
    found = probes(row(answer))
    names = ("answer + 1", "answer - 1", "digits swapped")
    assert {n: block(found[n].given.completion) for n in names if n in found} == near


def test_completions_begin_with_the_prefix_and_follow_the_worked_solution():
    worked = replace(row("4", prefix="<r>"), reasoning="2+2=4")
    found = {name: probe.given for name, probe in probes(worked).items()}
    assert found["reference"].completion == "<r>2+2=4</r><a>4</a>"
    assert found["no text"].completion == "<r>"
    assert all(given.completion.startswith("<r>") for given in found.values())
    assert {name for name, given in found.items() if given.stop_reason == "length"} == {
        "cut in the answer",
        "very long text",
    }


def tried(rows: list[ProbeRow], function: str, **settings: float) -> Trial:
    """A trial with real processes."""
    part = RewardFunction(name="part", function=function)
    rewards = Rewards.model_validate({"functions": [part], **settings})

    async def run() -> Trial:
        async with RewardHost(rewards, log=RewardLog(None)) as host:
            facts = await host.start()
            return await run_trial(make_probes(rows), host, rewards=rewards, facts=facts)

    return asyncio.run(run())


def test_a_value_that_depends_on_the_batch_is_named():
    trial = tried(
        [row(None, number=n) for n in range(3)], "tests.launch.planted_rewards:batch_size"
    )
    (found,) = [one for one in find(trial, rollouts_per_step=8) if one.kind == "unstable"]
    assert "'part' has different values in two calls" in found.what
    assert "'copy of the prompt': 3.0 with others, 1.0 alone" in found.what


def test_a_function_that_hangs_is_given_up():
    rows = [row("4", number=n) for n in range(3)]
    trial = tried(rows, "tests.launch.planted_rewards:hangs", timeout_s=0.05)
    errors = [error for one in trial.scored if (error := one.outcomes["part"].error) is not None]
    assert {error.cause for error in errors} == {"timed_out"}
    assert len(errors) == len(trial.scored)
    assert errors[-1].message.startswith("given up: ")
    first = find(trial, rollouts_per_step=8)[0]
    assert (first.kind, first.fails) == ("errors", True)
    assert trial.seconds == {}


def test_a_slow_part_is_named_with_the_time_of_a_step():
    trial = tried([row(None)], "tests.launch.planted_rewards:batch_size", workers=2)
    assert trial.seconds["part"] > 0
    slow = replace(trial, seconds={"part": 0.25})
    (found,) = [one for one in find(slow, rollouts_per_step=512) if one.kind == "slow"]
    assert (
        "0.25 s a completion: 64 s for the 512 rollouts of a step, with workers = 2" in found.what
    )
    assert "slow" not in [one.kind for one in find(slow, rollouts_per_step=128)]


def test_calls_of_an_async_part_share_a_process():
    trial = tried([row(None)], "tests.launch.planted_rewards:waits")
    assert trial.calls == {"part": 16}
    slow = replace(trial, seconds={"part": 4.0})
    (found,) = [one for one in find(slow, rollouts_per_step=256) if one.kind == "slow"]
    workers = trial.rewards.workers
    assert f"{64 / workers:.0f} s for the 256 rollouts of a step" in found.what
    assert found.what.endswith(f"with workers = {workers} and concurrency = 16")
    assert "a higher concurrency" in found.advice


@pytest.mark.parametrize("place", get_args(AnswerPlace))
def test_the_reference_is_right_wherever_the_answer_is(place: AnswerPlace):
    one = row("7", place=place, prefix="so ")
    found = probes(one)
    right = [
        name
        for name, probe in found.items()
        if is_correct(probe.given.completion, answer="7", tags=one.given.tags)
    ]
    assert "reference" in right
    assert not [name for name in right if found[name].kind in {"wrong", "hack", "noise"}]
    assert len({probe.given.completion for probe in found.values()}) == len(found)
    assert ("empty tags" in found) == (place in {"tags", "boxed", "stated"})
