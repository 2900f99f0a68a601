"""With which sizes a process begins."""

from __future__ import annotations

from pathlib import Path

import configs
from configs.load import load_config
from configs.schema import Config
from launch.chat import _one_at_a_time
from pipeline.contracts.sizes import Sizes, sized
from pipeline.plan.search.search import planned_sizes
from pipeline.plan.start import case_of, first_sizes
from pipeline.run.run_folder import RunFolder

OPEN = [
    ("plan.fixed", "false"),
    ("plan.slots", "none"),
    ("plan.micro_batch_tokens", "none"),
]


def config(folder: Path, *overrides: tuple[str, str]) -> Config:
    demo = Path(configs.__file__).parent / "demo.toml"
    return load_config(demo, [("run.dir", str(folder)), *overrides])


def test_what_is_given_is_taken(tmp_path: Path):
    for overrides in ([], OPEN[:1]):
        made = config(tmp_path, *overrides)
        assert first_sizes(made, None) == Sizes(192, 6144)


def test_what_is_left_open_is_planned_within_what_is_given(tmp_path: Path):
    made = config(tmp_path, *OPEN)
    found = first_sizes(made, None)
    assert found == planned_sizes(case_of(made))
    assert found.slots % 2 == found.micro_batch_tokens % (2 * 192) == 0
    bounded = config(tmp_path, *OPEN[:2], ("plan.micro_batch_tokens", "384"))
    assert first_sizes(bounded, None).micro_batch_tokens == 384


def test_a_run_goes_on_with_the_sizes_of_its_checkpoint(tmp_path: Path):
    made = config(tmp_path, *OPEN)
    folder = RunFolder.of(made)
    folder.create(made)
    sizes = [Sizes(8, 384), Sizes(4, 384)]
    folder.write_plan({"in_force": sizes[0].to_json(), "at_checkpoint": None})
    assert first_sizes(made, folder.plan) == sizes[0]
    folder.write_plan({"in_force": sizes[0].to_json(), "at_checkpoint": sizes[1].to_json()})
    assert first_sizes(made, folder.plan) == sizes[1]
    folder.close()


def test_a_conversation_needs_no_sizes(tmp_path: Path):
    one = _one_at_a_time(config(tmp_path, *OPEN), adapter="somewhere")
    assert sized(one, Sizes.of(one)).plan.slot_ladder == (2,)
