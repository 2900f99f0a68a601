"""A real Ray cluster of one node for the tests, and runs on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 900
"""Time limit in seconds, generous because the machine may be busy."""

OF_RUNS = {
    # With Ray's default, other tests could starve its workers.
    "RAY_worker_niceness": "0",
    # The other tests' flags save compile time, but cost more run time here.
    "XLA_FLAGS": "",
}
"""Variables of runs, in addition to those of the tests."""

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
"""

DATA = "launch/demo/data"
VALIDATED = [
    f"--data.validation.path={DATA}/validation.jsonl",
    *("--data.validation.limit=8", "--eval.every_steps=1"),
]
"""Settings for validation after every step."""


@dataclass(frozen=True)
class Head:
    """A running cluster.

    Attributes:
        gcs: address that `ray.init` takes.
        dashboard: address that `ray job` takes.
        environment: for processes that talk to it.
    """

    gcs: str
    dashboard: str
    environment: dict[str, str]

    def ray(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `ray ARGUMENTS`."""
        return subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


@contextlib.contextmanager
def running_head(*, cpus: int = 4) -> Iterator[Head]:
    """Starts a cluster with four fake TPU chips on its own ports; stops it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gg-"))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    gcs, dashboard, agent, grpc = _free_ports(4)
    environment = {
        # Ray variables of the test process belong to other clusters.
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        **OF_RUNS,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--port", str(gcs), "--dashboard-port", str(dashboard)]
    command += ["--dashboard-agent-listen-port", str(agent), "--dashboard-agent-grpc-port"]
    command += [str(grpc), "--temp-dir", str(folder / "ray"), "--num-cpus", str(cpus)]
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]
    command += ["--resources", '{"TPU": 4}', "--object-store-memory", str(256 * 2**20)]
    head = Head(f"127.0.0.1:{gcs}", environment["RAY_API_SERVER_ADDRESS"], environment)
    try:
        with _running(command, environment, folder / "log") as process:
            _wait_until_up(head, process, folder / "log")
            yield head
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running_node(head: Head, log: Path, *, without: Path | None = None) -> Iterator[None]:
    """Adds a node with four CPUs to a cluster, on this machine, and removes it.

    Args:
        head: of the cluster.
        log: file for the node's output.
        without: a folder that is empty on the node, as if hosts did not share it.
    """
    agent, grpc, metrics = _free_ports(3)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", head.gcs]
    command += ["--block", "--num-cpus", "4", "--object-store-memory", str(128 * 2**20)]
    command += ["--dashboard-agent-listen-port", str(agent), "--dashboard-agent-grpc-port"]
    command += [str(grpc), "--metrics-export-port", str(metrics)]
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]
    if without is not None:
        mounted = f"mount -t tmpfs none {shlex.quote(str(without))} && exec {shlex.join(command)}"
        command = ["unshare", "--mount", "sh", "-c", mounted]
    with _running(command, head.environment, log) as process:
        _wait_for_cpus(head, "/4.0 CPU", process, log)
        yield
    # The head notices the end with a delay.
    _wait_for_cpus(head, "/0.0 CPU", process, log)


def _wait_for_cpus(head: Head, shown: str, node: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until `ray status` shows this number of CPUs."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = head.ray("status").stdout
        if shown in status or (shown == "/0.0 CPU" and " CPU" not in status):
            return
        assert shown == "/0.0 CPU" or node.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"{status}{log.read_text()}"


@contextlib.contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_up(head: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        if head.ray("job", "list").returncode == 0:
            return
    raise AssertionError(log.read_text())


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


def train_command(config: Path, *settings: str) -> list[str]:
    """Returns the command line of `launch.train` for a configuration."""
    return [sys.executable, "-m", "launch.train", str(config), *settings]


def private_environment() -> dict[str, str]:
    """Returns an environment in which a run starts a private cluster."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return kept | OF_RUNS


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Returns when a file has `count` lines; fails if the process ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if path.is_file() and len(path.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"{path} never had {count} lines")
