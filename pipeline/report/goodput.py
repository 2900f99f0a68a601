"""Goodput, speed and cost from the ledger, by published definitions.

    scheduling   time with devices / all time
    runtime      time in training steps / time with devices
    program      time of useful device work / time in training steps
    total        their product: useful device work / all time

as in Google's ML Productivity Goodput
(https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity).
Times are chip-seconds of learner and samplers. Useful work is prefill, the share of decoding in
which a slot generates a token that is kept, and the share of an update that is not padding.

    MFU  = 4 N T / (peak x chip-seconds of updates)      useful operations
    HFU  = c N P / (peak x chip-seconds of updates)      executed operations

with N parameters, T tokens and P positions of the learner, padding included. A token costs 2 N
operations forward and 2 N for the gradient of the activations (PaLM, arXiv:2204.02311, appendix B,
without the gradient of the frozen weights); c is 6 with full rematerialization, else 4. Forward
passes of a reference or a teacher are not counted, but their seconds are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from configs.schema import Config
from pipeline.contracts.sizes import Sizes, sized
from pipeline.plan.cost_model.hardware import device_count, topology_of
from pipeline.plan.cost_model.memory import estimate_memory
from pipeline.plan.search.fitting import PlanCase
from pipeline.run.ledger import (
    DRIVER,
    LEARNER,
    SAMPLERS,
    SCHEDULING_ROWS,
    STEP_ROWS,
    WORK_ROWS,
    Work,
)

_USEFUL, _REMATERIALIZED = 4.0, 6.0
"""Operations per token and parameter that a LoRA update needs, and with full rematerialization."""
_HOUR_S = 3600.0
_MILLION = 1e6


@dataclass(frozen=True)
class Hardware:
    """The chips of a run with their published limits, and what the model demands of them.

    Attributes:
        chips: chips of a process, by kind of process; a colocated run has a learner only.
        total_chips: all chips of the run.
        chip_hour_usd: price of a chip-hour; None: unknown.
        parameters: of the base; 0: unknown, as are the limits below.
        operations: executed operations per position and parameter of an update.
        flops: peak operations per second of a chip in bfloat16 (on a CPU what the planner assumes).
        int8_flops: the same in 8 bits; None: updates do not compute in 8 bits.
        planned_bytes: the planner's bytes of a chip for given sizes, by kind of process.
        segment_s: least seconds of a decode segment by the chip's limits, by slots of a sampler.
    """

    chips: Mapping[str, int]
    total_chips: int
    chip_hour_usd: float | None = None
    parameters: int = 0
    operations: float = _USEFUL
    flops: float = 0.0
    int8_flops: float | None = None
    planned_bytes: Callable[[Sizes], Mapping[str, int]] = lambda _: {}
    segment_s: Callable[[int], float] = lambda _: 0.0

    @staticmethod
    def of(config: Config) -> Hardware:
        """The hardware of a run.

        The limits of a GPU are unknown, and so are the shapes of a model without `config.json`.
        """
        plan, total = config.plan, device_count(config)
        chips = {LEARNER: plan.learner_devices}
        if plan.placement == "split":
            chips[SAMPLERS] = plan.devices_per_sampler
        if plan.platform == "gpu":
            return Hardware(chips, total, plan.chip_hour_usd)
        # Shares of the published limits, so that runs on different hosts can be compared.
        topology = topology_of(config, None)
        chip = topology.chip.published
        known = Hardware(chips, total, chip.chip_hour_usd)
        try:
            case = replace(PlanCase.of(config), topology=replace(topology, chip=chip))
        except (FileNotFoundError, ValueError):
            return known
        return replace(
            known,
            parameters=case.shape.parameters,
            operations=_USEFUL if plan.remat in {"none", "dots"} else _REMATERIALIZED,
            flops=chip.bf16_flops,
            int8_flops=chip.int8_flops if config.model.quantization == "int8_matmul" else None,
            planned_bytes=lambda sizes: _planned_bytes(case, sizes),
            segment_s=lambda slots: case.roofline(config).segment(slots // plan.sampler_shards).low,
        )


def _planned_bytes(case: PlanCase, sizes: Sizes) -> dict[str, int]:
    """The planner's bytes of a chip, by kind of process."""
    phases = estimate_memory(sized(case.config, sizes), case.shape)
    sampling = max(phases[phase].total for phase in ("prefill", "decode"))
    learning = max(phases[phase].total for phase in ("score", "update"))
    if case.config.plan.placement != "split":
        return {LEARNER: max(sampling, learning)}
    return {LEARNER: learning, SAMPLERS: sampling}


