"""Bad rewards in real reward processes: each costs only itself, under the right name.

Each function scores `bad` badly and every other text by its length.
"""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.schema import RewardFunction, Rewards
from rewards.base import Outcome, RewardInput, Tags
from rewards.processes.host import MAX_FAILURES_IN_A_ROW, RewardHost, check
from rewards.processes.log import RewardLog

uvloop = pytest.importorskip("uvloop")
TAGS = Tags("<r>", "</r>", "<a>", "</a>")
TIMEOUT_S = 1.0
KEY = "3f9c6a7e5d"

BAD = {
    # name: (body where the text is "bad", cause, part of the message or of the log)
    "loop": ("while True: pass", "timed_out", "in loop"),
    "prints_for_ever": ("while True: print('x' * 1000)", "timed_out", "further output"),
    "exits_before_its_child": (
        "if os.fork(): os._exit(3)\nos.setsid(); time.sleep(1000)",
        "died",
        "ended with status 3",
    ),
    "segfault": ("ctypes.string_at(0)", "died", "SIGSEGV"),
    "closes_all": ("os.closerange(0, 256); time.sleep(1000)", "died", "closed the connection"),
    "writes_garbage": (
        "[os.write(n, b'garbage\\n') for n in range(3, 256) if is_socket(n)]; time.sleep(1000)",
        "died",
        "wrote something else",
    ),
    "raises": (
        "raise KeyError(KEY)",
        "raised",
        "KeyError: '[SOME_API_KEY]' (bad_rewards.py:",
    ),
    "memory": ("return float(len(bytearray(20 * 2**30)))", "raised", "raised MemoryError"),
    "big_file": (
        "f = open('/dev/shm/gemma-grpo-test', 'wb'); os.unlink(f.name); f.truncate(2**31)",
        "raised",
        "File too large",
    ),
    "nan": ("return float('nan')", "not_finite", "returned nan"),
    # These are scored, and cost nothing.
    "none": ("return None", "", ""),
    "forks": ("if os.fork() == 0: os.setsid(); time.sleep(1000)", "", ""),
    "prints": ("print('seen', completion, KEY)", "", "seen bad [SOME_API_KEY]"),
}
HEAD = """
import ctypes, os, stat, time

KEY = os.environ["SOME_API_KEY"]

class NoReward: pass

def is_socket(n):
    try: return stat.S_ISSOCK(os.fstat(n).st_mode)
    except OSError: return False

"""


