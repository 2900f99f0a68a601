"""The verifier's search, with a fake compiler."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from configs.schema import Config
from pipeline.data.batching import Packing
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan import verify as verify_module
from pipeline.plan.compiler import CompilerReport
from pipeline.plan.cost_model.memory import memory_beside, memory_during
from pipeline.plan.search.fitting import PlanCase, SizedPlan, choose_placement
from pipeline.plan.topology import GIB
from pipeline.plan.verify import Verified, largest_programs, verify
from tests.pipeline.plan.presets import AUTO, FREE, case, preset

PHASES = ("prefill", "decode", "score", "update")


@dataclass
class Compiler:
    """Reports `ratio` times the estimated memory and `speed` times the estimated time, by phase.

    A program that does not fit by itself is refused; with `silent` without its size.
    """

    case: PlanCase
    ratio: dict[str, float] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    silent: bool = False

    def __call__(
        self, config: Config, _: ModelShape, programs: Sequence[str], **__: object
    ) -> dict[str, CompilerReport]:
        phases = {name: phase for phase, name in largest_programs(config).items()}
        return {program: self._report(config, program, phases[program]) for program in programs}

    def _report(self, config: Config, program: str, phase: str) -> CompilerReport:
        shape, ratio = self.case.shape, self.ratio.get(phase, 1.0)
        total = memory_during(config, shape, program).total()
        own = int(ratio * total) - sum(memory_beside(config, shape, program).values())
        model, packing = self.case.roofline(config), Packing.expected(config, self.case.lengths)
        estimated_s = model.program(program, packing).expected
        fits = own <= 15.75 * GIB
        told = None if self.silent and not fits else own
        return CompilerReport(fits, told, 20.0, seconds=self.speed.get(phase, 1.0) * estimated_s)


def verified(compiler: Compiler, plan: SizedPlan, monkeypatch: pytest.MonkeyPatch) -> Verified:
    monkeypatch.setattr(verify_module, "compile_programs", compiler)
    found = verify(compiler.case, plan, say=lambda _: None)
    assert found.plan.fits == all(one.report.fits for one in found.programs.values())
    return found


def test_compiled_figures_replace_the_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(case(preset("gemma3_1b", *FREE)))
    plan = choose_placement(compiler.case).chosen
    found = verified(compiler, plan, monkeypatch)
    assert found.plan.config == plan.config
    assert list(found.programs) == ["prefill 320", "segment 512", "reference_top_k 8", "gradient 8"]
    assert found.searched == ()
    assert found.programs["gradient 8"].report.hbm_bytes == plan.memory["update"].total()
    assert found.plan.step.total == plan.step.total
    compiler.speed = {"decode": 2.0, "update": 0.1}
    before, after = plan.step.seconds, verified(compiler, plan, monkeypatch).plan.step.seconds
    assert after["decode"].expected == pytest.approx(2 * before["decode"].expected)
    assert after["update"].expected == pytest.approx(0.1 * before["update"].expected)
    assert after["score"] == before["score"]


MANY = (*AUTO, ("rollout.prompts_per_step", "64"))
OF_LEARNER, OF_SAMPLER = {"micro_batch_tokens", "remat"}, {"slots", "segment_steps"}
CASES = [
    # overrides, the compiler, whether a plan fits, settings that may change, a line of the search
    (AUTO, {"ratio": {"update": 3.0}}, True, OF_LEARNER, r"gradient \d+ does not fit: =[\d.]+ GiB"),
    (
        MANY,
        {"ratio": {"decode": 2.0, "prefill": 2.0}, "silent": True},
        True,
        OF_SAMPLER,
        "does not fit: of unknown size",
    ),
    (FREE, {"ratio": dict.fromkeys(PHASES, 9.0)}, False, OF_LEARNER | OF_SAMPLER, "no smaller siz"),
    # Given sizes are not searched.
    ((), {"ratio": {"update": 2.0}}, False, set(), None),
]


@pytest.mark.parametrize(("overrides", "settings", "fits", "may_change", "searched"), CASES)
def test_sizes_are_reduced_until_the_plan_fits(
    overrides: tuple[tuple[str, str], ...],
    settings: dict[str, Any],
    fits: bool,
    may_change: set[str],
    searched: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Compiler(case(preset("gemma3_4b", *overrides)), **settings)
    plan = choose_placement(compiler.case).chosen
    found = verified(compiler, plan, monkeypatch)
    assert found.plan.fits == fits
    before, after = plan.config.plan.model_dump(), found.plan.config.plan.model_dump()
    changed = {key for key, value in before.items() if after[key] != value}
    assert changed <= may_change
    assert bool(changed) == fits
    if searched is None:
        assert found.searched == ()
    else:
        assert any(re.search(searched, line) for line in found.searched)
