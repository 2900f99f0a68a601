"""A real Ray cluster of one node for the tests, and runs on it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 900
"""Time limit in seconds, generous because the machine may be busy."""
_POLL_S = 0.5
"""Between two questions to a cluster, which cost it more than those to a file."""


CONFIG = """
[run]
name = "{name}"
dir = "{runs}"

[model]
path = "launch/demo/tiny_gemma3"
dtype = "float32"

[lora]
rank = 4

[data]
train = {{ path = "launch/demo/data/train.jsonl", limit = 64 }}
validation = 0
test = {{ path = "launch/demo/data/test.jsonl", limit = 8 }}

[rewards]
functions = [{{ name = "exact", function = "rewards.correctness:exact_answer" }}]

[rollout]
group_size = 4
prompts_per_step = 4
max_prompt_tokens = 64
max_new_tokens = 40

[learner]
lr = 1e-3

[plan]
platform = "cpu"
placement = "split"
slots = 16
slot_buckets = []  # one program fewer to compile
# One packed row, so that one shape is compiled.
row_tokens = 832
micro_batch_tokens = 832

[budget]
steps = 2

[checkpoint]
every_steps = 2
""".replace("launch/demo", f"{PROJECT}/launch/demo")

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
DATA = "launch/demo/data"
VALIDATED = [
    f"--data.validation.path={DATA}/validation.jsonl",
    *("--data.validation.limit=8", "--eval.every_steps=1"),
]
"""Settings for validation after every step."""


def private_environment() -> dict[str, str]:
    """Returns the environment of commands, in which they start private clusters."""
    kept = {
        key: value
        for key, value in os.environ.items()
        # Ray's variables of the test process belong to other clusters. Processes that tests kill
        # may not write into the test process's compilation cache; they have their own.
        if not key.startswith("RAY_") and key != "JAX_COMPILATION_CACHE_DIR"
    }
    return kept | {
        # With Ray's default, other tests could starve its workers.
        "RAY_worker_niceness": "0",
        # Ray would start a worker for each CPU, which no actor uses: theirs have other variables.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        # The other tests' flags save compile time, but cost more run time here.
        "XLA_FLAGS": "",
    }


def start(
    command: Sequence[str], environment: Mapping[str, str], *, folder: Path = PROJECT
) -> subprocess.Popen[str]:
    """Starts a command in a session of its own."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], text: str = "") -> tuple[int, str]:
    """Gives a process its input and waits for its end; returns its status and output."""
    try:
        output, _ = process.communicate(text, timeout=PATIENCE_S)
    finally:
        process.terminate()  # no effect if it has ended
    return process.returncode, output


def family(process: int) -> list[psutil.Process]:
    """Returns a process and all processes below it."""
    root = psutil.Process(process)
    return [root, *root.children(recursive=True)]


