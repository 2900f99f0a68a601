"""Assigns the instructions of a compiled program to parts of the model. No JAX.

HLO has the Python stack that traced an instruction. Its innermost function in the table decides.
"""

from __future__ import annotations

from pipeline.compute.aot.hlo import Instruction, Module

_BY_FUNCTION = {
    "FeedForward": "feed-forward",
    "Einsum": "projections",
    "RMSNorm": "norms and RoPE",
    "_normalize": "norms and RoPE",
    "apply_rope": "norms and RoPE",
    "flush": "flush",
    "TokenAttention": "attention",
    "PackedAttention": "attention",
    "PromptAttention": "attention",
    "FlashAttention": "attention",
    "gumbel_noise": "noise",
    "_member": "noise",
    "_draw": "noise",
    "keys_at": "noise",
    "gathered_scores": "gathers",
    "_gathered_grad": "gathers",
    "_top_k_by_columns": "top k",
    "_best": "top k",
    "score": "head",
    "sample": "head",
    "_forward": "head",
    "_backward": "head",
    "look_up": "embedding",
    "Gemma._embed": "embedding",
    "Policy.bind": "LoRA",
    "_layer": "norms and RoPE",
}
_HEAVY = {"convolution", "dot", "gather", "scatter", "sort", "reduce", "custom-call"}
_MOVES = {"copy", "transpose", "reshape", "copy-start", "slice-start", "async-start"}


def part_of(module: Module, line: Instruction) -> str:
    """Name of the part."""
    if line.opcode.endswith("-done"):
        return "waits"
    functions = module.functions(line) or _of_called(module, line)
    if any(name.startswith("_compute_lora_delta") for name in functions):
        return "LoRA"
    providers = [name.partition(".")[0] for name in functions]
    if "LoraProvider" in providers and "PtqProvider" not in providers:
        return "LoRA"
    for name in functions:
        first = name.partition(".")[0]
        part = _BY_FUNCTION.get(name) or _BY_FUNCTION.get(first)
        if part is not None:
            return part
    return "copies" if line.opcode in _MOVES else "other"


def _of_called(module: Module, line: Instruction) -> tuple[str, ...]:
    """Functions of a fusion's most expensive instruction that has some."""
    if line.opcode != "fusion":
        return ()
    inside = [
        one
        for one in module.computations[line.called[0]].instructions.values()
        if module.functions(one)
    ]
    heavy = [one for one in inside if one.opcode in _HEAVY]
    chosen = (heavy or inside)[-1:]
    return module.functions(chosen[0]) if chosen else ()
