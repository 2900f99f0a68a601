"""Cost figures of small programs compiled by XLA, against hand-computed numbers.

`programs/blocks.hlo` (for a TPU v5e): the running log-sum-exp of 64 positions in 4 blocks of 16,
over 8 blocks of 512 of a vocabulary of 4,096, width 256. `programs/recipe.hlo` (v5e): the top 16
of the same vocabulary, position by position. `programs/counted.hlo` (CPU): seven matrix products
in a loop. `programs/branches.hlo` (v5e): a conditional, of which one branch doubles a
matrix and the other multiplies matrices five times. Layouts and metadata are removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.compute.aot.cost_figures import (
    HBM,
    TPU_CLOCK_HZ,
    buffers,
    estimated_seconds,
    memory_spaces,
    whole_logits,
)
from pipeline.compute.aot.hlo import Instruction, Module, Shape, parse

PROGRAMS = Path(__file__).parent / "programs"


def text(name: str) -> str:
    return (PROGRAMS / f"{name}.hlo").read_text(encoding="utf-8")


def trips(module: Module) -> list[int]:
    return sorted(
        module.trips(line, where)
        for where in module.computations.values()
        for line in where.instructions.values()
        if line.opcode == "while"
    )


@pytest.mark.parametrize(
    ("name", "expected"), [("blocks", [4, 8]), ("recipe", [64]), ("counted", [7])]
)
def test_trip_counts_of_loops(name, expected):
    assert trips(parse(text(name))) == expected


def test_trip_counts_are_derived_from_the_condition():
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    assert known in text("counted")
    assert trips(parse(text("counted").replace(known, ""))) == [7]
    other = text("counted").replace(known, "")
    # From 1 to 7 inclusive, in steps of 2.
    other = other.replace("direction=LT", "direction=LE")
    other = other.replace("%constant.5 = s32[] constant(0)", "%constant.5 = s32[] constant(1)")
    other = other.replace("%constant.2 = s32[] constant(1)", "%constant.2 = s32[] constant(2)")
    assert trips(parse(other)) == [4]


def test_a_loop_of_unknown_length_is_an_error():
    unknown = text("counted").replace(', backend_config={"known_trip_count":{"n":"7"}}', "")
    unknown = unknown.replace(
        "%constant.5 = s32[] constant(0)", "%constant.5 = s32[] custom-call(%x.1)"
    )
    with pytest.raises(ValueError, match=r"loop while\.5: the program does not determine"):
        trips(parse(unknown))


def test_seconds_are_cycles_times_trips():
    # 4 x (a slice + 8 x four fusions).
    cycles = 4 * (1868 + 8 * (2653 + 1825 + 1977 + 1830))
    assert estimated_seconds(parse(text("blocks"))) == pytest.approx(cycles / TPU_CLOCK_HZ)
    # 64 x (slice, product, iota, two slices of the sorted); copies of both results.
    cycles = 64 * (1840 + 15635 + 17 + 1832 + 1832) + 1916 + 1916
    assert estimated_seconds(parse(text("recipe"))) == pytest.approx(cycles / TPU_CLOCK_HZ)


def test_the_cheapest_branch_of_a_conditional_counts():
    module = parse(text("branches"))
    doubled, five_products = 4140, 5 * (2304 + 80)
    assert estimated_seconds(module) == pytest.approx((1833 + doubled) / TPU_CLOCK_HZ)
    dear = text("branches").replace('"estimated_cycles":"4140"', '"estimated_cycles":"41400"')
    assert estimated_seconds(parse(dear)) == pytest.approx((1833 + five_products) / TPU_CLOCK_HZ)
    # Both branches have buffers.
    made = {buffer.name for buffer in buffers(module)}
    assert {"broadcast_multiply_fusion", "fusion.8"} <= made


def test_values_inside_a_fusion_are_not_buffers():
    found = {buffer.shape for buffer in buffers(parse(text("recipe")))}
    assert Shape("f32", (4096,)) in found
    # The product before the sum.
    assert "f32[4096,256]" in text("recipe")
    assert Shape("f32", (4096, 256)) not in found


def names(module: Module, **settings) -> set[str]:
    return {buffer.name for buffer in whole_logits(module, vocab=4096, **settings)}


def test_invariant_3_whole_logits_are_found_in_any_shape():
    module = parse(text("blocks"))
    assert names(module, model=(256,), most=10) == set()
    # 16 positions x 512 entries are as many as the vocabulary x 2.
    assert names(module, model=(256,), most=2) == set()
    assert names(module, model=(256,), most=1) == {"fusion.9", "get-tuple-element.110"}
    line = "  %bitcast.21 = "
    for dims, is_found in (
        ("4096,64", True),
        ("64,4096", True),
        ("8,512,64", True),
        ("262144", True),
        ("8,63,512", False),  # the allowed number
        ("64,16,256", False),  # hidden states
        ("4096,256,1", False),  # the embedding itself
        ("4096,2,256", True),  # but not two embeddings
    ):
        other = text("blocks").replace(line, f"  %odd = f32[{dims}]{{0}} custom-call()\n{line}")
        assert ("odd" in names(parse(other), model=(256,), most=63)) == is_found, dims


def test_the_bytes_of_a_shape():
    assert Shape("bf16", (3, 5)).bytes == 30
    assert Shape("pred", (8,)).bytes == 8
    assert Shape("s4", (8,)).bytes == 4
    assert Shape("f8e4m3fn", (8,)).bytes == 8
    assert Shape("f32", ()).bytes == 4
    assert Shape("token", ()).bytes == 0


def test_all_parts_of_an_instruction_are_parsed():
    module = parse(text("blocks"))
    found = module.computations["wide.region_0.10.sunk"].instructions["while.16"]
    assert isinstance(found, Instruction)
    assert found.operands == ("tuple.29",)
    assert found.shapes[2] == Shape("bf16", (8, 512, 256))
    assert found.attribute("body") == "wide.region_1.6.clone.sunk"
    assert module.entry == "main.12"


def test_text_without_a_program_is_an_error():
    with pytest.raises(ValueError, match="not an HLO program"):
        parse("hello")


REPORT = """Memory Space: default (color=0)
Total bytes: 2820833280 (2.63GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
  288.00MiB( 10%);  288.00MiB;   1535688704;                1; f32[32,2048,1152]

Memory Space: vmem (color=1)
Total bytes: 116662272 (111.26MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   27.00MiB( 24%);   27.00MiB;            0;                1; bf16[2,1024,6912]
"""


def test_bytes_by_memory_space():
    assert memory_spaces(REPORT) == {HBM: 2_820_833_280, "vmem": 116_662_272}


def test_text_without_a_memory_report_is_an_error():
    with pytest.raises(ValueError, match="no memory space 'default' in this report: 'Total'"):
        memory_spaces("Total")
