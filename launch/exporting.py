"""An export outside of training: what it needs, its process, what is said on the way."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.handles import RayExporter
from configs.base import scheme_problem
from configs.schema import Config
from launch.cluster import cluster, wait_for_devices
from launch.exits import EXIT_FAILED, EXIT_MISTAKE
from launch.preparation import open_model_files
from launch.stop import Stop, Stopped, unless
from pipeline.contracts.adapters import FORMATS, Format
from pipeline.contracts.rollouts import Completion
from pipeline.inputs.hub.export_request import find_checkpoint, find_examples
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
