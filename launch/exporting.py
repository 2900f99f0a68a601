"""An export outside of training: what it needs, its process, what is said on the way."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.handles import RayExporter
from configs.base import scheme_problem
from configs.schema import Config
from launch.cluster import cluster, wait_for_devices
from launch.exits import EXIT_FAILED, EXIT_MISTAKE
from launch.preparation import open_model_files
from launch.stop import Stop, Stopped, unless
from pipeline.contracts.adapters import FORMATS, Format
from pipeline.contracts.record_files import DamagedFileError
from pipeline.contracts.rollouts import Completion, RolloutName
from pipeline.inputs.text.tokenizer import Tokenizer
from pipeline.run.run_folder import RunFolder


@dataclass(frozen=True)
class Prepared:
    """A request that nothing is wrong with, as far as can be told without devices.

    Attributes:
        config: of the run.
        adapter: the checkpoint.
        out: where to.
        formats: what is written.
        examples: what is compared; none: nothing is.
    """

    config: Config
    adapter: Path
    out: Path
    formats: tuple[Format, ...]
    examples: tuple[Completion, ...]


def prepare(
    config: Config,
    *,
    run_dir: str,
    out: str,
    formats: Sequence[Format],
    checkpoint: str | None,
    verify: bool,
) -> Prepared:
    """Checks everything that can be checked without devices.

    Raises:
        FileNotFoundError: if run, checkpoint, model or tokenizer are not there.
        ValueError: what is wrong with them, in words for the user.
    """
    problem = scheme_problem(out)
    if problem is not None:
        raise ValueError(f"command line: --out {out}: {problem}")
    target = Path(out).absolute()
    above = next(path for path in target.parents if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"--out {out}: {above} is no folder that can be written to")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--out {out}: is there already and not an empty folder")
    # The folder may have been moved since the run.
    path = Path(run_dir).resolve()
    run = config.run.model_copy(update={"dir": str(path.parent), "name": path.name})
    config = config.model_copy(update={"run": run})
    folder = RunFolder(path)
    adapter = find_checkpoint(folder, checkpoint)
    tokenizer = open_model_files(config)
    length = config.rollout.max_tokens
    examples = find_examples(folder, tokenizer, max_tokens=length) if verify else ()
    wanted = tuple(kind for kind in FORMATS if kind in formats)
    return Prepared(config, adapter, target, wanted, examples)


def working_config(prepared: Prepared) -> Config:
    """The run's configuration on one device, with the checkpoint as the adapter to open."""
    config = prepared.config
    alone = {
        "placement": "colocated",
        "learner_devices": 1,
        "samplers": None,
        "sampler_devices": None,
        "fsdp": 1,
        "tp": 1,
        "sampler_tp": None,
        "micro_batch_tokens": 8 * config.row_tokens,
    }
    start = str(prepared.adapter)
    return config.model_copy(
        update={
            "plan": config.plan.model_copy(update=alone),
            "lora": config.lora.model_copy(update={"start": start}),
        }
    )


def run(prepared: Prepared) -> int:
    """Writes, verifies and says so; returns the exit status."""
    return asyncio.run(_run(prepared))


async def _run(prepared: Prepared) -> int:
    stop = Stop(notice="stopping: nothing is written")
    stop.listen()
    config = working_config(prepared)
    partial = prepared.out.with_name(prepared.out.name + ".tmp")
    try:
        with cluster(config.plan):
            stop.listen()
            exporter = RayExporter.spawn(
                config, described=prepared.config, examples=prepared.examples
            )
            try:
                await unless(stop, _start(exporter, config))
                await unless(stop, _write(exporter, prepared))
            finally:
                exporter.kill()
    except Stopped:
        return stop.exit_status
    except (ValueError, FileNotFoundError) as mistake:
        print(str(mistake).removeprefix("lora.start: "), file=sys.stderr)
        return EXIT_MISTAKE
    except RuntimeError as failure:
        print(failure, file=sys.stderr)
        return EXIT_FAILED
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"exported: {prepared.out}", flush=True)
    return 0


async def _start(exporter: RayExporter, config: Config) -> None:
    await wait_for_devices(exporter.devices, config.plan)
    print("devices are here; loading weights", flush=True)
    print(f"exporting {await exporter.start()}", flush=True)


async def _write(exporter: RayExporter, prepared: Prepared) -> None:
    out = str(prepared.out)
    await exporter.begin(out)
    tokens = sum(len(completion.tokens) for completion in prepared.examples)
    for kind in prepared.formats:
        difference = await exporter.add(kind)
        if not prepared.examples:
            said = "written, not verified"
        elif kind == "peft" or difference is None:
            said = "written and loaded back: the same numbers"
        else:
            said = (
                f"written and loaded back: log-probs of {tokens} tokens differ by at most "
                f"{difference:.1e}"
            )
        print(f"{kind}: {said}", flush=True)
    await exporter.finish(out, prepared.formats)


_EXAMPLES = 8
"""Texts whose log-probs are compared."""


def find_checkpoint(folder: RunFolder, which: str | None) -> Path:
    """Where the adapter of a run is that `which` means.

    Args:
        folder: the run's.
        which: `best` (by validation), `last`, or a step; None: the best if one was kept, else the
            last.

    Raises:
        FileNotFoundError: naming the checkpoints that there are.
    """
    there = folder.checkpoints.iterdir() if folder.checkpoints.is_dir() else ()
    names = {path.name for path in there if path.is_dir()}
    steps = sorted((name for name in names if name.isdecimal()), key=int)
    names = {"best"} & names | set(steps)
    if steps:
        names.add("last")
    wanted = which or ("best" if "best" in names else "last")
    if wanted not in names:
        found = f"there are {', '.join(sorted(names))}" if names else "there is none yet"
        raise FileNotFoundError(f"{folder.path} has no checkpoint {wanted}; {found}")
    return folder.checkpoints / (steps[-1] if wanted == "last" else wanted)


def find_examples(
    folder: RunFolder, tokenizer: Tokenizer, *, max_tokens: int
) -> tuple[Completion, ...]:
    """Texts that the run drew, as completions of the empty prompt; only tokens are looked at.

    Args:
        folder: the run's.
        tokenizer: the model's.
        max_tokens: the longest sequence that can be scored.

    Raises:
        ValueError: if there are none.
    """
    steps = sorted(path.stem for path in folder.rollouts.glob("step_*.jsonl"))
    for name in ("test_after", "test_before", *reversed(steps)):
        rows: list[dict[str, Any]] = []
        with suppress(DamagedFileError):  # another file serves as well
            rows = folder.read_rollouts(name)
        texts = [row["text"] for row in rows if row["text"]][:_EXAMPLES]
        if texts:
            return tuple(
                _completion(number, tokenizer, tokenizer.encode(text)[: max_tokens - 1])
                for number, text in enumerate(texts)
            )
    raise ValueError(
        f"{folder.rollouts} holds no texts on which export and policy could be compared; "
        "--no-verify exports without"
    )


def _completion(number: int, tokenizer: Tokenizer, tokens: np.ndarray) -> Completion:
    return Completion(
        name=RolloutName("export", 0, prompt_id=number, sample=0),
        prompt_tokens=np.asarray([tokenizer.bos_id], np.int32),
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        stop_reason="length",
        version=0,
        adapter_sha256="",
    )
