"""Replaces a plan's estimates by what the TPU compiler says, and looks at what is next to it.

    plan -> [compiler] -> does not fit: the next smaller that should, by what was learned
                          fits: what is larger, slots and then micro-batches; it is taken if all
                          of it fits, too, and is better by `MIN_GAIN`

At most `MAX_COMPILATIONS` programs are compiled; those that are kept from before do not count.
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
"""Programs that are compiled for a plan at most."""
_LEAST_OVERSIZE = 1.01
"""What does not fit needs this multiple of what there is at least; where the compiler says no more
than that, the search goes down by as little."""
PHASE = {
    "gradient": "update",
    "keep": "score",
    "score": "score",
    "segment": "decode",
    "prefill": "prefill",
}
"""Which phase a kind of program belongs to."""


@dataclass(frozen=True)
class CompilerCheck:
    """A program of a plan as compiled.

    Attributes:
        phase: that it belongs to.
        figures: what the compiler says.
        hbm_bytes: of a chip while it runs, with all that is beside it; None: more than there is,
            the compiler does not say how much.
        fits: whether a chip has room for that.
        estimated_s: what one run of it was expected to take.
    """

    phase: str
    report: CompilerReport
    hbm_bytes: int | None
    fits: bool
    estimated_s: float


@dataclass(frozen=True)
class LargerPlan:
    """A plan with a size that is the next larger one.

    Attributes:
        what: the size, in words.
        gain: by which trained tokens a second are predicted to rise.
        config: with the size; None: a step has not so much to do.
        program: that grows most, or that does not fit; empty if there is none, or it was not
            compiled.
        hbm_bytes: of a chip while it runs; None: it was not compiled, or the compiler does not say.
        fits: whether a chip has room for it, and where it could be taken for all programs; None:
            not all were compiled.
    """

    what: str
    gain: float
    config: Config | None = None
    program: str = ""
    hbm_bytes: int | None = None
    fits: bool | None = None


@dataclass(frozen=True)
class Verified:
    """A plan by the compiler.

    Attributes:
        plan: that was verified, with the compiler's times in its step.
        programs: its largest programs, by name.
        searched: what did not fit, and what was taken because it was better.
        larger: the next larger sizes.
        compilations: programs that were compiled now.
        compile_s: that this took.
    """

    plan: SizedPlan
    programs: Mapping[str, CompilerCheck]
    searched: tuple[str, ...]
    larger: tuple[LargerPlan, ...]
    compilations: int
    compile_s: float


class Verifier:
    """Asks the compiler about one case, and counts how often it had to work.

    Args:
        case: what is planned, for a topology that programs are compiled for.
        say: is told what is compiled.
    """

    def __init__(self, case: PlanCase, *, say: Say) -> None:
        assert case.topology.compiler is not None, case.topology
        self._case, self._say = case, say
        self._topology = case.topology.compiler
        self._searched: list[str] = []
        self._compilations = 0
        self._compile_s = 0.0

    def verify(self, plan: SizedPlan, *, others: Sequence[SizedPlan] = ()) -> Verified:
        """Compiles a plan's largest programs; the plan that it comes to.

        A plan that the configuration fixes stays as it is. Of any other that cannot be made to fit
        the first of `others` takes the place, as far as there are compilations left.

        Raises:
            NoCompiler: if there is none on this machine.
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
            self._searched.append(f"next is {other.name}")
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
        """A plan, smaller or larger; its programs; what is larger still."""
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
        """The next smaller plans, until one fits or nothing is left to try."""
        while not _all_fit(programs):
            self._searched += [
                f"{name} does not fit: {_needs(one)}"
                for name, one in programs.items()
                if not one.fits
            ]
            self._case = _with_compiled_memory(self._case, plan, programs)
            found = plan_again(self._case, plan)
            if not found.fits:
                self._searched.append("nothing smaller is expected to fit")
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
        """The first larger plan that is better and fits as a whole, with its programs.

        Of what is tried and is not taken `larger` says why: it does not fit, or is not known.
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
                self._searched.append(f"{one.what} fits and is better: taken")
                own = plan.configured
                return estimate_plan(self._case, plan.name, one.config, configured=own), programs
            name, large = next(item for item in programs.items() if not item[1].fits)
            self._searched.append(f"{one.what}: {name} does not fit: {_needs(large)}")
            larger[index] = replace(one, program=name, hbm_bytes=large.hbm_bytes, fits=False)
        return None

    def _check_larger(
        self, plan: SizedPlan, programs: Mapping[str, CompilerCheck]
    ) -> Iterator[LargerPlan]:
        """More slots, then larger micro-batches; compiled only if they promise `MIN_GAIN`."""
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
        """Whether those of the programs that are not known may still be compiled."""
        return (
            self._compilations + len(uncached(config, self._case.shape, programs))
            <= MAX_COMPILATIONS
        )

    def _note_limit(self, what: str) -> None:
        self._searched.append(
            f"stopped after {self._compilations} compilations of at most {MAX_COMPILATIONS}: whether {what} "
            "fits is not known"
        )

    def _compile(self, config: Config, programs: Sequence[str]) -> dict[str, CompilerCheck]:
        """Figures of programs of a configuration."""
        shape, most = self._case.shape, self._case.compiled_limit_bytes
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
                fits=report.fits and total is not None and total <= most,
                estimated_s=program_s(self._case, config, name).expected,
            )
        return found


def largest_programs(config: Config) -> list[str]:
    """The largest program of each phase.

    What copies prompts into slots is left out: it changes the caches where they are, and holds less
    than the prefill beside them.
    """
    rows, bucket = config.micro_batch_rows, max(config.prompt_buckets)
    return [
        f"gradient {rows}",
        f"segment {config.slots}",
        f"keep {rows}" if config.learner.uses_reference_top_k else f"score {rows}",
        f"prefill {bucket}",
    ]


def larger_plans(case: PlanCase, config: Config) -> Iterator[tuple[str, Config | None, str]]:
    """More slots, then larger micro-batches: in words, the configuration, what grows most.

    No configuration where a step has not so much to do.
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
    """What one run of one of `largest_programs` is expected to take."""
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
    """The step with each phase longer or shorter as its program is by the compiler's estimate.

    The limits of the hardware stay, and so does the share by which it may take longer.
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
    """The case with what the compiler said of each phase's memory beside what was estimated."""
    ratio: dict[str, float] = {}
    for one in programs.values():
        # Where it does not fit by itself, what it is said to need may be too little.
        least = 0.0 if one.fits else _LEAST_OVERSIZE * case.compiled_limit_bytes
        found = max(one.hbm_bytes or 0, least) / plan.memory[one.phase].total
        ratio[one.phase] = max(found, ratio.get(one.phase, 0.0))
    return replace(case, memory_ratio=ratio)


def _all_fit(programs: Mapping[str, CompilerCheck]) -> bool:
    return all(program.fits for program in programs.values())


def _kind(program: str) -> str:
    return program.partition(" ")[0]


def _needs(program: CompilerCheck) -> str:
    if program.hbm_bytes is None:
        return "the compiler does not say by how much"
    return f"={program.hbm_bytes / GIB:.2f} GiB with what is beside it"
