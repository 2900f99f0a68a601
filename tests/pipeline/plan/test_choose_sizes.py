"""The sizes of a run: compiled until they fit, given or measured, and smaller after a death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from configs.load import load_config
from configs.schema import Config
from pipeline.compute.builds import Building, Built, Ready
from pipeline.plan.choose_sizes import (
    Chosen,
    candidates,
    choose_sizes,
    fastest_size,
    learning_s,
    measuring_limit_s,
    plan_file,
    reduced,
    sampling_s,
)
from pipeline.plan.search.fitting import PlanCase, first_sizes
from pipeline.plan.sizes import Sizes, sized, smaller, with_plan
from pipeline.protocols import Learner, NothingSmaller, OutOfMemory, Sampler, SamplerTimes
from pipeline.run.console import Console
from tests.pipeline.plan.presets import FREE, PROJECT, case, preset
from tests.samples import make_config

ANY = Sizes(10**6, 10**6)
LONG = ("budget.steps", "10000")
"""Steps of a run that compares sizes."""


def demo(*overrides: tuple[str, str]) -> Config:
    return load_config(PROJECT / "configs/demo.toml", overrides)


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)  # the demo's model has a relative path


@dataclass
class Process:
    """A process whose memory holds some sizes, and whose programs take given times.

    `prepared` are the sizes that it was compiled for, `timed` those of each measurement, which
    advances the clock.
    """

    most: Sizes = ANY
    share: float | None = None
    segment_s: Callable[[int], float] = lambda _: 1.0
    batch_s: Callable[[int], float] = lambda _: 1.0
    takes_s: float = 1.0
    loads_s: float = 2.0
    prepared: list[Sizes] = field(default_factory=list)
    timed: list[int] = field(default_factory=list)
    clock: float = 0.0

    async def prepare(self, sizes: Sizes) -> Ready:
        if sizes.slots > self.most.slots:
            raise OutOfMemory("generate", "segment needs 9 GiB", self.share)
        if sizes.micro_batch_tokens > self.most.micro_batch_tokens:
            raise OutOfMemory("update", "gradient needs 9 GiB", self.share)
        self.prepared.append(sizes)
        self.clock += 3.5
        return Ready(self.loads_s, (Built("apply", 1.0, cached=False),), 1.0)

    async def building(self) -> Building:
        return Building()

    async def sampler_times(self) -> SamplerTimes:
        slots = self.prepared[-1].slots
        self._measured(slots)
        ladder = [slots // 2**n for n in range(4)]
        return SamplerTimes({n: self.segment_s(n) for n in ladder}, {52: 0.1})

    async def micro_batch_s(self) -> float:
        self._measured(self.prepared[-1].micro_batch_tokens)
        return self.batch_s(self.prepared[-1].micro_batch_tokens)

    def _measured(self, size: int) -> None:
        self.timed.append(size)
        self.clock += self.takes_s


def choose(
    config: Config, process: Process, recorded: dict[str, Any] | None = None
) -> tuple[Chosen, list[str]]:
    said = list[str]()
    found = asyncio.run(
        choose_sizes(
            config,
            recorded,
            learner=cast("Learner", process),
            samplers=[cast("Sampler", process)],
            one_process=True,
            display=Console(write=said.append),
            now=lambda: process.clock,
        )
    )
    return found, said


def test_given_sizes_are_used_and_nothing_is_measured() -> None:
    process = Process()
    found, said = choose(demo(), process)
    assert found.sizes == Sizes(192, 6144)
    assert (process.timed, found.measured, found.load_s) == ([], {}, 2.0)
    assert found.once_s == 1.0  # of compiling
    assert [one.name for one in found.built] == ["sampler and learner: apply"]
    assert said[-1].endswith("sizes (given): 192 slots, micro-batches of 6144 tokens")


def test_compiling_that_loading_hides_is_not_saved_by_the_cache() -> None:
    # Of 3.5 s the process waited 1 s for compilations.
    for loads_s, once_s in ((2.0, 1.0), (3.0, 0.5), (4.0, 0.0)):
        assert choose(demo(), Process(loads_s=loads_s))[0].once_s == once_s


def test_a_given_size_that_does_not_fit_is_refused_with_one_that_does() -> None:
    process = Process(most=Sizes(150, 5000))
    with pytest.raises(ValueError, match="plan") as told:
        choose(demo(), process)
    assert str(told.value) == (
        "plan.slots = 192 does not fit: out of memory (generate): segment needs 9 GiB; the next "
        "smaller that fits is 144\n"
        "plan.micro_batch_tokens = 6144 does not fit: out of memory (update): gradient needs "
        "9 GiB; the next smaller that fits is 4608"
    )
    with pytest.raises(NothingSmaller, match=r"there is nothing smaller than plan\.slots = 2$"):
        choose(demo(), Process(most=Sizes(1, 5000)))
    with pytest.raises(NothingSmaller, match="leave no room"):
        choose(demo(), Process(most=Sizes(1, 5000), share=-0.1))


def test_the_fastest_of_planned_half_and_double_is_chosen() -> None:
    config = demo(*FREE, LONG)
    first, given = first_sizes(config, None), PlanCase.of(config)
    slots, tokens = (candidates(given, first, n) for n in ("slots", "micro_batch_tokens"))
    assert tokens == [first.micro_batch_tokens, tokens[0] // 2, 2 * tokens[0]]
    assert slots[:2] == [first.slots, first.slots // 2]
    assert slots[2] <= 2 * first.slots  # not more than the rollouts of a step
    # Segments take the same time with more slots; micro-batches take more than in proportion.
    process = Process(batch_s=lambda size: float(size**2))
    found, said = choose(config, process)
    assert process.timed == [*slots, *tokens]
    assert found.sizes == Sizes(slots[2], tokens[1]) == process.prepared[-1]
    assert list(found.measured) == ["slots", "micro_batch_tokens"]
    # Compilation for the first sizes, then for each one that is measured, and for the chosen ones.
    prepares = (len(process.prepared) - 1) * 3.5
    assert found.once_s == 1.0 + prepares + len(process.timed) * process.takes_s
    assert f"sizes (measured): {slots[2]} slots" in said[-1]
    one, _ = choose(demo(("plan.micro_batch_tokens", "none"), LONG), Process())
    assert (one.sizes.slots, list(one.measured)) == (192, ["micro_batch_tokens"])
    slower = Process(segment_s=lambda n: float(n**2), batch_s=lambda size: size**0.5)
    assert choose(config, slower)[0].sizes == Sizes(slots[1], tokens[2])


def test_what_runs_out_of_memory_when_it_is_measured_is_not_chosen() -> None:
    config = demo(*FREE, LONG)
    first = first_sizes(config, None)
    found, _ = choose(config, Process(most=first))
    assert found.sizes.slots == first.slots

    class Fails(Process):
        async def sampler_times(self) -> SamplerTimes:
            if self.prepared[-1].slots >= first.slots:
                raise OutOfMemory("generate", "caches")
            return await super().sampler_times()

    found, _ = choose(config, Fails())
    less = reduced(config, first, OutOfMemory("generate", "")).slots
    assert found.sizes.slots == less
    assert list(found.measured["slots"]) == [less]
    smaller, said = choose(config, Process(most=Sizes(first.slots - 1, 10**6)))
    assert smaller.sizes.slots < first.slots
    assert any(f"plan.slots = {first.slots}: out of memory (generate): segm" in one for one in said)


def test_measuring_ends_after_a_minute_and_two_percent_of_the_budget() -> None:
    assert measuring_limit_s(demo(*FREE)) == 60
    timed = (("budget.steps", "none"), ("budget.time", "10m"))
    assert measuring_limit_s(demo(*FREE, *timed)) == 12
    dated = (("budget.steps", "none"), ("budget.until", "1970-01-01T00:20:00Z"))
    assert measuring_limit_s(demo(*FREE, *dated)) == 0  # it has passed
    # Half of it for each size: one measurement of 20 s leaves no time for another one.
    process = Process(takes_s=20)
    choose(demo(*FREE, LONG), process)
    assert len(process.timed) == 2
    # A short run compiles no other sizes.
    process = Process()
    choose(demo(*FREE, ("budget.steps", "20")), process)
    assert len(process.timed) == 2
    assert process.prepared[0] == process.prepared[-1]


def test_a_resume_measures_nothing(tmp_path: Path) -> None:
    config, process = demo(*FREE, ("run.dir", str(tmp_path))), Process()
    recorded = plan_file(config, Sizes(8, 384))
    found, said = choose(config, process, recorded)
    assert (found.sizes, process.timed) == (Sizes(8, 384), [])
    assert found.once_s == 1.0
    assert said[-1].endswith("sizes (of plan.json): 8 slots, micro-batches of 384 tokens")
    # Memory may have become smaller since, also where the sizes were given.
    recorded = plan_file(demo(), Sizes(8, 384))
    less, _ = choose(demo(), Process(most=Sizes(7, 10**6)), recorded)
    assert less.sizes == Sizes(6, 384)


def test_seconds_of_a_step() -> None:
    given, sizes = case(preset("gemma3_1b", *FREE)), Sizes(64, 2048 * 8)
    buckets = given.config.prompt_buckets

    def seconds(segment_s: float, prefill_s: float) -> float:
        ladder = dict.fromkeys((64, 32, 16, 8), segment_s)
        return sampling_s(given, sizes, SamplerTimes(ladder, dict.fromkeys(buckets, prefill_s)))

    assert seconds(2.0, 0.0) == pytest.approx(2 * seconds(1.0, 0.0))
    assert seconds(1.0, 1.0) - seconds(1.0, 0.0) >= 1
    # As many positions in half as many micro-batches.
    double = Sizes(64, 2 * sizes.micro_batch_tokens)
    ratio = learning_s(given, sizes, 1.0) / learning_s(given, double, 1.0)
    assert ratio == pytest.approx(2, rel=0.1)
    # Of equally fast sizes the smallest.
    assert fastest_size({32: 1.0, 64: 0.996, 16: 1.1}) == 32


# --- smaller sizes


ROW = 88
"""The longest sequence, and the row length, of the fakes' configuration."""