def inputs(*texts: str) -> list[RewardInput]:
    return [
        RewardInput("ask?", text, "eos", "33", {}, TAGS, prompt_id=number)
        for number, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = [HEAD]
    for name, (body, _, _) in BAD.items():
        code.append(f"def {name}(completion):\n    if completion == 'bad':\n")
        code.append(textwrap.indent(body, " " * 8) + "\n    return float(len(completion))\n\n")
    path = tmp_path_factory.mktemp("bad") / "bad_rewards.py"
    path.write_text("".join(code))
    return path


@dataclass(frozen=True)
class Scored:
    outcomes: list[dict[str, Outcome]]
    log: str
    notices: list[str]


@asynccontextmanager
async def started(
    *functions: RewardFunction, log: RewardLog, **settings: Any
) -> AsyncIterator[RewardHost]:
    async with RewardHost(Rewards(functions=functions, **settings), log=log) as host:
        await host.start()
        yield host


def score(functions: list[RewardFunction], *texts: str, log: Path, **settings: float) -> Scored:
    written, settings = RewardLog(log), {"timeout_s": TIMEOUT_S, **settings}

    async def run() -> list[dict[str, Outcome]]:
        async with started(*functions, log=written, **settings) as host:
            return await host.score(inputs(*texts))

    outcomes = asyncio.run(run())
    assert not left_over()
    return Scored(outcomes, log.read_text() if log.exists() else "", written.notices())


def left_over() -> list[psutil.Process]:
    """Processes that reward processes of this test have left; ended ones get time to exit."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("GEMMA_GRPO_TEST") == str(os.getpid())
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return list(psutil.wait_procs(found, timeout=60)[1])


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA_GRPO_TEST", str(os.getpid()))
    monkeypatch.setenv("SOME_API_KEY", KEY)


def function(file: Path, name: str, **settings: object) -> RewardFunction:
    return RewardFunction.model_validate({"name": name, "function": f"{file}:{name}", **settings})


@pytest.mark.parametrize(
    "names", [list(BAD)[start : start + 8] for start in range(0, len(BAD), 8)], ids=lambda n: n[0]
)
def test_promise_5_a_bad_reward_costs_only_itself(file: Path, names: list[str], tmp_path: Path):
    functions = [function(file, name) for name in names]
    # On a busy machine a process may need seconds to begin: only endless calls exceed this limit.
    scored = score(functions, "a", "bad", "ccc", log=tmp_path / "log", timeout_s=8.0)
    first, bad, third = scored.outcomes
    for name in names:
        _, cause, text = BAD[name]
        assert (first[name], third[name]) == (Outcome(1.0), Outcome(3.0)), name
        error = bad[name].error
        if not cause:
            assert error is None
            assert bad[name].value == (None if name == "none" else 3.0)
            continue
        assert error is not None, name
        assert error.cause == cause, name
        assert bad[name].value is None
        lines = [line for line in scored.log.splitlines() if f" {name}, prompt 1: " in line]
        assert any(f": {cause}: " in line for line in lines), name
        repeated = [line for line in lines if "repeated alone" in line]
        assert len(repeated) == (cause in {"timed_out", "died"}), name
        assert text in error.message or text in scored.log, name


def test_output_is_logged_with_its_prompt_and_shown_once_without_keys(file: Path, tmp_path: Path):
    functions = [function(file, name) for name in ("prints", "raises")]
    scored = score(functions, "a", "bad", "bad", log=tmp_path / "log")
    for prompt in (1, 2):
        assert f"prints, prompt {prompt}: output\n    seen bad [SOME_API_KEY]\n" in scored.log
    assert scored.notices == ["reward 'prints' prints: seen bad [SOME_API_KEY]"]
    assert KEY not in scored.log + repr(scored)


CALLS = """
import asyncio, os, time
CALLS = os.environ["GEMMA_GRPO_CALLS"]
def note(text):
    with open(CALLS, "a") as file: file.write(text + "\\n")
def sample(completion):
    note(completion)
    if completion == "die": os._exit(1)
    return float(len(completion))
def batch(inputs):
    note(",".join(one.completion for one in inputs))
    if any(one.completion == "die" for one in inputs): os._exit(1)
    return [float(len(one.completion)) for one in inputs]
async def meets(completion, *, _seen=set()):
    _seen.add(completion)
    while len(_seen) < 4: await asyncio.sleep(0.01)
    return 1.0
async def waits(completion):
    note(completion)
    await asyncio.sleep(1000 if completion == "hang" else 0)
    return 1.0
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "calls.py").write_text(CALLS)
    monkeypatch.setenv("GEMMA_GRPO_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls.py"


def noted(calls: Path) -> list[str]:
    return calls.with_suffix("").read_text().split()


def test_promise_5_a_sample_function_never_sees_a_scored_input_again(calls: Path, tmp_path: Path):
    scored = score([function(calls, "sample")], "a", "bb", "die", "dddd", log=tmp_path / "log")
    assert [row["sample"].value for row in scored.outcomes] == [1, 2, None, 4]
    assert sorted(noted(calls)) == ["a", "bb", "dddd", "die", "die"]


def test_promise_5_the_inputs_of_a_batch_that_died_are_scored_one_by_one(
    calls: Path, tmp_path: Path
):
    scored = score([function(calls, "batch")], "a", "die", "ccc", log=tmp_path / "log")
    assert [row["batch"].value for row in scored.outcomes] == [1, None, 3]
    assert noted(calls) == ["a,die,ccc", "a", "die", "ccc"]


def test_promise_5_inputs_that_wait_are_given_up_after_several_prompts_failed(
    calls: Path, tmp_path: Path
):
    texts = ["die"] * (MAX_FAILURES_IN_A_ROW + 20)
    scored = score([function(calls, "sample")], *texts, log=tmp_path / "log")
    errors = [row["sample"].error for row in scored.outcomes]
    assert {error.cause for error in errors if error} == {"died"}
    assert None not in errors
    assert len(noted(calls)) < len(texts)
    assert "given up after failures of 3 prompts" in (errors[-1].message if errors[-1] else "")
    assert "given up" in scored.log


def test_promise_5_a_bad_prompt_costs_no_other_prompt(calls: Path, tmp_path: Path):
    async def run() -> list[Outcome]:
        bad, one, other = inputs("die", "a", "bb")
        async with started(function(calls, "sample"), log=RewardLog(tmp_path / "log")) as host:
            scored = await host.score([bad] * 8 + [one] * 4 + [other] * 4)
        return [row["sample"] for row in scored]

    outcomes = asyncio.run(run())
    assert [outcome.value for outcome in outcomes] == [None] * 8 + [1.0] * 4 + [2.0] * 4
    last = outcomes[7].error
    assert last is not None
    assert last.message.startswith("given up after failures of 3 completions of the prompt: ")
    assert noted(calls).count("die") < 8


def test_an_async_process_takes_what_comes_while_it_scores(calls: Path, tmp_path: Path):
    async def run() -> list[dict[str, Outcome]]:
        part = function(calls, "meets", concurrency=4)
        async with started(part, log=RewardLog(tmp_path / "log")) as host:
            # The first three wait in the process for a fourth.
            first = asyncio.create_task(host.score(inputs(*"abc")))
            await asyncio.sleep(0)
            return [*await host.score(inputs("d")), *await first]

    assert asyncio.run(run()) == [{"meets": Outcome(1.0)}] * 4


def test_promise_5_an_async_call_that_hangs_is_repeated_once(calls: Path, tmp_path: Path):
    parts = [function(calls, "waits", concurrency=2, timeout_s=1.0)]
    scored = score(parts, "a", "hang", "b", "c", log=tmp_path / "log")
    error = scored.outcomes[1]["waits"].error
    assert error is not None
    assert (error.cause, error.message) == ("timed_out", "took longer than 1 s")
    assert [row["waits"].value for row in scored.outcomes] == [1.0, None, 1.0, 1.0]
    assert sorted(noted(calls)) == ["a", "b", "c", "hang", "hang"]


def test_several_processes_share_the_inputs(calls: Path, tmp_path: Path):
    texts = [str(number) * (number + 1) for number in range(9)]
    scored = score([function(calls, "sample", workers=3)], *texts, log=tmp_path / "log")
    assert [row["sample"].value for row in scored.outcomes] == [len(text) for text in texts]
    assert sorted(noted(calls)) == sorted(texts)


def test_all_functions_that_cannot_be_used_are_reported(file: Path):
    parts = [
        *(function(file, name) for name in ("loop", "no_such", "NoReward")),
        function(file, "none", concurrency=4),
    ]
    with pytest.raises(ValueError, match="no_such") as caught:
        check(Rewards(functions=tuple(parts)))
    missing, silent, single = str(caught.value).splitlines()
    assert missing.startswith(f"rewards.functions: {file}:no_such: {file} has no 'no_such'")
    assert "objects of the class cannot be called" in silent
    assert "concurrency has no effect: the function is not async; set workers instead" in single


def test_code_that_changes_during_a_run_is_not_used(calls: Path, tmp_path: Path):
    async def run() -> list[Outcome]:
        async with started(function(calls, "sample"), log=RewardLog(tmp_path / "log")) as host:
            found = await host.score(inputs("a"))
            calls.write_text(CALLS.replace("float(len(completion))", "99.0"))  # noqa: ASYNC240
            found += await host.score(inputs("die"))
            found += await host.score(inputs("bb"))
        return [row["sample"] for row in found]

    first, died, later = asyncio.run(run())
    assert first == Outcome(1.0)
    for outcome in (died, later):
        assert outcome.value is None
        assert outcome.error is not None
        assert outcome.error.cause == "not_started"
        assert "its file has changed since the run was started" in outcome.error.message


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_promise_5_a_process_that_was_killed_while_it_was_idle_costs_nothing(
    calls: Path, loop: Callable[[], asyncio.AbstractEventLoop]
):
    async def work() -> list[dict[str, Outcome]]:
        async with started(function(calls, "sample"), log=RewardLog(None)) as host:
            (process,) = (one for part in host._parts for one in part._processes if one)
            assert process._process is not None
            process._process.kill()
            process._process.wait()
            while not process._answers.at_eof():  # noqa: ASYNC110 - its end is not noticed
                await asyncio.sleep(0.01)
            return await host.score(inputs("a", "bb"))

    with asyncio.Runner(loop_factory=loop) as runner:  # Ray's actors have uvloop's
        scored = runner.run(work())
    assert [row["sample"] for row in scored] == [Outcome(1.0), Outcome(2.0)]
