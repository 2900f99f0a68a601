"""Parts of the model by the functions that traced an instruction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.compute.aot.hlo import parse
from pipeline.compute.aot.parts import part_of

TEXT = """HloModule jit_f

%fused (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128] parameter(0)
  %dot = f32[8,128] dot(%p, %p), metadata={op_name="jit(f)/dot_general" stack_frame_id=2}
  ROOT %negate = f32[8,128] negate(%dot), metadata={op_name="jit(f)/neg" stack_frame_id=3}
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128] parameter(0)
  %own = f32[8,128] negate(%x), metadata={op_name="OP" stack_frame_id=1}
  %fusion = f32[8,128] fusion(%own), kind=kOutput, calls=%fused
  %copied = f32[8,128] copy(%own)
  %converted = f32[8,128] convert(%copied), metadata={op_name="jit(f)/convert" stack_frame_id=3}
  %copy-start = (f32[8,128]{1,0:S(1)}, f32[8,128], u32[]) copy-start(%x)
  %copy-done = f32[8,128]{1,0:S(1)} copy-done(%copy-start)
  ROOT %moved = f32[8,128] copy(%copy-done)
}
"""
ATTENTION, NORM = ("_attend", "TokenAttention.__call__"), ("normalize", "_unit")


def parts(stack: tuple[str, ...], *, op: str = "jit(f)/neg") -> dict[str, str]:
    """Part of each instruction, if `own` has this stack."""
    module = parse(TEXT.replace("OP", op))
    module = replace(module, frames={1: stack, 2: ATTENTION, 3: NORM})
    where = module.computations["main"]
    return {line.name: part_of(module, where, line) for line in where.instructions.values()}


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (("normalize", "_unit", "run_layer", "Gemma.__call__"), "norms and RoPE"),
        (
            ("PtqProvider.einsum", "LoraProvider.einsum", "Einsum.__call__", "run_layer"),
            "projections",
        ),
        (("LoraProvider.einsum", "Einsum.__call__", "run_layer"), "LoRA"),
        (("_compute_lora_delta", "LoraProvider.dot_general", "FeedForward.__call__"), "LoRA"),
        (("flush.<locals>.one", "flush", "DecodePrograms.segment"), "flush"),
        (("_threefry", "gumbel_noise", "_column_noise", "_in_one_pass", "sample"), "noise"),
        (("Shard.scores", "_top_k_of", "_forward", "score"), "top k"),
        (("gathered_scores.<locals>.one", "_forward.<locals>.block", "score"), "gathers"),
        (("main",), "other"),
        ((), "other"),
    ],
)
def test_the_innermost_known_function_decides(stack, expected):
    assert parts(stack)["own"] == expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("jit(f)/transpose(jvp())/while/body/vmap()/gather", "gathers"),
        ("jit(f)/transpose(jvp())/while/body/vmap(p,pd->d)/dot_general", "gathers"),
        ("jit(f)/transpose(jvp())/while/body/tv,vd->td/dot_general", "head"),
    ],
)
def test_gathered_logits_in_the_backward_pass_of_the_head(op, expected):
    assert parts(("score", "LearnerPrograms._scores"), op=op)["own"] == expected


def test_a_fusion_is_its_most_expensive_instruction():
    assert parts(())["fusion"] == "attention"


def test_a_copy_belongs_to_what_it_copies():
    found = parts(("apply_rope", "run_layer"))
    assert found["copied"] == found["converted"] == "norms and RoPE"
    assert found["moved"] == found["copy-start"] == "copies"
    assert found["copy-done"] == "waits"
    unknown = parts(())
    assert (unknown["copied"], unknown["converted"]) == ("copies", "norms and RoPE")
