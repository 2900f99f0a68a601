"""Verifies a plan with the TPU compiler and tries its neighbours.

    plan -> [compiler] -> does not fit: the next smaller plan that should fit, by the compiled sizes
                          fits: the next larger slots, then micro-batches; taken if all programs
                          fit and the gain is at least `MIN_GAIN`

At most `MAX_COMPILATIONS` programs are compiled; cached reports do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from configs.schema import Config
from pipeline.contracts.topology import GIB
from pipeline.plan.compiler import CompilerReport, Say, compile_programs, uncached
from pipeline.plan.cost_model.memory import memory_beside
from pipeline.plan.cost_model.roofline import Seconds
from pipeline.plan.cost_model.step import StepEstimate
from pipeline.plan.search.fitting import (
    MIN_GAIN,
    PlanCase,
    SizedPlan,
    estimate_plan,
    plan_again,
    validated,
    with_plan,
)
from pipeline.plan.search.size_options import max_useful_rows, max_useful_slots, next_larger

MAX_COMPILATIONS = 8
"""Most programs to compile for a plan."""
_LEAST_OVERSIZE = 1.01
"""Least memory of a program that does not fit, as a multiple of the limit; used where the compiler
reports no more than that."""
PHASE = {
    "gradient": "update",
    "reference_top_k": "score",
    "score": "score",
    "segment": "decode",
    "prefill": "prefill",
}
"""Phase of each kind of program."""


@dataclass(frozen=True)
class CompilerCheck:
    """A program of a plan, checked by the compiler.

    Attributes:
        phase: the phase that it belongs to.
        report: the compiler's report.
        hbm_bytes: memory of a chip while it runs, with everything beside it; None: more than the
            limit, by an unknown amount.
        fits: whether that fits.
        estimated_s: estimated seconds of one run.
    """

    phase: str
    report: CompilerReport
    hbm_bytes: int | None
    fits: bool
    estimated_s: float


@dataclass(frozen=True)
class LargerPlan:
    """A plan with the next larger slots or micro-batches.

    Attributes:
        what: the size, in words.
        gain: predicted relative gain of trained tokens per second.
        config: the configuration with the size; None: a step has no more work.
        program: the program that grows most or does not fit; empty: none, or it was not compiled.
        hbm_bytes: memory of a chip while it runs; None: unknown or not compiled.
        fits: whether the program fits, or all programs where the plan could be taken; None: not all
            were compiled.
    """

    what: str
    gain: float
    config: Config | None = None
    program: str = ""
    hbm_bytes: int | None = None
    fits: bool | None = None


@dataclass(frozen=True)
class Verified:
    """A plan verified by the compiler.

    Attributes:
        plan: the plan, with the compiler's times in its step.
        programs: its largest programs, by name.
        searched: log of plans that did not fit or were taken because they are faster.
        larger: plans with the next larger sizes.
        compilations: number of programs compiled now.
        compile_s: seconds of these compilations.
    """

    plan: SizedPlan
    programs: Mapping[str, CompilerCheck]
    searched: tuple[str, ...]
    larger: tuple[LargerPlan, ...]
    compilations: int
    compile_s: float


class Verifier:
    """Verifies plans of one case and counts compilations.

    Args:
        case: the planner's input, for a topology that the compiler supports.
        say: receives lines of progress.
    """

    def __init__(self, case: PlanCase, *, say: Say) -> None:
        assert case.topology.compiler is not None, case.topology
        self._case, self._say = case, say
        self._topology = case.topology.compiler
        self._searched: list[str] = []
        self._compilations = 0
        self._compile_s = 0.0

    def verify(self, plan: SizedPlan, *, others: Sequence[SizedPlan] = ()) -> Verified:
        """Compiles a plan's largest programs and returns the plan that results.

        A plan fixed by the configuration stays as it is. If any other cannot be made to fit, the
        first of `others` replaces it, as long as compilations are left.

        Raises:
            NoCompiler: if this machine has none.
        """
        given = self._case
        fixed = plan.configured and given.config.plan.fixed
        plan, programs, larger = self._verify(plan, fixed=fixed)
        for other in others:
            if plan.fits or fixed:
                break
            if not self._may_compile(other.config, largest_programs(other.config)):
                self._note_limit(other.name)
                break
            self._searched.append(f"next placement: {other.name}")
            self._case = given
            plan, programs, larger = self._verify(other, fixed=False)
        return Verified(
            plan,
            programs,
            tuple(self._searched),
            tuple(larger),
            self._compilations,
            self._compile_s,
        )

    def _verify(
        self, plan: SizedPlan, *, fixed: bool
    ) -> tuple[SizedPlan, Mapping[str, CompilerCheck], Sequence[LargerPlan]]:
        """The resulting plan, its programs, and plans with larger sizes."""
        programs: Mapping[str, CompilerCheck] = self._compile(
            plan.config, largest_programs(plan.config)
        )
        if not fixed:
            plan, programs = self._shrink(plan, programs)
        larger: list[LargerPlan] = []
        while _all_fit(programs):
            larger = list(self._check_larger(plan, programs))
            taken = None if fixed else self._grow(plan, larger)
            if taken is None:
                break
            plan, programs = taken
        for one in larger:
            if one.gain >= MIN_GAIN and one.fits is None:
                self._note_limit(one.what)
        plan = replace(plan, step=with_compiled_times(plan.step, programs), fits=_all_fit(programs))
        return plan, programs, larger

    def _shrink(
        self, plan: SizedPlan, programs: Mapping[str, CompilerCheck]
    ) -> tuple[SizedPlan, Mapping[str, CompilerCheck]]:
        """Tries smaller plans until one fits or none is left."""
        while not _all_fit(programs):
            self._searched += [
                f"{name} does not fit: {_needed(one)}"
                for name, one in programs.items()
                if not one.fits
            ]
            self._case = _with_compiled_memory(self._case, plan, programs)
            found = plan_again(self._case, plan)
            if not found.fits:
                self._searched.append("no smaller sizes are expected to fit")
                break
            found = replace(found, config=validated(found.config))
            names = largest_programs(found.config)
            if not self._may_compile(found.config, names):
                slots, tokens = found.config.slots, found.config.plan.micro_batch_tokens
                self._note_limit(f"{slots} slots, micro-batches of {tokens} tokens")
                break
            plan, programs = found, self._compile(found.config, names)
        return plan, programs

    def _grow(
        self, plan: SizedPlan, larger: list[LargerPlan]
    ) -> tuple[SizedPlan, Mapping[str, CompilerCheck]] | None:
        """The first larger plan that is faster and fits as a whole, with its programs.

        Updates `larger` for plans that are not taken: they do not fit, or it is unknown.
        """
        for index, one in enumerate(larger):
            if not one.fits or one.gain < MIN_GAIN:
                continue
            assert one.config is not None
            names = largest_programs(one.config)
            if not self._may_compile(one.config, names):
                larger[index] = replace(one, fits=None)
                continue
            programs = self._compile(one.config, names)
            if _all_fit(programs):
                self._searched.append(f"{one.what} fits and is faster: taken")
                own = plan.configured
                return estimate_plan(self._case, plan.name, one.config, configured=own), programs
            name, large = next(item for item in programs.items() if not item[1].fits)
            self._searched.append(f"{one.what}: {name} does not fit: {_needed(large)}")
            larger[index] = replace(one, program=name, hbm_bytes=large.hbm_bytes, fits=False)
        return None

    def _check_larger(
        self, plan: SizedPlan, programs: Mapping[str, CompilerCheck]
    ) -> Iterator[LargerPlan]:
        """More slots, then larger micro-batches; compiled if the predicted gain is `MIN_GAIN`."""
        now = with_compiled_times(plan.step, programs).tokens_per_s
        for what, config, program in larger_plans(self._case, plan.config):
            if config is None:
                yield LargerPlan(what, 0.0)
                continue
            gain = with_compiled_times(self._case.step(config), programs).tokens_per_s / now - 1
            if gain < MIN_GAIN or not self._may_compile(config, [program]):
                yield LargerPlan(what, gain, config)
                continue
            found = self._compile(config, [program])[program]
            yield LargerPlan(what, gain, config, program, found.hbm_bytes, found.fits)

    def _may_compile(self, config: Config, programs: Sequence[str]) -> bool:
        """Whether the compilations left are enough for the programs that are not cached."""
        return (
            self._compilations + len(uncached(config, self._case.shape, programs))
            <= MAX_COMPILATIONS
        )

    def _note_limit(self, what: str) -> None:
        self._searched.append(
            f"stopped after {self._compilations} of at most {MAX_COMPILATIONS} compilations: it is "
            f"unknown whether {what} fits"
        )

    def _compile(self, config: Config, programs: Sequence[str]) -> dict[str, CompilerCheck]:
        """Compiles programs of a configuration and checks their memory."""
        shape, limit = self._case.shape, self._case.compiled_limit_bytes
        answers = compile_programs(config, shape, programs, topology=self._topology, say=self._say)
        found = {}
        for name, report in answers.items():
            if not report.cached:
                self._compilations += 1
                self._compile_s += report.compile_s
            total = report.hbm_bytes
            if total is not None:
                total += sum(memory_beside(config, shape, name).values())
            found[name] = CompilerCheck(
                phase=PHASE[_kind(name)],
                report=report,
                hbm_bytes=total,
                fits=report.fits and total is not None and total <= limit,
                estimated_s=program_s(self._case, config, name).expected,
            )
        return found


def largest_programs(config: Config) -> list[str]:
    """The largest program of each phase.

    `fill` is left out: it updates the caches in place and needs less memory than the prefill.
    """
    rows, bucket = config.micro_batch_rows, max(config.prompt_buckets)
    return [
        f"gradient {rows}",
        f"segment {config.slots}",
        f"reference_top_k {rows}" if config.learner.uses_reference_top_k else f"score {rows}",
        f"prefill {bucket}",
    ]


def larger_plans(case: PlanCase, config: Config) -> Iterator[tuple[str, Config | None, str]]:
    """Larger plans: the size in words, the configuration, the program that grows most.

    The configuration is None where a step has no more work.
    """
    plan = config.plan
    slots, rows = config.slots // plan.sampler_shards, config.micro_batch_rows
    if slots >= max_useful_slots(config):
        yield f"more than {config.slots} slots: a step has no more rollouts", None, ""
    else:
        more = min(next_larger(slots), max_useful_slots(config)) * plan.sampler_shards
        bigger = with_plan(config, {"slots": more})
        yield f"{more} slots", bigger, f"segment {more}"
    rows //= plan.learner_shards
    unit = config.row_tokens * plan.learner_shards
    if rows >= max_useful_rows(config, case.lengths):
        yield f"micro-batches above {rows * unit} tokens: a step has no more", None, ""
    else:
        more = next_larger(rows, aligned=False)
        bigger = with_plan(config, {"micro_batch_tokens": more * unit})
        yield (
            f"micro-batches of {more * unit} tokens",
            bigger,
            f"gradient {more * unit // config.row_tokens}",
        )


def program_s(case: PlanCase, config: Config, program: str) -> Seconds:
    """Expected time of one run of a program of `largest_programs`."""
    model, plan = case.roofline(config), config.plan
    kind, size = _kind(program), int(program.partition(" ")[2])
    if kind == "segment":
        slots = size // plan.sampler_shards
        return model.decode_step(slots) * config.segment_steps + model.flush(slots)
    if kind == "prefill":
        return model.prefill(config.prefill_rows(size) * size, seq=size)
    positions = size * config.row_tokens // plan.learner_shards
    run = model.gradient if kind == "gradient" else model.score
    return run(positions, seq=case.lengths.sequence)


def with_compiled_times(step: StepEstimate, programs: Mapping[str, CompilerCheck]) -> StepEstimate:
    """The step with the times of each phase scaled to the compiler's estimate of its program.

    The low end stays at most the hardware's limit; the relative high end stays.
    """
    seconds = dict(step.seconds)
    for program in programs.values():
        if program.report.seconds > 0:
            before = seconds[program.phase]
            share = program.report.seconds / program.estimated_s
            expected, high = share * before.expected, share * before.high
            low = min(before.low, expected)
            seconds[program.phase] = Seconds(low, expected, high, before.regime)
    return replace(step, seconds=seconds)


def _with_compiled_memory(
    case: PlanCase, plan: SizedPlan, programs: Mapping[str, CompilerCheck]
) -> PlanCase:
    """The case with the compiled memory of each phase as a multiple of its estimate."""
    ratio: dict[str, float] = {}
    for one in programs.values():
        # If a program does not fit by itself, the reported memory may be too low.
        least = 0.0 if one.fits else _LEAST_OVERSIZE * case.compiled_limit_bytes
        found = max(one.hbm_bytes or 0, least) / plan.memory[one.phase].total
        ratio[one.phase] = max(found, ratio.get(one.phase, 0.0))
    return replace(case, memory_ratio=ratio)


def _all_fit(programs: Mapping[str, CompilerCheck]) -> bool:
    return all(program.fits for program in programs.values())


def _kind(program: str) -> str:
    return program.partition(" ")[0]


def _needed(program: CompilerCheck) -> str:
    if program.hbm_bytes is None:
        return "by an unknown amount"
    return f"={program.hbm_bytes / GIB:.2f} GiB in use on the chip"
