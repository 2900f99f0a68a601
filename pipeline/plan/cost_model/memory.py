"""What is on a chip at the fullest moment of each phase of a step, estimated. No JAX.

While a program runs, more is on its chip than it holds itself: the optimizer's state, the caches of
rollouts, a copy of the weights for rollouts alone. Here both are put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import Config
from pipeline.contracts.model_shape import ModelShape
from pipeline.contracts.programs import SAMPLER, split_name
from pipeline.inputs.dataset.batching import batch_shape
from pipeline.plan.cost_model.program_memory import Parts, Sizes, held, slots_state

PARTS = (
    "base",
    "adapter",
    "optimizer",
    "kv_local",
    "kv_global",
    "activations",
    "head",
    "temporaries",
)
"""In the order in which they are told. `base` has a copy for rollouts alone, where there is one;
`adapter` all that are on the chip; `optimizer` gradients, too."""
RESIDENT = ("base", "adapter", "optimizer")
"""Of these, what does not depend on sizes."""


@dataclass(frozen=True)
class Memory:
    """What a chip holds at one moment.

    Attributes:
        phase: when.
        parts: bytes by what they are for; all of `PARTS`.
    """

    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes together."""
        return sum(self.parts.values())


def estimate(config: Config, shape: ModelShape) -> dict[str, Memory]:
    """The fullest moment of each phase, on a chip of the process that does it.

    Returns:
        `prefill`, `decode`, `score` and `update`; in colocated placement, where one process does
        all of them in turns, also `colocated`: the fullest of them.
    """
    rows = max(batch_shape(config, pad=0).sizes)
    programs = {
        "prefill": [f"prefill {bucket}" for bucket in config.prompt_buckets],
        "decode": [f"segment {config.slots}"],
        "score": [
            f"score {rows}",
            *([f"reference_top_k {rows}"] if config.learner.uses_reference_top_k else []),
        ],
        "update": [f"gradient {rows}"],
    }
    found = {
        phase: max(
            (moment(config, shape, program, phase=phase) for program in names),
            key=lambda memory: memory.total,
        )
        for phase, names in programs.items()
    }
    if config.plan.placement == "colocated":
        fullest = max(found.values(), key=lambda memory: memory.total)
        found["colocated"] = Memory("colocated", fullest.parts)
    return found


def moment(config: Config, shape: ModelShape, program: str, *, phase: str) -> Memory:
    """What a chip holds while a program runs on it."""
    own, others = held(config, shape, program), beside(config, shape, program)
    return Memory(phase, {name: own.get(name, 0) + others.get(name, 0) for name in PARTS})


def beside(config: Config, shape: ModelShape, program: str) -> Parts:
    """What is on a chip while a program runs on it, and is neither its argument nor its result.

    These bytes are known, not estimated: added to what a compiler says of the program they make
    what the chip holds.
    """
    sizes = Sizes.of(config, shape, program)
    kind, colocated = split_name(program)[0], config.plan.placement == "colocated"
    of_sampler = kind in SAMPLER
    parts: Parts = dict.fromkeys(PARTS, 0)
    if colocated or not of_sampler:
        # The learner's: Adam's moments, unless they are arguments; the adapter that is none.
        parts["optimizer"] += 0 if kind == "apply" else 2 * sizes.adapter
        parts["adapter"] += (1 + _further_adapters(config)) * sizes.adapter
    if of_sampler and not sizes.adapted:
        parts["adapter"] += sizes.adapter
    if colocated or of_sampler:
        parts["base"] += _copy(config, shape, sizes, of_sampler=of_sampler)
    if kind in {"prefill", "segment"}:
        _add(parts, _caches_beside(sizes, kind))
    if kind in {"empty", "fill"}:
        parts["base"] += sizes.base
        parts["adapter"] += sizes.adapter if sizes.adapted else 0
    return parts


def _further_adapters(config: Config) -> int:
    """The KL's reference, where it is not the base, and the teacher."""
    moved = config.run.warm_start or config.lora.start is not None
    reference = config.learner.kl_coef > 0 and moved
    return int(reference) + int(config.learner.teacher is not None)


def _copy(config: Config, shape: ModelShape, sizes: Sizes, *, of_sampler: bool) -> int:
    """Matrices of the layers that are there twice, for rollouts in another form.

    While the sampler runs on its copy the learner's are beside, and the other way round. A sampler
    of its own has its weights rounded while they are loaded; only merging needs the former ones.
    """
    kind = config.plan.rollout_weights
    if kind == "shared" or (config.plan.placement == "split" and kind != "merged"):
        return 0
    quantization = "none" if of_sampler or kind == "merged" else kind
    layer = shape.layer_bytes(
        config.model.dtype, quantization=quantization, fsdp=sizes.place.fsdp, tp=sizes.place.tp
    )
    return shape.layers * layer


def _caches_beside(sizes: Sizes, kind: str) -> Parts:
    """Slots, and prompts that were read and wait for one.

    A prompt's caches wait while others decode; where there are several devices, those of one also
    wait while another reads.
    """
    config, parts = sizes.config, dict[str, int]()
    if kind == "prefill":
        _add(parts, slots_state(sizes, config.slots))
    if kind == "segment" or sizes.place.count > 1:
        bucket = max(config.prompt_buckets)
        _add(parts, sizes.rings(config.prefill_rows(bucket), bucket))
    return parts


def _add(parts: Parts, more: Mapping[str, int]) -> None:
    for name, size in more.items():
        parts[name] = parts.get(name, 0) + size
