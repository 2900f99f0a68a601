"""Checks that two versions of the project compute the same metrics and adapters in real runs.

    python -m tests.equivalence record PROJECT FILE [CASE ...]   runs cases with the code in PROJECT
    python -m tests.equivalence compare BEFORE AFTER    exit status 1 if they differ

Record both on the same machine. PROJECT is a folder with the source; --python names the interpreter
that runs it, by default the current one. Times are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.run_process import TIMINGS

IGNORED = frozenset(TIMINGS)
"""Groups of metrics that are not compared."""

DATA = "launch/demo/data"
SHORT = {
    "budget.steps": "6",
    "checkpoint.every_steps": "2",
    "data.test.limit": "24",
    "data.validation.limit": "24",
    "eval.every_steps": "2",
    "rollout.prompts_per_step": "6",
    "plan.slots": "24",
    "plan.micro_batch_tokens": "1536",
}
SFT = {
    "run.phases": '["sft", "grpo"]',
    "sft.train.path": f"{DATA}/demonstrations.jsonl",
    "sft.steps": "3",
    "sft.sequences_per_step": "8",
    "learner.kl_coef": "0.05",
}
CASES: Mapping[str, Mapping[str, str]] = {
    **{f"demo seed {seed}": {"run.seed": str(seed)} for seed in range(3)},
    "colocated": {
        "plan.placement": "colocated",
        "plan.samplers": "none",
        "plan.sampler_devices": "none",
    },
    "updates_per_batch": {"learner.updates_per_batch": "2"},
    "sft then grpo": SFT,
    "ahead": {"rollout.ahead": "one", "learner.importance_cap": "2"},
    "partial keep": {
        "rollout.partial": "keep",
        "rollout.cut_off": "0.5",
        "plan.segment_steps": "4",
        "learner.importance_cap": "2",
    },
    "capped": {"rollout.dynamic_sampling": "capped", "rollout.max_prompts_per_step": "12"},
    "stop strings": {"rollout.stop_strings": '["</answer>"]'},
    "int8 caches": {"plan.kv_cache": "int8"},
    "tp": {"plan.tp": "2"},
    "fsdp": {"plan.fsdp": "2"},
    "evaluation sets": {
        "eval.sets": f'[{{ name = "other", path = "{DATA}/validation.jsonl", limit = 16 }}]',
        "eval.samples": "2",
        "eval.temperature": "1.0",
    },
    "killed and resumed": {},
}
KILLED = "killed and resumed"
PATIENCE_S = 1200.0


def record(project: Path, file: Path, python: str, cases: Sequence[str]) -> None:
    """Runs cases, by default all; writes the results of each to `file`, by name of the case."""
    found = json.loads(file.read_text(encoding="utf-8")) if cases and file.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="equivalence-") as folder:
        for case in cases or CASES:
            started = time.monotonic()
            run = _run(project, python, Path(folder), case, CASES[case])
            found[case] = _computed(run)
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{case}: {time.monotonic() - started:.0f} s", flush=True)


def _run(project: Path, python: str, folder: Path, case: str, settings: Mapping[str, str]) -> Path:
    name = case.replace(" ", "-")
    given: dict[str, str] = {} if case.startswith("demo") else dict(SHORT)
    given |= {**settings, "run.dir": str(folder), "run.name": name}
    command = [python, "-m", "launch.train", "configs/demo.toml", "--wandb.mode=disabled"]
    command += [f"--{key}={value}" for key, value in given.items()]
    environment = {name: value for name, value in os.environ.items() if name[:4] != "RAY_"}
    log = folder / f"{name}.log"

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=project,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    if case == KILLED:
        process = start()
        _wait_for_lines(folder / name / "metrics.jsonl", 3, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if start().wait(PATIENCE_S):
        raise RuntimeError(f"{case} failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
    return folder / name


def _wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.is_file() or path.read_bytes().count(b"\n") < count:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{path} never had {count} lines")
        time.sleep(0.05)


def _computed(run: Path) -> dict[str, Any]:
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    steps = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
    facts = run / "checkpoints" / max(steps, key=int) / "facts" / "metadata"
    with safe_open(run / "checkpoints" / "best" / "adapter.safetensors", "numpy") as best:
        best_sha256 = best.metadata()["sha256"]
    return {
        "metrics": [_compared(json.loads(line)) for line in lines],
        "last adapter": json.loads(facts.read_text(encoding="utf-8"))["adapter_sha256"],
        "best adapter": best_sha256,
    }


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.partition("/")[0] not in IGNORED}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line for each case in which two recordings differ, naming the first difference."""
    lines = [f"{case}: not in both" for case in sorted(before.keys() ^ after.keys())]
    for case in before.keys() & after.keys():
        one, other = before[case], after[case]
        for was, now in zip(one["metrics"], other["metrics"], strict=False):
            if was != now:
                names = [n for n in was | now if was.get(n) != now.get(n)]
                lines.append(f"{case}: step {now['step']}: {', '.join(sorted(names))}")
                break
        else:
            if len(one["metrics"]) != len(other["metrics"]):
                lines.append(f"{case}: {len(one['metrics'])} and {len(other['metrics'])} steps")
        lines += [
            f"{case}: {name}"
            for name in ("last adapter", "best adapter")
            if one[name] != other[name]
        ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("project", type=Path)
    recording.add_argument("file", type=Path)
    recording.add_argument("cases", nargs="*", metavar="CASE", choices=[[], *CASES])
    recording.add_argument("--python", default=sys.executable)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(argv)
    if given.command == "record":
        record(given.project.resolve(), given.file, given.python, given.cases)
        return 0
    pair = (json.loads(path.read_text(encoding="utf-8")) for path in (given.before, given.after))
    found_lines = differences(*pair)
    print("\n".join(found_lines) or "equal")
    return 1 if found_lines else 0


if __name__ == "__main__":
    sys.exit(main())
