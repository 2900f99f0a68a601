"""Submits a run to a Ray cluster as a job; see `DESCRIPTION`. Called by launch/submit.sh."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from configs.base import HOME_VARIABLE
from configs.cli import CommandLine, parse
from configs.load import config_to_json, load_config
from configs.schema import Config
from launch.exits import EXIT_FAILED, Failure, exit_status, say
from launch.flags import SUBMITTED
from launch.source import PROJECT, copy_source, copy_user_files
from launch.train import train_flags

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from actors.placement import Node

DESCRIPTION = """\
Submit a run to a Ray cluster as a job: launch.train with the same arguments. Uploads the project's
source, the configuration, and for reward functions of yours the Python files of the current folder
and, for file.py:function, of the file's folder. Nothing else is uploaded: data and models are read
where they are, at the same paths on the cluster's host.
Keys (WANDB_API_KEY, HF_TOKEN, those of run.mirror) are never put into the job, because every user
of the cluster can read its metadata: set them where Ray is started. The cluster is
RAY_API_SERVER_ADDRESS, by default the one on this machine; its Python is GEMMA_GRPO_PYTHON, by
default .venv/bin/python of this project.
Exit status: that of the run, 1 if the job was stopped, 0 with --no-wait; 2 a mistake in the
request."""
JOB_FOLDER = "submitted"
"""Folder of the job's configuration, in the upload."""
GENERATE = "ray get-auth-token --generate"
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_STOP_S = 600
"""Ray kills a job this long after SIGTERM; its default, 3 s, is too short for a checkpoint."""
_ANSWER_S = 30.0
_OF_WANDB = ("WANDB_RUN_GROUP", "WANDB_TAGS")
_MOST_NODES = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: _submit(*_read(argv)))


def _read(argv: Sequence[str] | None) -> tuple[CommandLine, Config]:
    """Parses the arguments and reads the configuration."""
    flags = train_flags()
    flags.add_argument("--no-wait", action="store_true", help="do not wait for the end of the job")
    flags.add_argument(
        "--node",
        help="run on this node, whose disk gets the run folder: its address, or LABEL=VALUE of "
        "Ray's node labels (default: the head if it has the devices, else a node that has them)",
    )
    flags.add_argument(
        "--without-token",
        action="store_true",
        help="submit to a cluster that takes jobs from everybody who can reach it",
    )
    command = parse(argv, prog="launch/submit.sh", description=DESCRIPTION, flags=flags)
    if command.flags.dry_run:
        raise ValueError("--dry-run: not possible for a job; use python -m launch.train")
    try:
        config = load_config(command.path, command.overrides)
    except ValueError:
        _dry_run(PROJECT, command)  # tells the mistakes in data and model, too
        raise
    if not Path(command.path).is_file():
        raise ValueError(f"{command.path} is not a file; CONFIG.toml comes first")
    return command, config


def _submit(command: CommandLine, config: Config) -> int:
    """Submits the job, and waits for its end; returns the exit status."""
    use_token()
    address = os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265").rstrip("/")
    variables = {
        HOME_VARIABLE: str(Path.cwd()),
        "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        **{name: os.environ[name] for name in _OF_WANDB if name in os.environ},
    }
    with tempfile.TemporaryDirectory() as folder:
        _fill(Path(folder), config)
        _dry_run(Path(folder), command)
        # Id and name contain the run's name; `ray job stop` takes the id, which is unique.
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        with one_sentence(address):
            client = connect(address, without_token=command.flags.without_token)
            job: str = client.submit_job(
                # `exec` makes the run the job's first process, so that signals reach it.
                entrypoint=f"exec {shlex.join(_train(JOB_FOLDER, *_flags(command.flags)))}",
                submission_id=f"{config.run.name}-{stamp}-{secrets.token_hex(2)}",
                metadata={"job_name": config.run.name},
                runtime_env={"working_dir": folder, "env_vars": variables},
                entrypoint_label_selector=_node_labels(command.flags.node, config, address),
            )
    # With an address: Ray's commands refuse to choose where a private cluster runs, too.
    stop = _ray_job("stop", address, job)
    say(f"submitted job {job}; to stop it with a checkpoint: {stop}")
    return 0 if command.flags.no_wait else _follow(client, job, address)


def _fill(upload: Path, config: Config) -> None:
    """Writes what the job needs; the configuration as a run folder."""
    copy_source(upload)
    copy_user_files([part.function for part in config.rewards.functions], Path.cwd(), upload)
    file = upload / JOB_FOLDER / "config.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(config_to_json(config), encoding="utf-8")