def below(process: int, text: str) -> list[psutil.Process]:
    """Returns the processes below one that have a text in their command lines, nearest first."""
    found = []
    for one in family(process)[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if text in " ".join(one.cmdline()):
                found.append(one)
    return found


@dataclass(frozen=True)
class Head:
    """A running cluster: address of its GCS, process, environment of what talks to it."""

    gcs: str
    process: int
    environment: dict[str, str]

    def start(self, *command: object) -> subprocess.Popen[str]:
        """Starts a command that joins the cluster."""
        environment = self.environment | {"RAY_ADDRESS": self.gcs}
        return start([str(argument) for argument in command], environment)

    def run(self, *command: object, text: str = "") -> tuple[int, str]:
        """Runs a command that joins the cluster; returns its status and output."""
        return finish(self.start(*command), text)

    def is_up(self) -> bool:
        """Whether jobs can be submitted, and drivers can join."""
        with contextlib.suppress(OSError):  # the server is not up, or not with all its parts
            return bool(self.get("/api/jobs/")) and self.nodes() == 1
        return False

    def nodes(self) -> int:
        """Returns the number of nodes."""
        return self.get("/api/v0/nodes?limit=100").count('"ALIVE"')

    def get(self, path: str) -> str:
        """Returns the dashboard's answer to a request."""
        token = Path(self.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
        request = urllib.request.Request(
            self.environment["RAY_API_SERVER_ADDRESS"] + path,
            headers={"Authorization": f"Bearer {token}"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return str(answer.read(), "utf-8")


@contextlib.contextmanager
def running_head(*, cpus: int = 4) -> Iterator[Head]:
    """Starts a cluster with some CPUs and four fake TPU chips; stops it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gg-"))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    gcs, dashboard, agent, grpc = _free_ports(4)
    environment = private_environment() | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = _start(
        *("--head", "--no-monitor", "--disable-usage-stats", '--resources={"TPU": 4}'),
        *(f"--port={gcs}", f"--dashboard-port={dashboard}", f"--temp-dir={folder / 'ray'}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"),
        *(f"--num-cpus={cpus}", f"--object-store-memory={256 * 2**20}"),
    )
    starting = Head(f"127.0.0.1:{gcs}", 0, environment)
    try:
        with _running(command, environment, folder / "log", starting.is_up) as process:
            yield replace(starting, process=process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running_node(head: Head, home: Path, *, cpus: int = 4, **variables: str) -> Iterator[int]:
    """Adds a node to a cluster, on this machine, and removes it; yields the pid of its Ray.

    `home` is the user's folder there; its name is that of the node.
    """
    home.mkdir()
    log, before = home / "log", head.nodes()
    agent, grpc, metrics = _free_ports(3)
    command = _start(
        *(f"--address={head.gcs}", f"--node-name={home.name}", f"--metrics-export-port={metrics}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"),
        *(f"--num-cpus={cpus}", f"--object-store-memory={128 * 2**20}"),
    )
    environment = head.environment | {"HOME": str(home)} | variables
    with _running(command, environment, log, lambda: head.nodes() > before) as process:
        yield process
    # The head notices the end with a delay.
    wait_until(lambda: head.nodes() <= before, every_s=_POLL_S)


def _start(*options: str) -> list[str]:
    """The command line of a `ray start` with worker ports that nobody else has."""
    return [*RAY, "start", "--block", "--min-worker-port=0", "--max-worker-port=0", *options]


@contextlib.contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], log: Path, is_up: Callable[[], bool]
) -> Iterator[int]:
    """Runs a `ray start`; yields its process when it is up.

    On a busy machine Ray gives up after 30 s; then it is started again.
    """

    def begin() -> subprocess.Popen[bytes]:
        with log.open("a") as output:
            return subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    deadline, process = time.monotonic() + PATIENCE_S, begin()
    try:
        while not is_up():
            assert time.monotonic() < deadline, log.read_text()
            if process.poll() is not None:
                process = begin()
            time.sleep(_POLL_S)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def write_config(folder: Path, *, name: str) -> Path:
    """Writes the configuration of a small real run of the demo's model."""
    path = folder / f"{name}.toml"
    path.write_text(CONFIG.format(name=name, runs=folder / "runs"))
    return path


def launch(name: str, *arguments: object) -> list[str]:
    """Returns the command line of a command."""
    return [sys.executable, "-m", f"launch.{name}", *map(str, arguments)]


def start_submission(
    head: Head, *arguments: object, folder: Path = PROJECT, **variables: str
) -> subprocess.Popen[str]:
    """Starts `launch/submit.sh`."""
    environment = head.environment | {"GEMMA_GRPO_PYTHON": sys.executable} | variables
    command = ["bash", f"{PROJECT}/launch/submit.sh", *map(str, arguments)]
    return start(command, environment, folder=folder)


def ray(head: Head, *arguments: object) -> subprocess.Popen[str]:
    """Starts a command of Ray in the project's folder."""
    return start([*RAY, *map(str, arguments)], head.environment)


def submit(head: Head, *arguments: object, **given: Any) -> tuple[int, str]:
    """Submits a run as a job; returns the status and output of `launch/submit.sh`."""
    return finish(start_submission(head, *arguments, **given))


SECRETS = {
    "WANDB_API_KEY": "5ec7e7" * 6 + "5ec7",
    "HF_TOKEN": "hf_canary5ec7e7",
    "AWS_SECRET_ACCESS_KEY": "aws+canary/5ec7e7",
    "JUDGE_API_KEY": "sk-canary5ec7e7",
}
"""Variables of the process that submits a run: their values must be written nowhere."""


@dataclass(frozen=True)
class FinishedJob:
    """A submitted run of two steps: its folder, and what its submission returned."""

    run: Path
    status: int
    output: str


def wait_until(
    is_so: Callable[[], object],
    process: subprocess.Popen[str] | None = None,
    *,
    every_s: float = 0.1,
) -> None:
    """Returns when a condition holds; fails if the process ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(every_s)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str] | None = None) -> None:
    """Returns when a file has `count` lines; fails if the process ends before."""
    wait_until(lambda: path.is_file() and path.read_bytes().count(b"\n") >= count, process)


def wait_for_events(run: Path, event: str, count: int, process: subprocess.Popen[str]) -> None:
    """Returns when the journal of a run has an event `count` times."""
    journal, text = run / "journal.jsonl", f'"event": "{event}"'
    wait_until(lambda: journal.is_file() and journal.read_text().count(text) >= count, process)


def check_time(run: Path) -> dict[str, float]:
    """Checks that the phases sum up to the time of an ended run; returns its seconds by phase.

    Waits for devices do not count as used.
    """
    summary = json.loads((run / "summary.json").read_text())
    seconds: dict[str, float] = summary["time"]["seconds"]
    used_s = sum(seconds.values()) - seconds.get("device_wait", 0.0)
    assert used_s == pytest.approx(summary["wall_s"], abs=0.1), summary
    return seconds
