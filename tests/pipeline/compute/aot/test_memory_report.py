"""Reading XLA's report on memory."""

from __future__ import annotations

import pytest

from pipeline.compute.aot.memory_report import HBM, memory_spaces

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


def test_another_text_is_refused():
    with pytest.raises(ValueError, match="no memory space 'default' in this report: 'Total'"):
        memory_spaces("Total")
