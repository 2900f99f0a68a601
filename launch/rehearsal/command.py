"""A rehearsal: cluster and actors as in a run, every phase once; only measured speeds are kept."""

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
from launch.rehearsal.account import Result
from launch.rehearsal.expected import Target
from launch.rehearsal.phases import Rehearsal, Stage
from launch.rehearsal.scratch import rehearsed, scratch
from launch.rehearsal.table import lines, report
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
"""Of a checkpoint, moments included, and of the best version."""
_FLOAT = 4


@dataclass(frozen=True)
class Request:
    """What is to be rehearsed.

    Attributes:
        config: of the run.
        random_weights: in place of the model's.
        json_file: where the figures go, too; None: nowhere.
        started: when this process did.
    """

    config: Config
    random_weights: bool
    json_file: Path | None
    started: float


def rehearse(request: Request) -> int:
    """Rehearses and tells what was found; returns the exit status.

    Raises:
        FileNotFoundError: if model, tokenizer or data are not there.
        ValueError: what is wrong with the request, in words for the user.
    """
    config = request.config
    shape, aside = _shape(request), rehearsed(config)
    target = _target(config, shape)
    if shape is not None:
        _check_disk(config, shape, weights=request.random_weights)
    # Until the cluster's own listener: SIGTERM alone would leave the folder behind.
    signal.signal(signal.SIGTERM, _end)
    with scratch(aside) as folder:
        if request.random_weights:
            assert shape is not None
            prepared = _prepare_random(aside, shape, folder / "model")
        else:
            prepared = prepare(aside, extend=None, tracked=False)
        beginning = CalibrationStart.of(prepared.config, prepared.folder.plan)
        return asyncio.run(_run(request, prepared, target, beginning))


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


async def _run(
    request: Request, prepared: Prepared, target: Target | None, beginning: CalibrationStart
) -> int:
    stop = Stop(notice="stopping: nothing is left behind")
    stop.listen()
    try:
        with cluster(prepared.config.plan):
            stop.listen()
            crew = RunActors.spawn(prepared.config)
            try:
                work = _rehearse(crew, prepared, target, beginning, started=request.started)
                found = await unless(stop, work)
            finally:
                crew.kill()
    except Stopped:
        return stop.exit_status
    except OutOfMemory as error:
        print(f"FAILED: start: {error}", file=sys.stderr)
        return EXIT_FAILED
    _tell(request, found)
    return 0 if found.failure is None else EXIT_FAILED


async def _rehearse(
    crew: RunActors,
    prepared: Prepared,
    target: Target | None,
    beginning: CalibrationStart,
    *,
    started: float,
) -> Result:
    config, say = prepared.config, partial(print, flush=True)
    workers = Workers(
        samplers=crew.samplers,
        learner=crew.learner,
        scorer=crew.scorer,
        sizes=SizeController(config, beginning.sizes, say),
        config=config,
        clock=Clock(started),
        # The command ends the rehearsal as a whole.
        stop=asyncio.Event(),
        one_process=crew.one_process,
    )
    calibration = partial(
        calibrate,
        workers.sizes,
        beginning,
        sampler=(workers.sampler_processes[0], crew.samplers[0]),
        learner=(workers.learner_process, crew.learner),
    )
    await wait_for_devices(crew.devices, config.plan)
    await crew.started()
    waited_s = time.monotonic() - started
    say("Devices acquired; loading weights and compiling.")
    rehearsal = Rehearsal(
        Stage(
            config=config,
            data=prepared.data,
            tokenizer=prepared.tokenizer,
            workers=workers,
            processes=[crew.learner, *crew.samplers],
            calibrate=calibration,
            restore=crew.learner.restore,
            export=prepared.folder.export,
            target=target,
        ),
        say,
    )
    await asyncio.gather(rehearsal.start(waited_s=waited_s), crew.scorer.start())
    return await rehearsal.run()


def _shape(request: Request) -> ModelShape | None:
    """None: a checkpoint that says its sizes by its arrays alone."""
    path = request.config.model.path
    try:
        return shape_of(request.config)
    except FileNotFoundError:
        folder = Path(path)
        if request.random_weights or not folder.is_dir() or flax_folder(folder) is None:
            raise
    return None


def _target(config: Config, shape: ModelShape | None) -> Target | None:
    """None: the model's sizes are not known, or the configuration does not say which GPUs."""
    if shape is None or config.plan.platform == "gpu":
        return None
    return Target(shape, topology_of(config, None))


def _tell(request: Request, found: Result) -> None:
    figures = report(request.config.run.name, found)
    figures["random_weights"] = request.random_weights
    print()
    for line in lines(figures):
        print(line, flush=True)
    if request.json_file is not None:
        text = json.dumps(figures, indent=2, ensure_ascii=False)
        request.json_file.write_text(text + "\n", encoding="utf-8")


def _check_disk(config: Config, shape: ModelShape, *, weights: bool) -> None:
    """Refuses what would end with a full disk.

    Raises:
        ValueError: saying what is needed and what there is.
    """
    number = DTYPE_BYTES[config.model.dtype]
    exported = {**DTYPE_BYTES, "float16": 2}[config.export.dtype or config.model.dtype]
    adapter = _FLOAT * shape.adapter_parameters(config.lora)
    needed = shape.parameters * (exported + (number if weights else 0)) + _ADAPTER_COPIES * adapter
    folder = Path(config.run.dir).absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(above).free
    if free < needed:
        raise ValueError(
            f"run.dir = {config.run.dir}: a rehearsal writes {needed / GIB:.1f} GiB there for a "
            f"while, and {free / GIB:.1f} are free; nearest valid: a folder on a larger disk"
        )


def _prepare_random(config: Config, shape: ModelShape, folder: Path) -> Prepared:
    """Checks everything, and writes the weights only then.

    Raises:
        FileNotFoundError: if tokenizer or data are not there.
        ValueError: what is wrong with the request, in words for the user.
    """
    config, dtype = _with_random_model(config, shape, folder), config.model.dtype
    weights_bytes = shape.parameters * DTYPE_BYTES[dtype]
    prepared = prepare(config, extend=None, tracked=False, weights_bytes=weights_bytes)
    print(f"writing {shape.parameters:,} random weights, {dtype}", flush=True)
    write_random_weights(folder, shape, dtype=dtype, seed=config.run.seed)
    return prepared


def _with_random_model(config: Config, shape: ModelShape, folder: Path) -> Config:
    """The configuration with a model that is in `folder`, all but its weights.

    Raises:
        FileNotFoundError: if there is no tokenizer.
        ValueError: likewise, or if it would come with the weights.
    """
    model, beside = config.model, None
    if model.tokenizer is None:
        if not model.path.startswith(HF) and "://" in model.path:
            raise ValueError(
                f"command line: --random-weights: {model.path} gives a tokenizer only with its "
                "weights; set model.tokenizer to one that is here"
            )
        if "://" in model.path:
            model = model.model_copy(update={"tokenizer": model.path})
        else:
            beside = _tokenizer_beside(Path(model.path))
    write_random_folder(folder, shape, tokenizer=beside)
    return config.model_copy(update={"model": model.model_copy(update={"path": str(folder)})})


def _tokenizer_beside(folder: Path) -> Path:
    if any((folder / name).is_file() for name in (SENTENCEPIECE, JSON)):
        return folder
    raise FileNotFoundError(
        f"command line: --random-weights: {folder} has no tokenizer, neither {SENTENCEPIECE} nor "
        f"{JSON}; set model.tokenizer to one that is here"
    )
