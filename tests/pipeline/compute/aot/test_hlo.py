"""Figures of small programs compiled by XLA, against hand-computed numbers.

`programs/blocks.hlo` (for a TPU v5e): the running log-sum-exp of 64 positions in 4 blocks of 16,
over 8 blocks of 512 of a vocabulary of 4,096, width 256. `programs/recipe.hlo` (v5e): the top 16
of the same vocabulary, position by position. `programs/counted.hlo` (CPU): seven matrix products
in a loop. `programs/branches.hlo` (v5e): a conditional, of which one branch doubles a
matrix and the other multiplies matrices five times. Layouts and metadata are removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.compute.aot.compile import hbm_bytes
from pipeline.compute.aot.hlo import Module, parse
from tests.whole_logits import whole_logits

PROGRAMS = Path(__file__).parent / "programs"


def text(name: str) -> str:
    return (PROGRAMS / f"{name}.hlo").read_text(encoding="utf-8")


def trips(module: Module) -> list[float]:
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


def counted(*, start: str, step: int, direction: str = "LT") -> Module:
    """The loop of `counted`; its constants are 0, 1 and 7."""
    found = text("counted").replace("direction=LT", f"direction={direction}")
    found = found.replace("%constant.5 = s32[] constant(0)", f"%constant.5 = s32[] {start}")
    one = "%constant.2 = s32[] constant(1)"
    found = found.replace(one, one.replace("1", str(step)))
    return parse(found)


@pytest.mark.parametrize(
    ("direction", "start", "step", "expected"),
    [("LT", 0, 1, 7), ("LE", 1, 2, 4), ("LT", 7, 1, 0), ("GT", 13, -3, 2), ("NE", 21, -7, 2)],
)
def test_trip_counts_are_derived_from_the_condition(direction, start, step, expected):
    """The loop counts from `start` in steps of `step` while it is, for example, less than 7."""
    module = counted(start=f"constant({start})", step=step, direction=direction)
    assert trips(module) == [expected]


@pytest.mark.parametrize(("start", "step"), [("custom-call(%x.1)", 1), ("constant(0)", 0)])
def test_a_loop_of_unknown_length_is_an_error(start, step):
    with pytest.raises(ValueError, match=r"loop while\.5: the program does not determine"):
        trips(counted(start=start, step=step))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 32 columns are padded to 128 lanes; rows, here the minor axis, to 8 sublanes.
        ("bf16[1152,32]{1,0:T(8,128)(2,1)}", (True, 2 * 1152 * 128)),
        ("f32[3,5]{0,1:T(8,128)}", (True, 4 * 8 * 128)),
        ("s32[100]{0:T(1024)S(1)}", (False, 4 * 1024)),
        ("bf16[64,1,512,256]{3,2,0,1:T(8,128)(2,1)S(0)}", (True, 2 * 64 * 512 * 256)),
        ("f32[]{:T(128)S(6)}", (False, 4)),
        ("f32[3,5]", (True, 60)),
    ],
)
def test_memory_and_padding_of_an_array(text, expected):
    program = f"ENTRY %main (x: f32[3]) -> f32[3] {{\n  ROOT %x = {text} parameter(0)\n}}\n"
    (shape,) = parse(program).computations["main"].root.shapes
    assert (shape.in_hbm, shape.bytes) == expected


REPORT = """Memory Space: vmem (color=1)
Total bytes: 116662272 (111.26MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   27.00MiB( 24%);   27.00MiB;            0;                1; bf16[2,1024,6912]

Memory Space: default (color=0)
Total bytes: 2820833280 (2.63GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
  288.00MiB( 10%);  288.00MiB;   1535688704;                1; f32[32,2048,1152]
"""


def test_bytes_of_the_main_memory():
    assert hbm_bytes(REPORT) == 2_820_833_280
    with pytest.raises(ValueError, match="not a memory report: 'Total'"):
        hbm_bytes("Total")


def names(module: Module, **settings) -> set[str]:
    return {buffer.name for buffer in whole_logits(module, vocab=4096, **settings)}


def test_promise_7_whole_logits_are_found_in_any_shape():
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
