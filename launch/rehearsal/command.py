"""The rehearsal command: cluster and actors of a run, every phase once, nothing kept but caches."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.handles import RunActors
from configs.schema import Config
from launch.cluster import cluster, wait_for_devices
from launch.exits import EXIT_FAILED
from launch.preparation import Prepared, prepare
from launch.rehearsal.expected import Target
from launch.rehearsal.phases import Rehearsal, Setup
from launch.rehearsal.report import Result, lines, report
from launch.rehearsal.scratch import rehearsal_config, temporary_run_folder
from launch.stop import Stop, Stopped, unless
from pipeline.contracts.clock import Clock
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.model_shape import DTYPE_BYTES, ModelShape
from pipeline.contracts.topology import GIB
from pipeline.inputs.hub.hf_folder import flax_folder
from pipeline.inputs.hub.model_shape import shape_of
from pipeline.inputs.hub.model_source import HF
from pipeline.inputs.hub.random_folder import write_random_folder, write_random_weights
from pipeline.inputs.text.tokenizer_files import JSON, SENTENCEPIECE
from pipeline.plan.calibration import CalibrationStart, calibrate
from pipeline.plan.cost_model.hardware import topology_of
from pipeline.plan.size_controller import SizeController
from pipeline.rollout.workers import Workers

_ADAPTER_COPIES = 4
"""Adapters on disk: a checkpoint with both moments, and the best version."""
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Request:
    """Request of a rehearsal.

    Attributes:
        config: of the run.
        random_weights: use random weights instead of the model's.
        json_file: file for the figures; None: they are only shown.
        started: start of this process by `time.monotonic`.
    """

    config: Config
    random_weights: bool
    json_file: Path | None
    started: float


def rehearse(request: Request) -> int:
    """Rehearses and prints the report; returns the exit status.

    Raises:
        FileNotFoundError: if model, tokenizer or data are missing.
        ValueError: with the mistakes in the request, in words for the user.
    """
    config = request.config
    shape, temporary = _shape(request), rehearsal_config(config)
    target = _target(config, shape)
    if shape is not None:
        _check_disk(config, shape, weights=request.random_weights)
    # Until `Stop` listens: without a handler SIGTERM would leave the folder behind.
    signal.signal(signal.SIGTERM, _exit)
    with temporary_run_folder(temporary) as folder:
        if request.random_weights:
            assert shape is not None
            prepared = _prepare_random(temporary, shape, folder / "model")
        else:
            prepared = prepare(temporary, extend=None, tracked=False)
        beginning = CalibrationStart.of(prepared.config, prepared.folder.plan)
        return asyncio.run(_run(request, prepared, target, beginning))


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


async def _run(
    request: Request, prepared: Prepared, target: Target | None, beginning: CalibrationStart
) -> int:
    stop = Stop(notice="stopping: nothing is kept")
    stop.listen()
    try:
        with cluster(prepared.config.plan):
            stop.listen()
            actors = RunActors.spawn(prepared.config)
            try:
                work = _rehearse(actors, prepared, target, beginning, started=request.started)
                result = await unless(stop, work)
            finally:
                actors.kill()
    except Stopped:
        return stop.exit_status
    except OutOfMemory as error:
        print(f"FAILED: start: {error}", file=sys.stderr)
        return EXIT_FAILED
    _report(request, result)
    return 0 if result.failure is None else EXIT_FAILED


async def _rehearse(
    actors: RunActors,
    prepared: Prepared,
    target: Target | None,
    beginning: CalibrationStart,
    *,
    started: float,
) -> Result:
    config, say = prepared.config, partial(print, flush=True)
    workers = Workers(
        samplers=actors.samplers,
        learner=actors.learner,
        scorer=actors.scorer,
        sizes=SizeController(config, beginning.sizes, say),
        config=config,
        clock=Clock(started),
        # Never set: the command cancels the rehearsal as a whole.
        stop=asyncio.Event(),
        one_process=actors.one_process,
    )
    calibration = partial(
        calibrate,
        workers.sizes,
        beginning,
        sampler=(workers.sampler_processes[0], actors.samplers[0]),
        learner=(workers.learner_process, actors.learner),
    )
    await wait_for_devices(actors.devices, config.plan)
    await actors.started()
    waited_s = time.monotonic() - started
    say("Devices acquired; loading weights and compiling.")
    rehearsal = Rehearsal(
        Setup(
            config=config,
            data=prepared.data,
            tokenizer=prepared.tokenizer,
            workers=workers,
            processes=[actors.learner, *actors.samplers],
            calibrate=calibration,
            restore=actors.learner.restore,
            export=prepared.folder.export,
            target=target,
        ),
        say,
    )
    await asyncio.gather(rehearsal.start(waited_s=waited_s), actors.scorer.start())
    return await rehearsal.run()


def _shape(request: Request) -> ModelShape | None:
    """Returns the model's shape; None for a flax checkpoint without a configuration file."""
    path = request.config.model.path
    try:
        return shape_of(request.config)
    except FileNotFoundError:
        folder = Path(path)
        if request.random_weights or not folder.is_dir() or flax_folder(folder) is None:
            raise
    return None


