"""Bundles of final schedules, counted by hand.

The lines are those of libtpu 0.0.42 for a sort and a gather, shortened.
"""

from __future__ import annotations

import pytest

from pipeline.compute.aot.schedule import bundles, read_schedules

KEY = "= control target key start\nLH: loop header\nLB: loop body\n= control target key end\n\n"
LOOP = """\
     0   :  { %s4 = inlined_call_operand.vmem [shape: f32[64], index: 4] } /* entry bundle */
   0x1   :  { %5 = vsyncpa [#allocation1], 0  ;;  %s14247_s9 = smov 0 }
   0x2 LB: > { %s10 = sadd.s32 4294967295, %s14071_s9 /* iteration index, stage = 1 */ }
   0x3   : > { %39 = sbr.rel (%p1_p1) target = $region20  ;;  %p6 = scmp.ge.s32.totalorder %s9, 8 }
   0x4 LB: >> { %v19658_v24 = vld [vmem:[%s21577_s17] sm:$0xff] }
   0x5   : >> { %p7 = scmp.ge.s32.totalorder %s19652_s14, %s26386_s27 }
   0x6   :  {}
   0x7   : >> { %19654 = sbr.rel (!%p7) target = $region3054 } /* End region 34 */
   0x8   :  {} /* End region 35 */
   0x9   : > { %p8_p11 = scmp.ge.s32.totalorder %s11_s9, 17 /* loop exit test */ }
   0xa   :  { %10 = sbr.rel (!%p8_p11) target = $region5422 }
   0xb   :  {}
"""
AGAIN = """\
   0xc LB: > { %v1 = vld [vmem:[%s1] sm:$0xff] }
   0xd   : > { %p2 = scmp.ge.s32.totalorder %s2, 3 /* loop exit test */ }
   0xe   :  { %1 = sbr.rel (!%p2) target = $region1 }
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Two bundles before; 16 iterations of 3, and of the 5 of a loop over unknown data; two
        # behind.
        (LOOP, 2 + 16 * (3 + 5) + 2),
        (LOOP + AGAIN, 2 + 16 * (3 + 5) + 2 + 2 * 2 + 1),
        (LOOP.replace(" 17 ", " 1 "), 2 + (3 + 5) + 2),
        ("", 0),
    ],
)
def test_a_loop_counts_once_per_iteration(text, expected):
    assert bundles(KEY + text) == expected


def test_equal_instructions_have_the_same_schedule(tmp_path):
    for folder in ("jit_f/TLP", "jit_f.sort.1.deduplicated"):
        (tmp_path / folder).mkdir(parents=True)
    top, own = tmp_path / "jit_f", tmp_path / "jit_f.sort.1.deduplicated"
    (top / "TLP/0001-TLP-final_bundles.txt").write_text(KEY + AGAIN)
    (own / "0000-sort.1-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
    (own / "0001-sort.1-final_bundles.txt").write_text(KEY + LOOP)
    (top / "0000-TLP-deduplication-map.txt").write_text(
        "key:<top-inlining-caller>\nordinal:0\nequivalent_hlos[size=0]:\n"
        "key:sort.1\nordinal:1\nequivalent_hlos[size=2]:\n  sort.1\n  sort.7\n"
        "key:iota.1\nordinal:2\nequivalent_hlos[size=1]:\n  iota.2\n"
    )
    found = read_schedules([top, own])
    assert found == {"TLP": 5, "sort.1": bundles(LOOP), "sort.7": bundles(LOOP)}
    assert read_schedules([tmp_path / "missing"]) == {}
