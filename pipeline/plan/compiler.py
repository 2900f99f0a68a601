"""Asks the TPU compiler what programs of a run take, and keeps its answers. No JAX, no TPU.

The compiler runs in a child process (`python -m pipeline.compute.aot`). The cache key of an answer
holds everything that it depends on: the program's own settings, the model's sizes, the versions of
compiler and libraries, and the sources of the programs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pipeline
from configs.schema import Config
from pipeline.contracts.cache_folder import cache_folder, keep_json, kept_json
from pipeline.contracts.model_shape import ModelShape
from pipeline.contracts.programs import SAMPLER, devices_of, split_name
from pipeline.contracts.topology import GIB, HOST, TPU_COMPILER, chips
from pipeline.plan.cost_model.programs import depends_on

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "qwix", "google-tunix", "optax")
_COMMON_SOURCES = (
    "configs/*.py",
    "pipeline/compute/aot/*.py",
    "pipeline/compute/model/*.py",
    "pipeline/contracts/batches.py",
    "pipeline/contracts/model_shape.py",
    "pipeline/contracts/programs.py",
    "pipeline/inputs/dataset/batching.py",
    "pipeline/inputs/dataset/packing.py",
    "pipeline/inputs/hub/hf_config.py",
    "pipeline/inputs/hub/model_shape.py",
)
_SOURCES = {
    "sampler": ("pipeline/compute/decode/*.py", *_COMMON_SOURCES),
    "learner": ("pipeline/compute/learner/*.py", *_COMMON_SOURCES),
}
"""Files that determine the programs and their figures, below the project's folder."""

Say = Callable[[str], None]
"""Takes a line about what is going on."""


class NoCompiler(Exception):  # noqa: N818  # not an error: the plan is estimated then
    """There is no TPU compiler on this machine."""


@dataclass(frozen=True)
class Figures:
    """What the compiler says of a program, of each chip.

    Attributes:
        fits: whether it can be laid out in a chip's memory by itself.
        hbm_bytes: what it holds, arguments and results included; if it does not fit what it would
            need; None: the compiler does not say.
        compile_s: seconds that compiling took, when it was compiled.
        argument_bytes: of these the arguments.
        output_bytes: its results, those in the memory of arguments included.
        host_bytes: what it holds of the host's memory.
        seconds: of one run, the compiler's estimate: a cost model, blind inside custom calls.
        cached: whether the answer was kept from before.
    """

    fits: bool
    hbm_bytes: int | None
    compile_s: float
    argument_bytes: int = 0
    output_bytes: int = 0
    host_bytes: int = 0
    seconds: float = 0.0
    cached: bool = False


def compiled(
    config: Config,
    shape: ModelShape,
    programs: Sequence[str],
    *,
    topology: str = HOST,
    say: Say | None = None,
) -> dict[str, Figures]:
    """Figures of programs, from what is kept or from the compiler, each kept as soon as known.

    Args:
        config: the run; all its sizes are set.
        shape: its model. An adapter of `lora.start` that gives keys and values a lora_a each counts
            as one that does not.
        programs: by their names, see `pipeline.plan.cost_model.programs`.
        topology: chips that the run has; a process with fewer of them takes the first ones.
        say: is told what is compiled, and what came of it; None: nobody is.

    Raises:
        NoCompiler: if something has to be compiled and there is no compiler.
        RuntimeError: if the compiler failed, with the end of what it wrote.
        ValueError: if a program needs more chips than there are, or is none.
    """
    for program in programs:
        needed = devices_of(config, program).count
        if needed > chips(topology):
            raise ValueError(
                f"{program} runs on {needed} devices; {topology} has {chips(topology)}"
            )
    kept = {program: _kept(key(config, shape, program)) for program in programs}
    missing = [program for program, figures in kept.items() if figures is None]
    found = {program: figures for program, figures in kept.items() if figures is not None}
    if missing:
        for program, figures in _ask(config, shape, missing, say=say or _to_nobody):
            _keep(key(config, shape, program), figures)
            found[program] = figures
    return {program: found[program] for program in programs}


def missing(config: Config, shape: ModelShape, programs: Sequence[str]) -> list[str]:
    """Those programs that the compiler would have to be asked about."""
    return [name for name in programs if _kept(key(config, shape, name)) is None]


def key(config: Config, shape: ModelShape, program: str) -> Mapping[str, Any]:
    """Everything that the figures of a program depend on, as JSON values."""
    return {
        **depends_on(config, shape, program),
        "versions": versions(),
        "sources": sources("sampler" if split_name(program)[0] in SAMPLER else "learner"),
    }


def _to_nobody(line: str) -> None:
    del line


def _ask(
    config: Config, shape: ModelShape, programs: Sequence[str], *, say: Say
) -> Iterator[tuple[str, Figures]]:
    if importlib.util.find_spec("libtpu") is None:
        raise NoCompiler(
            "the TPU compiler is not here: it is the package libtpu, which is built for Linux on "
            "x86-64 only (make install-tpu)"
        )
    request = {
        "config": config.model_dump(mode="json"),
        "shape": asdict(shape),
        "programs": list(programs),
    }
    names = {field.name for field in fields(Figures)}
    with TemporaryFile("w+") as errors, _child(errors) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            say(f"compiling {', '.join(programs)} ...")
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for number, line in enumerate(child.stdout, start=1):
                answer = json.loads(line)
                figures = Figures(**{name: answer[name] for name in names & answer.keys()})
                say(f"[{number}/{len(programs)}] {answer['program']}: {_in_words(figures)}")
                yield answer["program"], figures
            status = child.wait()
        finally:
            child.kill()
        if status:
            errors.seek(0)
            tail = errors.read().strip().splitlines()[-20:]
            raise RuntimeError("\n".join([f"the TPU compiler ended with {status}:", *tail]))


def _child(errors: Any) -> subprocess.Popen[str]:
    # The sources are found whatever the current directory is.
    top = str(Path(pipeline.__file__).parents[1])
    paths = [top, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.compute.aot"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | TPU_COMPILER | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def _in_words(figures: Figures) -> str:
    size = "" if figures.hbm_bytes is None else f"={figures.hbm_bytes / GIB:.2f} GiB, "
    return f"{'' if figures.fits else 'does not fit: '}{size}{figures.compile_s:.0f} s"


def _kept(about: Mapping[str, Any]) -> Figures | None:
    """The figures that are kept under a key, if there are any."""
    try:
        content = kept_json(_file(about))
        return None if content is None else replace(Figures(**content["figures"]), cached=True)
    except (KeyError, TypeError):  # written by another version
        return None


def _keep(about: Mapping[str, Any], figures: Figures) -> None:
    """Keeps figures under a key; a folder that cannot be written to keeps nothing."""
    keep_json(_file(about), {"figures": asdict(figures), "key": about})


def _file(about: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return cache_folder("plans") / f"{digest}.json"


@cache
def versions() -> dict[str, str]:
    """Of what decides how a program is compiled; of what is absent none."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def sources(which: str) -> str:
    """Hash of what a sampler's or a learner's programs are made of."""
    top, digest = Path(pipeline.__file__).parents[1], hashlib.sha256()
    for pattern in _SOURCES[which]:
        for path in sorted(top.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
