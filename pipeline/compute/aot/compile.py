"""Ahead-of-time compilation for TPU chips on a machine without them."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from configs.schema import Config
from pipeline.compute.aot.estimated_time import program_seconds, works_of
from pipeline.compute.aot.hlo import parse
from pipeline.compute.aot.schedule import FLAGS, read_schedules
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.decode.rollout_weights import rollout_policy
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.models.hf_config import hf_config_of
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.program_names import SAMPLER, devices_of, split_name
from pipeline.plan.topology import GIB, HOST

VOCABULARY = Vocabulary(pad=0, stops=(106, 1), forbidden=(0, 2, 3, 4, 105))
"""Gemma 3's special tokens; their ids do not affect the figures of a program."""

_COMPILING = defaultdict[str, threading.Lock](threading.Lock)
"""Locks by name of the function: schedules of programs of the same name are in one folder."""
_TRACING = threading.Lock()  # qwix patches functions of JAX while it traces a model

_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_NEEDED = re.compile(r"Used ([\d.]+)G of|\(([\d.]+)G\) exceeds available HBM")
_HBM = re.compile(r"^Memory Space: default .*\nTotal bytes: (\d+)", re.MULTILINE)


def v5e_devices(count: int) -> Sequence[jax.Device]:
    """The first `count` chips of the topology v5e-8."""
    _schedules()
    topology = topologies.get_topology_desc(platform="tpu", topology_name=HOST)
    return topology.devices[:count]


@cache
def _schedules() -> TemporaryDirectory[str]:
    """The folder of this process's final schedules; libtpu reads its flags when it is loaded."""
    folder = TemporaryDirectory(prefix="schedules-")
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    flags = (flag.format(folder=folder.name) for flag in FLAGS)
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([given, *flags])
    return folder


class DoesNotFitError(Exception):
    """A program needs more memory than a chip has.

    Attributes:
        needs_gib: the compiler's figure; None if it gives none.
    """

    def __init__(self, message: str) -> None:
        """Reads the compiler's message."""
        super().__init__(message)
        used = _NEEDED.search(message)
        self.needs_gib = float(used[1] or used[2]) if used else None


@dataclass(frozen=True)
class Program:
    """A program compiled for a TPU.

    Attributes:
        text: optimised HLO.
        schedule: bundles of its instructions; see `read_schedules`.
        hbm_bytes: memory of a chip while it runs; see `hbm_bytes`.
    """

    text: str
    schedule: Mapping[str, int]
    hbm_bytes: int

    def seconds(self, *, trips: float | None = None) -> float:
        """Estimated seconds of a run; see `estimated_time.works_of`."""
        return program_seconds(works_of(parse(self.text), self.schedule, trips=trips))


def compile_for(traced: jax.stages.Traced) -> Program:
    """Compiles for a TPU and reads the compiler's memory report.

    Raises:
        DoesNotFitError: if the program does not fit into a chip's memory.
    """
    lowered = traced.lower(lowering_platforms=("tpu",))
    with TemporaryDirectory() as folder, _COMPILING[traced.fun_name]:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "HbmOom" not in str(error):
                raise
            raise DoesNotFitError(str(error)) from None
        (report,) = Path(folder).glob("*memory-usage-report.txt")
        size = hbm_bytes(report.read_text())
        text = compiled.as_text()
        assert text is not None
        schedule = _read_schedule(text)
    return Program(text, schedule, size)


def _read_schedule(text: str) -> Mapping[str, int]:
    """Bundles of a program's instructions; deletes their files."""
    name = _MODULE.match(text)
    assert name is not None, text[:80]
    top = Path(_schedules().name)
    folders = [top / name[1], *top.glob(f"{name[1]}.*")]
    found = read_schedules(folders)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def hbm_bytes(report: str) -> int:
    """Bytes of a chip's main memory, from the report that XLA writes beside a dump.

    It counts arguments, results and temporaries with their layouts, gaps included, which the
    compiler compares with the available memory. `memory_analysis()` counts the temporaries of loops
    twice with libtpu 0.0.42.

    Raises:
        ValueError: if the text is not a memory report.
    """
    found = _HBM.search(report)
    if found is None:
        raise ValueError(f"not a memory report: {report[:200]!r}")
    return int(found[1])


def trace(
    config: Config, shape: ModelShape, program: str
) -> tuple[jax.stages.Traced, float | None]:
    """Traces a program of the run for a v5e-8.

    Args:
        config: of the run.
        shape: of the model.
        program: its name as in `pipeline.plan.program_names`.

    Returns:
        The traced program, and the expected trip count of its loops that have none of their own;
        None: all have.
    """
    kind, size = split_name(program)
    place = devices_of(config, program)
    policy = Policy(
        architecture(hf_config_of(shape), dtype=jnp.dtype(config.model.dtype)),
        lora=config.lora,
        mesh=make_mesh(v5e_devices(place.count), fsdp=place.fsdp, tp=place.tp),
        quantization=config.model.quantization,
        embeddings_in_host=config.plan.embeddings_in_host,
    )
    sized = (size,) if size else ()
    if kind in SAMPLER:
        decode = DecodePrograms(rollout_policy(policy, config), config, VOCABULARY)
        return getattr(decode, f"trace_{kind}")(*sized), None
    learner = LearnerPrograms(policy, config, VOCABULARY)
    trips = learner.expected_blocks(kind, size) if size else None
    return getattr(learner, f"trace_{kind}")(*sized), trips


def program_figures(config: Config, shape: ModelShape, program: str) -> dict[str, Any]:
    """Compiles a program; the fields of `plan.compiler.CompilerReport` as JSON values."""
    with _TRACING:
        began = time.monotonic()
        traced, trips = trace(config, shape, program)
    try:
        compiled = compile_for(traced)
    except DoesNotFitError as error:
        needs = None if error.needs_gib is None else round(error.needs_gib * GIB)
        return {"fits": False, "hbm_bytes": needs, "compile_s": time.monotonic() - began}
    return {
        "fits": True,
        "hbm_bytes": compiled.hbm_bytes,
        "seconds": compiled.seconds(trips=trips),
        "compile_s": time.monotonic() - began,
    }
