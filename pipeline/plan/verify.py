"""Replaces a plan's estimates by what the TPU compiler says, and looks at what is next to it.

    plan -> [compiler] -> does not fit: the next smaller that should, by what was learned
                          fits: what is larger, slots and then micro-batches; it is taken if all
                          of it fits, too, and is better by `GAIN`

At most `MOST` programs are compiled; those that are kept from before do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from configs.schema import Config
from pipeline.contracts.topology import GIB
from pipeline.plan.compiler import Figures, Say, compiled, missing
from pipeline.plan.cost_model.memory import beside
from pipeline.plan.cost_model.step import Step
from pipeline.plan.cost_model.timing import Seconds
from pipeline.plan.search.options import larger, most_rows, most_slots
from pipeline.plan.search.search import (
    GAIN,
    Case,
    Planned,
    checked,
    in_its_place,
    measured,
    with_plan,
)

MOST = 8
"""Programs that are compiled for a plan at most."""
_JUST = 1.01
"""What does not fit needs this multiple of what there is at least; where the compiler says no more
than that, the search goes down by as little."""
PHASE = {
    "gradient": "update",
    "reference_top_k": "score",
    "score": "score",
    "segment": "decode",
    "prefill": "prefill",
}
"""Which phase a kind of program belongs to."""


@dataclass(frozen=True)
class Compiled:
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
    figures: Figures
    hbm_bytes: int | None
    fits: bool
    estimated_s: float


@dataclass(frozen=True)
class Next:
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

    plan: Planned
    programs: Mapping[str, Compiled]
    searched: tuple[str, ...]
    larger: tuple[Next, ...]
    compilations: int
    compile_s: float


class Verifier:
    """Asks the compiler about one case, and counts how often it had to work.

    Args:
        case: what is planned, for a topology that programs are compiled for.
        say: is told what is compiled.
    """

    def __init__(self, case: Case, *, say: Say) -> None:
        assert case.topology.compiler is not None, case.topology
        self._case, self._say = case, say
        self._topology = case.topology.compiler
        self._searched: list[str] = []
        self._compilations = 0
        self._compile_s = 0.0

    def verify(self, plan: Planned, *, others: Sequence[Planned] = ()) -> Verified:
        """Compiles a plan's largest programs; the plan that it comes to.

        A plan that the configuration fixes stays as it is. Of any other that cannot be made to fit
        the first of `others` takes the place, as far as there are compilations left.

        Raises:
            NoCompiler: if there is none on this machine.
        """
        given = self._case
        fixed = plan.configured and given.config.plan.fixed
        plan, programs, following = self._verify(plan, fixed=fixed)
        for other in others:
            if plan.fits or fixed:
                break
            if not self._may_ask(other.config, largest_programs(other.config)):
                self._stopped(other.name)
                break
            self._searched.append(f"next is {other.name}")
            self._case = given
            plan, programs, following = self._verify(other, fixed=False)
        return Verified(
            plan,
            programs,
            tuple(self._searched),
            tuple(following),
            self._compilations,
            self._compile_s,
        )

    def _verify(
        self, plan: Planned, *, fixed: bool
    ) -> tuple[Planned, Mapping[str, Compiled], Sequence[Next]]:
        """A plan, smaller or larger; its programs; what is larger still."""
        programs: Mapping[str, Compiled] = self._ask(plan.config, largest_programs(plan.config))
        if not fixed:
            plan, programs = self._down(plan, programs)
        following: list[Next] = []
        while _all_fit(programs):
            following = list(self._larger(plan, programs))
            taken = None if fixed else self._take(plan, following)
            if taken is None:
                break
            plan, programs = taken
        for one in following:
            if one.gain >= GAIN and one.fits is None:
                self._stopped(one.what)
        plan = replace(plan, step=timed(plan.step, programs), fits=_all_fit(programs))
        return plan, programs, following

    def _down(
        self, plan: Planned, programs: Mapping[str, Compiled]
    ) -> tuple[Planned, Mapping[str, Compiled]]:
        """The next smaller plans, until one fits or nothing is left to try."""
        while not _all_fit(programs):
            self._searched += [
                f"{name} does not fit: {_needs(one)}"
                for name, one in programs.items()
                if not one.fits
            ]
            self._case = _learned(self._case, plan, programs)
            found = in_its_place(self._case, plan)
            if not found.fits:
                self._searched.append("nothing smaller is expected to fit")
                break
            found = replace(found, config=checked(found.config))
            names = largest_programs(found.config)
            if not self._may_ask(found.config, names):
                slots, tokens = found.config.slots, found.config.plan.micro_batch_tokens
                self._stopped(f"{slots} slots, micro-batches of {tokens} tokens")
                break
            plan, programs = found, self._ask(found.config, names)
        return plan, programs

    def _take(
        self, plan: Planned, following: list[Next]
    ) -> tuple[Planned, Mapping[str, Compiled]] | None:
        """The first larger plan that is better and fits as a whole, with its programs.

        Of what is tried and is not taken `following` says why: it does not fit, or is not known.
        """
        for place, one in enumerate(following):
            if not one.fits or one.gain < GAIN:
                continue
            assert one.config is not None
            names = largest_programs(one.config)
            if not self._may_ask(one.config, names):
                following[place] = replace(one, fits=None)
                continue
            programs = self._ask(one.config, names)
            if _all_fit(programs):
                self._searched.append(f"{one.what} fits and is better: taken")
                own = plan.configured
                return measured(self._case, plan.name, one.config, configured=own), programs
            name, large = next(item for item in programs.items() if not item[1].fits)
            self._searched.append(f"{one.what}: {name} does not fit: {_needs(large)}")
            following[place] = replace(one, program=name, hbm_bytes=large.hbm_bytes, fits=False)
        return None

    def _larger(self, plan: Planned, programs: Mapping[str, Compiled]) -> Iterator[Next]:
        """More slots, then larger micro-batches; compiled only if they promise `GAIN`."""
        now = timed(plan.step, programs).tokens_per_s
        for what, config, program in larger_plans(self._case, plan.config):
            if config is None:
                yield Next(what, 0.0)
                continue
            gain = timed(self._case.step(config), programs).tokens_per_s / now - 1
            if gain < GAIN or not self._may_ask(config, [program]):
                yield Next(what, gain, config)
                continue
            found = self._ask(config, [program])[program]
            yield Next(what, gain, config, program, found.hbm_bytes, found.fits)

    def _may_ask(self, config: Config, programs: Sequence[str]) -> bool:
        """Whether those of the programs that are not known may still be compiled."""
        return self._compilations + len(missing(config, self._case.shape, programs)) <= MOST

    def _stopped(self, what: str) -> None:
        self._searched.append(
            f"stopped after {self._compilations} compilations of at most {MOST}: whether {what} "
            "fits is not known"
        )

    def _ask(self, config: Config, programs: Sequence[str]) -> dict[str, Compiled]:
        """Figures of programs of a configuration."""
        shape, most = self._case.shape, self._case.most_bytes
        answers = compiled(config, shape, programs, topology=self._topology, say=self._say)
        found = {}
        for name, figures in answers.items():
            if not figures.cached:
                self._compilations += 1
                self._compile_s += figures.compile_s
            total = figures.hbm_bytes
            if total is not None:
                total += sum(beside(config, shape, name).values())
            found[name] = Compiled(
                phase=PHASE[_kind(name)],
                figures=figures,
                hbm_bytes=total,
                fits=figures.fits and total is not None and total <= most,
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
        f"reference_top_k {rows}" if config.learner.uses_reference_top_k else f"score {rows}",
        f"prefill {bucket}",
    ]


def larger_plans(case: Case, config: Config) -> Iterator[tuple[str, Config | None, str]]:
    """More slots, then larger micro-batches: in words, the configuration, what grows most.

    No configuration where a step has not so much to do.
    """
    plan = config.plan
    slots, rows = config.slots // plan.sampler_shards, config.micro_batch_rows
    if slots >= most_slots(config):
        yield f"more than {config.slots} slots: a step has no more rollouts", None, ""
    else:
        more = min(larger(slots), most_slots(config)) * plan.sampler_shards
        bigger = with_plan(config, {"slots": more})
        yield f"{more} slots", bigger, f"segment {more}"
    rows //= plan.learner_shards
    unit = config.row_tokens * plan.learner_shards
    if rows >= most_rows(config, case.lengths):
        yield f"micro-batches above {rows * unit} tokens: a step has no more", None, ""
    else:
        more = larger(rows, tiled=False)
        bigger = with_plan(config, {"micro_batch_tokens": more * unit})
        yield (
            f"micro-batches of {more * unit} tokens",
            bigger,
            f"gradient {more * unit // config.row_tokens}",
        )


def program_s(case: Case, config: Config, program: str) -> Seconds:
    """What one run of one of `largest_programs` is expected to take."""
    pace, plan = case.pace(config), config.plan
    kind, size = _kind(program), int(program.partition(" ")[2])
    if kind == "segment":
        slots = size // plan.sampler_shards
        return pace.decode_step(slots) * config.segment_steps + pace.settle(slots)
    if kind == "prefill":
        return pace.prefill(config.prefill_rows(size) * size, seq=size)
    positions = size * config.row_tokens // plan.learner_shards
    run = pace.gradient if kind == "gradient" else pace.score
    return run(positions, seq=case.lengths.sequence)


def timed(step: Step, programs: Mapping[str, Compiled]) -> Step:
    """The step with each phase longer or shorter as its program is by the compiler's estimate.

    The limits of the hardware stay, and so does the share by which it may take longer.
    """
    seconds = dict(step.seconds)
    for program in programs.values():
        if program.figures.seconds > 0:
            before = seconds[program.phase]
            share = program.figures.seconds / program.estimated_s
            expected, high = share * before.expected, share * before.high
            low = min(before.low, expected)
            seconds[program.phase] = Seconds(low, expected, high, before.regime)
    return replace(step, seconds=seconds)


def _learned(case: Case, plan: Planned, programs: Mapping[str, Compiled]) -> Case:
    """The case with what the compiler said of each phase's memory beside what was estimated."""
    ratio: dict[str, float] = {}
    for one in programs.values():
        # Where it does not fit by itself, what it is said to need may be too little.
        least = 0.0 if one.fits else _JUST * case.most_bytes
        found = max(one.hbm_bytes or 0, least) / plan.memory[one.phase].total
        ratio[one.phase] = max(found, ratio.get(one.phase, 0.0))
    return replace(case, memory_ratio=ratio)


def _all_fit(programs: Mapping[str, Compiled]) -> bool:
    return all(program.fits for program in programs.values())


def _kind(program: str) -> str:
    return program.partition(" ")[0]


def _needs(program: Compiled) -> str:
    if program.hbm_bytes is None:
        return "the compiler does not say by how much"
    return f"={program.hbm_bytes / GIB:.2f} GiB with what is beside it"