def config(**plan: object) -> Config:
    return make_config(Path(), plan={"platform": "cpu", "placement": "split", **plan})


def test_sized_changes_the_sizes_and_nothing_else() -> None:
    whole = config(slots=16, slot_buckets=[12, 6, 4], micro_batch_tokens=4 * ROW)
    assert whole.plan.slot_ladder == (16, 12, 6, 4)
    small = sized(whole, Sizes(slots=8, micro_batch_tokens=2 * ROW))
    assert Sizes.of(small) == Sizes(8, 2 * ROW)
    assert small.plan.slot_ladder == (8, 6, 4)
    again = sized(small, Sizes.of(whole))
    assert again == with_plan(whole, {"slot_buckets": (6, 4)})
    assert config(slots=20, sampler_devices=2).plan.slot_ladder == (20, 10, 2)
    with pytest.raises(ValueError, match="a multiple of 88, a row of 88 tokens"):
        sized(whole, Sizes(slots=8, micro_batch_tokens=ROW + 1))


@pytest.mark.parametrize(
    ("slots", "shards", "ladder"),
    [
        (64, 1, [48, 32, 24, 16, 12, 9, 6, 4, 3, 2, 1]),
        (512, 8, [384, 256, 192, 128, 96, 72, 48, 32, 24, 16, 8]),
        (6, 2, [4, 2]),
    ],
)
def test_sizes_fall_in_multiples_of_the_shards(slots: int, shards: int, ladder: list[int]) -> None:
    given, found = config(slots=slots, sampler_devices=shards), []
    sizes = Sizes.of(given)
    while (fewer := smaller(given, sizes, "generate")) is not None:
        sizes = fewer
        found.append(sizes.slots)
        assert sizes.micro_batch_tokens == given.plan.micro_batch_tokens
    assert found == ladder


def test_phases_of_the_learner_reduce_micro_batches() -> None:
    rows = config(slots=2, learner_devices=2, micro_batch_tokens=8 * ROW)
    for phase in ("score", "update", "publish", "export"):
        assert smaller(rows, Sizes.of(rows), phase) == Sizes(2, 6 * ROW)
        assert smaller(rows, Sizes(2, 2 * ROW), phase) is None


@pytest.mark.parametrize(
    ("share", "slots"), [(0.9, 48), (0.3, 16), (0.02, 1), (0.001, 1), (0.0, None), (-0.1, None)]
)
def test_a_known_share_of_memory_skips_sizes_that_are_too_large(
    share: float, slots: int | None
) -> None:
    given = config(slots=64)
    found = smaller(given, Sizes.of(given), "generate", share=share)
    assert (found and found.slots) == slots
