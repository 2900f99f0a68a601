"""Verifies a plan with the TPU compiler and reduces its sizes until it fits.

    plan -> [compiler] -> fits: done
                          does not fit: the next smaller sizes that should fit, by the compiled ones

The figures of compiled programs replace the estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from configs.schema import Config
from pipeline.data.batching import Packing
from pipeline.plan.compiler import CompilerReport, Say, compile_programs
from pipeline.plan.cost_model.memory import memory_beside
from pipeline.plan.cost_model.programs import phase_programs
from pipeline.plan.cost_model.step import StepEstimate
from pipeline.plan.search.fitting import PlanCase, SizedPlan, plan_again
from pipeline.plan.sizes import validated

_LEAST_OVERSIZE = 1.01
"""Least memory of a program that does not fit, as a multiple of the limit; used where the compiler
reports no more than that."""


@dataclass(frozen=True)
class CompilerCheck:
    """A program of a phase, its report with the memory beside it, and its estimated seconds."""

    phase: str
    report: CompilerReport
    estimated_s: float


Checks = Mapping[str, CompilerCheck]
"""Checked programs by name."""


@dataclass(frozen=True)
class Verified:
    """A plan with the compiler's times in its step, its largest programs, and what did not fit."""

    plan: SizedPlan
    programs: Checks
    searched: tuple[str, ...]


def verify(case: PlanCase, plan: SizedPlan, *, say: Say) -> Verified:
    """Compiles a plan's largest programs and returns the plan that results.

    A plan whose sizes are given stays as it is. The compiler supports the topology.

    Raises:
        NoCompiler: if this machine has none.
    """
    assert case.topology.has_compiler, case.topology
    searched: list[str] = []
    programs = _check(case, plan.config, say=say)
    is_given = plan.configured and not case.config.plan.planned_sizes
    while not _all_fit(programs) and not is_given:
        searched += [
            f"{name} does not fit: {one.report.size}"
            for name, one in programs.items()
            if not one.report.fits
        ]
        case = _with_compiled_memory(case, plan, programs)
        smaller = plan_again(case, plan)
        if not smaller.fits:
            searched.append("no smaller sizes are expected to fit")
            break
        plan = replace(smaller, config=validated(smaller.config))
        programs = _check(case, plan.config, say=say)
    step = with_compiled_times(plan.step, programs)
    return Verified(
        replace(plan, step=step, fits=_all_fit(programs)),
        programs,
        tuple(searched),
    )


def largest_programs(config: Config) -> dict[str, str]:
    """The largest program of each phase.

    `fill` is left out: it updates the caches in place and needs less memory than the prefill.
    """
    return {phase: names[-1] for phase, names in phase_programs(config).items()}


def with_compiled_times(step: StepEstimate, programs: Checks) -> StepEstimate:
    """The step with the times of each phase scaled to the compiler's estimate of its program."""
    seconds = dict(step.seconds)
    for program in programs.values():
        if program.report.seconds > 0:
            seconds[program.phase] *= program.report.seconds / program.estimated_s
    return replace(step, seconds=seconds)


def _check(case: PlanCase, config: Config, *, say: Say) -> Checks:
    """Compiles the largest programs of a configuration and checks their memory."""
    phases = {name: phase for phase, name in largest_programs(config).items()}
    model, found = case.roofline(config), {}
    packing = Packing.expected(config, case.lengths)
    for name, report in compile_programs(config, case.shape, list(phases), say=say).items():
        total = report.hbm_bytes
        if total is not None:
            total += sum(memory_beside(config, case.shape, name).values())
        fits = report.fits and total is not None and total <= case.compiled_limit_bytes
        estimated_s = model.program(name, packing).expected
        used = replace(report, fits=fits, hbm_bytes=total)
        found[name] = CompilerCheck(phases[name], used, estimated_s)
    return found


def _with_compiled_memory(case: PlanCase, plan: SizedPlan, programs: Checks) -> PlanCase:
    """The case with the compiled memory of each phase as a multiple of its estimate."""
    ratio = {}
    for one in programs.values():
        # If a program does not fit by itself, the reported memory may be too low.
        least = 0.0 if one.report.fits else _LEAST_OVERSIZE * case.compiled_limit_bytes
        ratio[one.phase] = max(one.report.hbm_bytes or 0, least) / plan.memory[one.phase].total()
    return replace(case, memory_ratio=ratio)


def _all_fit(programs: Checks) -> bool:
    return all(program.report.fits for program in programs.values())
