"""Assigns the instructions of a compiled program to parts of the model. No JAX.

HLO has the Python stack that traced an instruction. Its innermost function in the table decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.compute.aot.hlo import Computation, Instruction, Module

_BY_FUNCTION = {
    "FeedForward": "feed-forward",
    "Einsum": "projections",
    "normalize": "norms and RoPE",
    "_unit": "norms and RoPE",
    "apply_rope": "norms and RoPE",
    "flush": "flush",
    "TokenAttention": "attention",
    "PackedAttention": "attention",
    "PromptAttention": "attention",
    "FlashAttention": "attention",
    "gumbel_noise": "noise",
    "_member": "noise",
    "keys_at": "noise",
    "gathered_scores": "gathers",
    "gathered_gradient": "gathers",
    "_top_k_of": "top k",
    "_best": "top k",
    "score": "head",
    "sample": "head",
    "_forward": "head",
    "_backward": "head",
    "look_up": "embedding",
    "Gemma._embed": "embedding",
    "Policy.bind": "LoRA",
    "run_layer": "norms and RoPE",
}
_GATHERED = re.compile(r'op_name="[^"]*(?:/gather|\bpd->d\b[^"]*|\bd,pd\b[^"]*)"')
"""Rows of the embedding and their products: in a custom VJP the stack does not show them."""
_HEAVY = {"convolution", "dot", "gather", "scatter", "sort", "reduce", "custom-call"}
_MOVES = {"copy", "convert", "transpose", "reshape"}
COPIES, WAITS, OTHER = "copies", "waits", "other"


def part_of(module: Module, where: Computation, line: Instruction) -> str:
    """Name of the part that an instruction of the computation `where` belongs to.

    A copy belongs to what it copies, if that is computed there.
    """
    if line.opcode.endswith("-done"):
        return WAITS
    if line.opcode.endswith("-start"):
        return COPIES
    if line.opcode in _MOVES:
        source = where.instructions[line.operands[0]]
        part = OTHER if source.opcode.endswith("-done") else part_of(module, where, source)
        if part not in {COPIES, OTHER}:
            return part
    part = _by_stack(module.functions(line) or _of_called(module, line))
    if part == "head" and _GATHERED.search(line.text):
        return "gathers"
    return COPIES if part == OTHER and line.opcode in _MOVES else part


def _by_stack(functions: Sequence[str]) -> str:
    """The part of the innermost function that has one."""
    classes = [name.partition(".")[0] for name in functions]
    if "_compute_lora_delta" in classes or (
        "LoraProvider" in classes and "PtqProvider" not in classes
    ):
        return "LoRA"
    for name, first in zip(functions, classes, strict=True):
        if part := _BY_FUNCTION.get(name) or _BY_FUNCTION.get(first):
            return part
    return OTHER


def _of_called(module: Module, line: Instruction) -> Sequence[str]:
    """Functions that traced the most expensive instruction of a fusion."""
    if line.opcode != "fusion":
        return ()
    inside = module.computations[line.called[0]].instructions.values()
    known = [one for one in inside if module.functions(one)]
    heavy = [one for one in known if one.opcode in _HEAVY]
    return module.functions((heavy or known)[-1]) if known else ()
