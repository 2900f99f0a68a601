"""Bytes that small compiled programs read; the programs are those of the compute.aot tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.bench.bytes_read import bytes_read
from pipeline.compute.aot.hlo import parse

PROGRAMS = Path(__file__).parents[1] / "pipeline/compute/aot/programs"
EMBEDDING = (4096, 256)
SIZE = 2 * 4096 * 256


def text(name: str) -> str:
    return (PROGRAMS / f"{name}.hlo").read_text(encoding="utf-8")


def test_bytes_read_of_a_parameter():
    # The whole embedding for each of 64 positions; for each of 4 blocks of positions 8 slices.
    assert bytes_read(parse(text("recipe")), EMBEDDING) == 64 * SIZE
    assert bytes_read(parse(text("blocks")), EMBEDDING) == 4 * 8 * (SIZE // 8)


def test_a_copy_is_followed_in_place_of_the_parameter():
    once = text("blocks").replace(
        "%bitcast.19 = bf16[8,512,256]{2,1,0:T(8,128)} bitcast(%emb.1)",
        "%copied = f32[4096,256]{1,0} convert(%emb.1)\n"
        "  %bitcast.19 = f32[8,512,256]{2,1,0:T(8,128)} bitcast(%copied)",
    )
    # Read once to be converted, then four times as float32.
    assert bytes_read(parse(once), EMBEDDING) == SIZE + 4 * 2 * SIZE


def test_a_parameter_is_identified_by_its_dimensions():
    with pytest.raises(ValueError, match=r"0 entry parameters have the dimensions \(4096, 255\)"):
        bytes_read(parse(text("blocks")), (4096, 255))