def goodput(seconds: Mapping[str, Mapping[str, float]], hardware: Hardware) -> dict[str, float]:
    """Scheduling, runtime and program goodput and their product; empty without device time."""
    rows = chip_seconds(seconds, hardware)
    total = sum(rows.values())
    ready = total - sum(rows[row] for row in SCHEDULING_ROWS)
    stepping = sum(rows[row] for row in STEP_ROWS)
    working = sum(rows[row] for row in WORK_ROWS)
    if not (total and ready and stepping):
        return {}
    return {
        "scheduling": ready / total,
        "runtime": stepping / ready,
        "program": working / stepping,
        "total": working / total,
    }


def chip_seconds(
    seconds: Mapping[str, Mapping[str, float]], hardware: Hardware
) -> defaultdict[str, float]:
    """Chip-seconds of learner and samplers by row."""
    rows: defaultdict[str, float] = defaultdict(float)
    for kind, chips in hardware.chips.items():
        for row, value in seconds.get(kind, {}).items():
            rows[row] += chips * value
    return rows


def speeds(
    seconds: Mapping[str, Mapping[str, float]], work: Work, hardware: Hardware
) -> dict[str, float]:
    """Speeds of the phases, and what they use of the chips; what is not defined is left out.

    Args:
        seconds: of an interval, by kind of process and row.
        work: of this interval.
        hardware: of the run.

    Returns:
        Tokens per second of training steps (`generated`, `trained`; `useful` per chip) and of a
        phase, of all processes together; `mfu`, `hfu` and, if updates compute in 8 bits, `mfu_int8`
        relative to that peak; `decode_bandwidth`: least seconds of the decode segments by the
        chip's limits, which is reading weights and caches, as a share of the actual ones.
    """
    rows, chips = chip_seconds(seconds, hardware), hardware.total_chips
    step_s = sum(seconds.get(DRIVER, {}).get(row, 0.0) for row in STEP_ROWS)
    # Chip-seconds over chips: the mean seconds of a process.
    learning = hardware.chips[LEARNER]
    sampling = chips - learning if SAMPLERS in hardware.chips else learning
    decode, update = rows["decode"] + rows["decode_idle"], rows["update"] + rows["update_padding"]
    tokens, learned = work.generated, work.positions - work.padded
    parameters, flops = hardware.parameters, hardware.flops * update
    ratios = {
        "generated_tokens_per_s": (tokens, step_s),
        "trained_tokens_per_s": (work.trained, step_s),
        "useful_tokens_per_s_chip": (work.trained, step_s * chips),
        "prefill_tokens_per_s": (work.prefilled, rows["prefill"] / sampling),
        "decode_tokens_per_s": (tokens, decode / sampling),
        "update_tokens_per_s": (learned, update / learning),
        "mfu": (_USEFUL * parameters * learned, flops),
        "hfu": (hardware.operations * parameters * work.positions, flops),
        "mfu_int8": (_USEFUL * parameters * learned, (hardware.int8_flops or 0.0) * update),
    }
    segments = work.segments.items()
    least_s = sum(count * hardware.segment_s(slots) for slots, count in segments)
    # Segments of several samplers run at the same time, each on the chips of a sampler.
    ratios["decode_bandwidth"] = (least_s * hardware.chips.get(SAMPLERS, learning), decode)
    return {name: amount / total for name, (amount, total) in ratios.items() if amount and total}


def cost(held_s: float, tokens: Mapping[str, int], hardware: Hardware) -> dict[str, float]:
    """Dollars so far and per million tokens; empty without a price.

    Args:
        held_s: seconds in which the run had its chips.
        tokens: generated tokens by fate.
        hardware: of the run.
    """
    if hardware.chip_hour_usd is None:
        return {}
    usd = held_s / _HOUR_S * hardware.total_chips * hardware.chip_hour_usd
    generated, trained = sum(tokens.values()), tokens.get("trained", 0)
    found = {"usd": usd}
    if generated:
        found["usd_per_mtoken_generated"] = _MILLION * usd / generated
    if trained:
        found["usd_per_mtoken_trained"] = _MILLION * usd / trained
        if usd:
            found["tokens_per_usd"] = trained / usd
    return found