def _target(config: Config, shape: ModelShape | None) -> Target | None:
    """Returns the target of the plan; None if the model's shape or the kind of GPU is unknown."""
    if shape is None or config.plan.platform == "gpu":
        return None
    return Target(shape, topology_of(config, None))


def _report(request: Request, result: Result) -> None:
    """Prints the report and writes its figures, if a file was named."""
    figures = report(request.config.run.name, result)
    figures["random_weights"] = request.random_weights
    print()
    for line in lines(figures):
        print(line, flush=True)
    if request.json_file is not None:
        text = json.dumps(figures, indent=2, ensure_ascii=False)
        request.json_file.write_text(text + "\n", encoding="utf-8")


def _check_disk(config: Config, shape: ModelShape, *, weights: bool) -> None:
    """Refuses a rehearsal for which the disk is too small.

    Raises:
        ValueError: with the needed and the free space.
    """
    loaded = DTYPE_BYTES[config.model.dtype]
    exported = {**DTYPE_BYTES, "float16": 2}[config.export.dtype or config.model.dtype]
    adapter = _FLOAT_BYTES * shape.adapter_parameters(config.lora)
    needed = shape.parameters * (exported + (loaded if weights else 0)) + _ADAPTER_COPIES * adapter
    folder = Path(config.run.dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"run.dir = {config.run.dir}: a rehearsal temporarily writes {needed / GIB:.1f} GiB "
            f"there, and {free / GIB:.1f} are free; choose a folder on a larger disk"
        )


def _prepare_random(config: Config, shape: ModelShape, folder: Path) -> Prepared:
    """Checks everything, then writes the random weights.

    Raises:
        FileNotFoundError: if tokenizer or data are missing.
        ValueError: with the mistakes in the request, in words for the user.
    """
    config, dtype = _with_random_model(config, shape, folder), config.model.dtype
    weights_bytes = shape.parameters * DTYPE_BYTES[dtype]
    prepared = prepare(config, extend=None, tracked=False, weights_bytes=weights_bytes)
    print(f"writing {shape.parameters:,} random weights, {dtype}", flush=True)
    write_random_weights(folder, shape, dtype=dtype, seed=config.run.seed)
    return prepared


def _with_random_model(config: Config, shape: ModelShape, folder: Path) -> Config:
    """Writes the model folder except for weights; returns the configuration that uses it.

    Raises:
        FileNotFoundError: if there is no tokenizer.
        ValueError: if the tokenizer is only available together with the weights.
    """
    model, tokenizer = config.model, None
    if model.tokenizer is None:
        if not model.path.startswith(HF) and "://" in model.path:
            raise ValueError(
                f"command line: --random-weights: {model.path} provides its tokenizer only with "
                "the weights; set model.tokenizer to a local one"
            )
        if "://" in model.path:
            model = model.model_copy(update={"tokenizer": model.path})
        else:
            tokenizer = _tokenizer_folder(Path(model.path))
    write_random_folder(folder, shape, tokenizer=tokenizer)
    return config.model_copy(update={"model": model.model_copy(update={"path": str(folder)})})


def _tokenizer_folder(folder: Path) -> Path:
    if any((folder / name).is_file() for name in (SENTENCEPIECE, JSON)):
        return folder
    raise FileNotFoundError(
        f"command line: --random-weights: {folder} has no tokenizer, neither {SENTENCEPIECE} nor "
        f"{JSON}; set model.tokenizer to a local one"
    )
