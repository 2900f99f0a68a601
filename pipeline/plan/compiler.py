"""Runs the TPU compiler on programs of a run and caches its reports. No JAX, no TPU.

The compiler runs in a child process (`python -m pipeline.compute.aot`). The cache key of a report
contains everything that it depends on: settings, the model's shape, the versions of compiler and
libraries, and the sources of the programs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pipeline
from configs.schema import Config, Learner, Plan, Rollout
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.program_names import SAMPLER, devices_of, split_name
from pipeline.plan.topology import GIB, TPU_COMPILER
from pipeline.run.cache_folder import cache_folder, read_cached_json, write_cached_json

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "qwix", "google-tunix", "optax")
_SOURCES = (
    "configs/*.py",
    "pipeline/compute/**/*.py",
    "pipeline/data/**/*.py",
    "pipeline/plan/lengths.py",
    "pipeline/plan/program_names.py",
)
"""Sources of the programs and of the reports, relative to the project's root."""


def _settings_of(*kinds: str) -> set[str]:
    """The settings with these values of the attribute `program`."""
    fields = Plan.model_fields | Rollout.model_fields | Learner.model_fields
    extras = {name: field.json_schema_extra for name, field in fields.items()}
    return {
        name
        for name, one in extras.items()
        if isinstance(one, dict) and one.get("program") in kinds
    }


_NOT_OF_SAMPLER, _NOT_OF_LEARNER = _settings_of("none", "learner"), _settings_of("none", "sampler")

Say = Callable[[str], None]
"""Receives a line of progress."""


class NoCompiler(ValueError):  # noqa: N818  # what is missing, not what went wrong
    """This machine has no TPU compiler."""


@dataclass(frozen=True)
class CompilerReport:
    """The compiler's report on a program, per chip.

    Attributes:
        fits: whether the program alone fits a chip's memory.
        hbm_bytes: memory of the program with arguments and results; if it does not fit, the memory
            needed; None: not reported.
        compile_s: seconds of the compilation.
        seconds: of one run, by the compiler's estimate, schedule and memory traffic; see
            `aot.estimated_time`. Never measured.
    """

    fits: bool
    hbm_bytes: int | None
    compile_s: float
    seconds: float = 0.0

    @property
    def size(self) -> str:
        """The memory in words."""
        return "of unknown size" if self.hbm_bytes is None else f"={self.hbm_bytes / GIB:.2f} GiB"


def compile_programs(
    config: Config,
    shape: ModelShape,
    programs: Sequence[str],
    *,
    say: Say = lambda _: None,
) -> dict[str, CompilerReport]:
    """Reports on programs, from the cache or from the compiler; each is cached as it arrives.

    The configuration has all sizes; names are those of `pipeline.plan.program_names`. An adapter of
    `lora.start` with separate lora_a matrices for keys and values counts as one with a shared one.

    Raises:
        NoCompiler: if a program has to be compiled and there is no compiler.
        RuntimeError: if the compiler fails; with the last lines of its output.
    """
    found = {program: _load(cache_key(config, shape, program)) for program in programs}
    missing = [program for program, report in found.items() if report is None]
    if missing:
        for program, report in _compile(config, shape, missing, say=say):
            _save(cache_key(config, shape, program), report)
            found[program] = report
    return {program: report for program, report in found.items() if report is not None}


def require_compiler() -> None:
    """Checks that this machine has the compiler.

    Raises:
        NoCompiler: if it has none.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise NoCompiler(
            "the TPU compiler is missing: install the package libtpu, which exists for Linux on "
            "x86-64 only (make install-tpu)"
        )


def cache_key(config: Config, shape: ModelShape, program: str) -> Mapping[str, Any]:
    """Everything that the report on a program depends on, as JSON values."""
    kind, size = split_name(program)
    found: dict[str, Any] = {
        "program": program,
        "devices": asdict(devices_of(config, program)),
        "shape": asdict(shape),
        "model": [config.model.dtype, config.model.quantization],
        "lora": config.lora.model_dump(mode="json", exclude={"start"}),
        "versions": versions(),
        "sources": sources(),
    }
    tables, ignored = [config.plan, config.rollout], _NOT_OF_SAMPLER
    if kind not in SAMPLER:
        tables, ignored = [*tables, config.learner], _NOT_OF_LEARNER
    elif kind == "prefill":
        found["prompts"] = config.prefill_rows(size)
        ignored = ignored | {"slots", "prefill_tokens"}
    elif kind == "segment":
        ignored = ignored | {"slots", "prefill_tokens"}
    found["settings"] = [table.model_dump(mode="json", exclude=ignored) for table in tables]
    return found


def _compile(
    config: Config, shape: ModelShape, programs: Sequence[str], *, say: Say
) -> Iterator[tuple[str, CompilerReport]]:
    require_compiler()
    request = {
        "config": config.model_dump(mode="json"),
        "shape": asdict(shape),
        "programs": list(programs),
    }
    with TemporaryFile("w+") as errors, _child(errors) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            say(f"compiling {', '.join(programs)} ...")
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for number, line in enumerate(child.stdout, start=1):
                program, figures = json.loads(line)
                report = CompilerReport(**figures)
                fits = "" if report.fits else "does not fit: "
                done = f"[{number}/{len(programs)}] {program}"
                say(f"{done}: {fits}{report.size}, {report.compile_s:.0f} s")
                yield program, report
            status = child.wait()
        finally:
            child.kill()
        if status:
            errors.seek(0)
            tail = errors.read().strip().splitlines()[-20:]
            message = f"the TPU compiler failed with exit status {status}:"
            raise RuntimeError("\n".join([message, *tail]))


def _child(errors: Any) -> subprocess.Popen[str]:
    # The child finds the sources from any working directory.
    top = str(Path(pipeline.__file__).parents[1])
    paths = [top, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeline.compute.aot"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | TPU_COMPILER | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def _load(about: Mapping[str, Any]) -> CompilerReport | None:
    """The cached report of a key, if there is one."""
    content = read_cached_json(_file(about))
    return None if content is None else CompilerReport(**content["figures"])


def _save(about: Mapping[str, Any], report: CompilerReport) -> None:
    """Caches a report; does nothing if the cache folder is not writable."""
    write_cached_json(_file(about), {"figures": asdict(report), "key": about})


def _file(about: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return cache_folder("plans") / f"{digest}.json"


@cache
def versions() -> dict[str, str]:
    """Versions of the installed packages that affect compilation."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def sources() -> str:
    """Hash of the sources of the programs."""
    top, digest = Path(pipeline.__file__).parents[1], hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(top.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
