"""The verifier's search, with a fake compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from configs.schema import Config
from pipeline.contracts.model_shape import ModelShape
from pipeline.contracts.topology import GIB
from pipeline.plan import verify
from pipeline.plan.compiler import CompilerReport, NoCompiler
from pipeline.plan.cost_model.memory import estimate_memory, memory_beside, memory_during
from pipeline.plan.cost_model.programs import depends_on
from pipeline.plan.search.fitting import (
    MIN_GAIN,
    PlanCase,
    SizedPlan,
    choose_placement,
    estimate_plan,
    with_plan,
)
from pipeline.plan.verify import (
    MAX_COMPILATIONS,
    Verifier,
    larger_plans,
    largest_programs,
    program_s,
    with_compiled_times,
)
from tests.pipeline.plan.presets import FREE, case, preset


@dataclass
class Compiler:
    """Reports `ratio` times the estimated memory and `speed` times the estimated seconds, by kind.

    A program that does not fit by itself, or has more than `most_slots`, is refused; with `silent`
    without its size.
    """

    case: PlanCase
    ratio: dict[str, float] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    silent: bool = False
    most_slots: int = 10_000
    asked: list[str] = field(default_factory=list)
    known: list[dict[str, Any]] = field(default_factory=list)

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify, "compile_programs", self)
        monkeypatch.setattr(verify, "uncached", self.missing)

    def missing(self, config: Config, shape: ModelShape, programs: Sequence[str]) -> list[str]:
        return [name for name in programs if depends_on(config, shape, name) not in self.known]

    def __call__(
        self,
        config: Config,
        shape: ModelShape,
        programs: Sequence[str],
        *,
        topology: str,
        say: Callable[[str], None],
    ) -> dict[str, CompilerReport]:
        assert topology == "v5e:2x4"
        return {program: self._figures(config, shape, program, say) for program in programs}

    def _figures(
        self, config: Config, shape: ModelShape, program: str, say: Callable[[str], None]
    ) -> CompilerReport:
        kind = program.partition(" ")[0]
        cached = not self.missing(config, shape, [program])
        if not cached:
            self.asked.append(program)
            self.known.append(depends_on(config, shape, program))
        say(program)
        phase = verify.PHASE[kind]
        total = memory_during(config, shape, program, phase=phase).total
        own = int(self.ratio.get(kind, 1.0) * total) - sum(
            memory_beside(config, shape, program).values()
        )
        seconds = self.speed.get(kind, 1.0) * program_s(self.case, config, program).expected
        slots = config.slots if kind == "segment" else 0
        fits = own <= 15.75 * GIB and slots <= self.most_slots
        told = None if self.silent and not fits else own
        return CompilerReport(fits, told, 20.0, seconds=seconds, cached=cached)


def verified(
    given: PlanCase, monkeypatch: pytest.MonkeyPatch, **about: object
) -> tuple[verify.Verified, Compiler]:
    compiler = Compiler(given, **about)  # type: ignore[arg-type]
    compiler.put(monkeypatch)
    said: list[str] = []
    found = Verifier(given, say=said.append).verify(choose_placement(given).chosen)
    assert set(said) == set(compiler.asked)
    return found, compiler


def test_a_plan_that_fits_is_compiled_once_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(preset("gemma3_1b", *FREE))
    plan = choose_placement(given).chosen
    found, compiler = verified(given, monkeypatch)
    assert found.plan.config == plan.config
    assert compiler.asked == largest_programs(plan.config)
    assert (found.compilations, found.compile_s) == (4, 80.0)
    assert found.searched == ()
    memory = memory_during(plan.config, given.shape, compiler.asked[0], phase="update")
    assert found.programs[compiler.asked[0]].hbm_bytes == memory.total
    assert found.plan.step.total == plan.step.total
    slots, tokens = found.larger
    assert slots.what == "more than 512 slots: a step has no more rollouts"
    assert tokens.what == "micro-batches of 32768 tokens"
    assert slots.gain == 0
    assert tokens.gain < MIN_GAIN
    assert tokens.fits is None  # not worth a compilation


def test_compiled_times_replace_estimates_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(preset("gemma3_1b", *FREE))
    plan = choose_placement(given).chosen
    found, _ = verified(given, monkeypatch, speed={"segment": 2.0, "gradient": 0.1})
    before, after = plan.step.seconds, found.plan.step.seconds
    assert after["decode"].expected == pytest.approx(2 * before["decode"].expected)
    assert after["decode"].low == before["decode"].low
    assert after["update"].expected == pytest.approx(0.1 * before["update"].expected)
    assert after["update"].low == after["update"].expected
    assert after["score"] == before["score"]


def test_sizes_shrink_until_the_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(preset("gemma3_4b", *FREE))
    plan = choose_placement(given).chosen
    found, compiler = verified(given, monkeypatch, ratio={"gradient": 1.5})
    assert found.plan.fits
    assert all(one.fits for one in found.programs.values())
    assert found.searched[0].startswith(f"{compiler.asked[0]} does not fit: ")
    assert re.search(r"does not fit: =[\d.]+ GiB in use on the chip$", found.searched[0])
    changed = found.plan.config.plan
    assert (changed.micro_batch_tokens, changed.remat) != (
        plan.config.plan.micro_batch_tokens,
        plan.config.plan.remat,
    )
    assert changed.slots == plan.config.plan.slots
    assert found.compilations <= MAX_COMPILATIONS


@pytest.mark.parametrize("silent", [True, False])
def test_slots_are_reduced_if_too_many_do_not_fit(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(preset("gemma3_4b", *FREE, ("rollout.prompts_per_step", "64")))
    plan = choose_placement(given).chosen
    ratio = dict.fromkeys(("segment", "prefill"), 1.6)
    found, _ = verified(given, monkeypatch, ratio=ratio, silent=silent)
    assert found.plan.fits
    assert found.plan.config.slots < plan.config.slots
    assert found.plan.config.micro_batch_rows == plan.config.micro_batch_rows
    if silent:
        assert "does not fit: by an unknown amount" in found.searched[0]


def test_a_search_without_a_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(preset("gemma3_4b", *FREE))
    found, compiler = verified(given, monkeypatch, ratio=dict.fromkeys(verify.PHASE, 9.0))
    assert not found.plan.fits
    assert found.larger == ()
    assert found.searched[-1] == "no smaller sizes are expected to fit"
    assert len(compiler.asked) <= MAX_COMPILATIONS


def test_another_placement_replaces_one_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = case(preset("gemma3_4b", *FREE))
    choice = choose_placement(given)
    compiler = Compiler(given)

    def only_on_every_device(
        config: Config, *args: Any, **settings: Any
    ) -> dict[str, CompilerReport]:
        compiler.ratio = dict.fromkeys(verify.PHASE, 9.0 if config.plan.tp > 1 else 1.0)
        return compiler(config, *args, **settings)

    monkeypatch.setattr(verify, "compile_programs", only_on_every_device)
    monkeypatch.setattr(verify, "uncached", compiler.missing)
    assert choice.chosen.config.plan.tp > 1
    whole = [one for one in choice.others if one.config.plan.tp == 1]
    found = Verifier(given, say=lambda _: None).verify(choice.chosen, others=whole)
    assert found.plan.fits
    assert found.plan.name == whole[0].name
    assert f"next placement: {whole[0].name}" in found.searched
    assert found.compilations <= MAX_COMPILATIONS


def test_fixed_sizes_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("gemma3_4b")
    found, compiler = verified(case(config), monkeypatch, ratio={"gradient": 2.0})
    assert not found.plan.fits
    assert found.plan.config == config
    assert compiler.asked == largest_programs(config)


def configured(slots: int) -> tuple[PlanCase, SizedPlan]:
    """A base on each chip of slightly less memory, with `slots` slots."""
    bounded = [("plan.fixed", "false"), ("plan.micro_batch_tokens", "16384")]
    given = case(preset("gemma3_4b", *bounded, ("plan.slots", "none")))
    chip = replace(given.topology.chip, hbm_gib=14.0)
    tight = replace(given, topology=replace(given.topology, chip=chip))
    own = next(one for one in choose_placement(tight).compared if one.configured)
    small = with_plan(own.config, {"slots": slots})
    return tight, estimate_plan(tight, own.name, small, configured=True)


def test_larger_and_faster_plans_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tight, small = configured(slots=64)
    Compiler(tight, {"segment": 0.7, "prefill": 0.7}).put(monkeypatch)
    found = Verifier(tight, say=lambda _: None).verify(small)
    assert found.plan.config.slots > 64
    assert any(line.endswith("fits and is faster: taken") for line in found.searched)
    assert all(one.gain < MIN_GAIN or one.fits is not True for one in found.larger)
    assert found.compilations <= MAX_COMPILATIONS


def test_a_larger_plan_is_not_taken_if_another_program_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight, small = configured(slots=64)
    (_, more, segment), _ = larger_plans(tight, small.config)
    assert more is not None
    fits, too_large = (
        estimate_memory(config, tight.shape)["prefill"].total for config in (small.config, more)
    )
    ratio = tight.compiled_limit_bytes / ((fits + too_large) / 2)
    compiler = Compiler(tight, {"segment": 0.7, "prefill": ratio})
    compiler.put(monkeypatch)
    found = Verifier(tight, say=lambda _: None).verify(small)
    assert segment in compiler.asked
    assert found.plan.fits
    assert found.plan.config == small.config
    assert list(found.programs) == largest_programs(small.config)
    assert all(one.fits for one in found.programs.values())
    slots = found.larger[0]
    assert slots.gain >= MIN_GAIN
    assert (slots.fits, slots.program) == (False, largest_programs(small.config)[-1])
    assert slots.hbm_bytes == pytest.approx(ratio * too_large, abs=1)
    assert found.searched[0].startswith(f"{slots.what}: {slots.program} does not fit: ")


def test_it_stops_at_the_compilation_limit_and_resumes_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight, small = configured(slots=8)
    compiler = Compiler(tight, {"segment": 0.7, "prefill": 0.7})
    compiler.put(monkeypatch)
    first = Verifier(tight, say=lambda _: None).verify(small)
    assert first.compilations == len(compiler.asked) == MAX_COMPILATIONS
    assert first.plan.fits
    assert first.larger[0].gain >= MIN_GAIN
    assert first.larger[0].fits is None
    assert first.searched[-1] == (
        f"stopped after {MAX_COMPILATIONS} of at most {MAX_COMPILATIONS} compilations: it is "
        f"unknown whether {first.larger[0].what} fits"
    )
    again = Verifier(tight, say=lambda _: None).verify(small)
    assert again.plan.config.slots > first.plan.config.slots
    assert again.compilations == len(compiler.asked) - MAX_COMPILATIONS <= MAX_COMPILATIONS


def test_without_a_reported_size_the_next_smaller_plan_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight, plan = configured(slots=160)
    compiler = Compiler(tight, {"segment": 0.7, "prefill": 0.7}, silent=True, most_slots=130)
    compiler.put(monkeypatch)
    found = Verifier(tight, say=lambda _: None).verify(plan)
    assert found.plan.fits
    assert found.plan.config.slots == 128
    assert found.compilations <= MAX_COMPILATIONS
    assert not any(one.fits for one in found.larger if one.gain >= MIN_GAIN)


def test_a_search_that_ends_before_a_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    tight, plan = configured(slots=160)
    Compiler(tight, {"segment": 0.7}, silent=True, most_slots=8).put(monkeypatch)
    found = Verifier(tight, say=lambda _: None).verify(plan)
    assert not found.plan.fits
    assert found.compilations <= MAX_COMPILATIONS
    assert re.fullmatch(
        rf"stopped after \d of at most {MAX_COMPILATIONS} compilations: it is unknown whether "
        r"\d+ slots, micro-batches of 16384 tokens fits",
        found.searched[-1],
    )


def test_the_next_larger_size_is_about_a_quarter_larger() -> None:
    given = case(preset("gemma3_4b"))  # 128 slots for 256 rollouts, one row on each chip
    (slots, more, program), (tokens, longer, gradient) = larger_plans(given, given.config)
    assert (slots, program) == ("160 slots", "segment 160")
    assert (tokens, gradient) == ("micro-batches of 32768 tokens", "gradient 16")
    assert more is not None
    assert longer is not None
    assert (more.slots, longer.micro_batch_rows) == (160, 16)


def test_phase_times_scale_with_their_program() -> None:
    given = case(preset("gemma3_1b"))
    step = given.step(given.config)
    figures = CompilerReport(True, 1, 1.0, seconds=0.3)
    programs = {
        "reference_top_k 8": verify.CompilerCheck("score", figures, 1, True, estimated_s=0.1)
    }
    found = with_compiled_times(step, programs)
    assert found.seconds["score"].expected == pytest.approx(3 * step.seconds["score"].expected)
    assert found.tokens_per_s < step.tokens_per_s


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> dict[str, CompilerReport]:
        raise NoCompiler("none here")

    monkeypatch.setattr(verify, "compile_programs", absent)
    given = case(preset("gemma3_1b", *FREE))
    with pytest.raises(NoCompiler, match="none here"):
        Verifier(given, say=print).verify(choose_placement(given).chosen)