def _dry_run(upload: Path, command: CommandLine) -> None:
    """Checks the request with the files of the job, so that those missing there are found.

    Raises:
        SystemExit: if there are mistakes, which the dry run has told.
    """
    ours = {"PYTHONPATH", "PYTHONSAFEPATH"}  # set by launch/submit.sh
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    job = {HOME_VARIABLE: str(Path.cwd()), SUBMITTED: "1", "PYTHONDONTWRITEBYTECODE": "1"}
    settings = [f"--{key}={text}" for key, text in command.overrides]
    path = str(Path(command.path).absolute())
    done = subprocess.run(
        [*_train(path, *settings), *_flags(command.flags), "--dry-run"],
        cwd=upload,
        env=kept | job,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def _train(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.train", *arguments]


def _flags(flags: argparse.Namespace) -> list[str]:
    """Those flags that are of `launch.train`."""
    extend = [] if flags.extend is None else ["--extend", flags.extend]
    accept = [f"--accept={key}" for key in flags.accept]
    return [*extend, *accept, *([] if flags.supervise else ["--no-supervise"])]


# --- the cluster


def _ray_job(action: str, address: str, job: str) -> str:
    """A command of Ray about a job, as it works in another shell."""
    mode = f"{_MODE}={os.environ[_MODE]} " if _MODE in os.environ else ""
    return f"{mode}ray job {action} --address {address} {job}"


def has_token() -> bool:
    """Whether this user has a token of Ray, which `ray start` then asks for."""
    return _TOKEN in os.environ or _token_file().is_file()


def use_token() -> None:
    """Sends the token, if there is one: Ray's client does so only with RAY_AUTH_MODE=token."""
    if has_token():
        os.environ.setdefault(_MODE, "token")
    if _TOKEN_PATH not in os.environ and _token_file().is_file():
        with suppress(PermissionError):  # of another user
            _token_file().chmod(0o600)  # Ray makes it readable to everybody


def _token_file() -> Path:
    return Path(os.environ.get(_TOKEN_PATH) or Path.home() / ".ray" / "auth_token")


def connect(address: str, *, without_token: bool) -> JobSubmissionClient:
    """Connects to the cluster.

    Raises:
        ValueError: if it asks nobody for a token, and this is not accepted.
    """
    import requests
    from ray.job_submission import JobSubmissionClient

    logging.disable(logging.INFO)  # of Ray's client
    client = JobSubmissionClient(address)
    is_open = requests.get(f"{address}/api/version", timeout=_ANSWER_S).ok
    if is_open and not without_token:
        raise ValueError(
            f"the cluster at {address} has no token: everybody who can reach it can run programs "
            f"there. Generate one ({GENERATE}) and start the cluster again, or submit with "
            "--without-token"
        )
    return client


@contextmanager
def one_sentence(address: str) -> Iterator[None]:
    """Raises a refusal of the cluster as one sentence, with the remedy."""
    import requests
    from ray.exceptions import AuthenticationError
    from ray.util.state.exception import RayStateApiException

    try:
        yield
    except AuthenticationError:
        raise ValueError(
            f"the cluster at {address} refuses the token of this command, or there is none: copy "
            f"~/.ray/auth_token of its host here, or set RAY_AUTH_TOKEN ({GENERATE} makes one "
            "before the cluster is started)"
        ) from None
    except (ConnectionError, requests.exceptions.RequestException):
        raise ValueError(
            f"no Ray cluster answers at {address}; start one with: {GENERATE} && ray start --head "
            "(or set RAY_API_SERVER_ADDRESS)"
        ) from None
    except (RuntimeError, RayStateApiException) as error:  # what the server answers, in Ray's words
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
        if "No available agent" in why:
            why += (
                " Another program of its host may have the port of Ray's agent (52365): start the "
                "cluster again with ray start --head --dashboard-agent-listen-port 0"
            )
        raise Failure(f"the cluster at {address} refuses the job: {why}") from None


def _node_labels(node: str | None, config: Config, address: str) -> dict[str, str] | None:
    """Ray's label selector of the node of the run's process, whose actors reserve the devices.

    None: the head, Ray's default.

    Raises:
        ValueError: if no node suits the plan, or has the address `node`.
    """
    from ray.util.state import list_nodes

    from actors.placement import NODE_LABEL, Node, home_node
    from launch.preparation import placed

    if node is not None and "=" in node:
        label, _, value = node.partition("=")
        return {label: value}
    alive = [
        one for one in list_nodes(address, detail=True, limit=_MOST_NODES) if one.state == "ALIVE"
    ]
    alive.sort(key=lambda one: (not one.is_head_node, one.node_ip, one.node_id))
    nodes = [Node(one.node_id, one.node_name, one.node_ip, one.resources_total) for one in alive]
    found = home_node(placed(config).plan, nodes) if node is None else _named(node, nodes)
    if found is nodes[0]:
        return None
    say(f"the run's process and folder will be on {found}")
    return {NODE_LABEL: found.ident}


def _named(node: str, nodes: Sequence[Node]) -> Node:
    for one in nodes:
        if node in {one.address, one.host}:
            return one
    there = ", ".join(str(one) for one in nodes)
    raise ValueError(f"--node {node}: the cluster has no such node; it has {there}")


def _follow(client: JobSubmissionClient, job: str, address: str) -> int:
    """Shows what the job prints until it ends; returns its exit status."""
    from ray.job_submission import JobStatus

    async def show() -> None:
        async for text in client.tail_job_logs(job):
            print(text, end="", flush=True)

    again = _ray_job("logs --follow", address, job)
    try:
        asyncio.run(show())
        info = client.get_job_info(job)
    except KeyboardInterrupt:
        say(f"\njob {job} goes on; to see it again: {again}", file=sys.stderr)
        raise
    except Exception as error:  # noqa: BLE001  # of requests, aiohttp or Ray
        raise Failure(
            f"the connection to job {job} is lost ({type(error).__name__}); if its cluster still "
            f"runs, so does the job: {again}"
        ) from None
    if info.status == JobStatus.SUCCEEDED:
        return 0
    code = info.driver_exit_code
    why = f"with exit status {code}" if code else info.message or ""
    say(f"job {job}: {str(info.status).lower()} {why}", file=sys.stderr)
    return code or EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
