"""The settings that say how much is done at once, and on which devices."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from configs.base import Problem, Sizes, Table, nearest_multiples, refuse
from configs.learner import Learner
from configs.model import Model

TPU_LEASES = (1, 4, 8)
"""Contiguous chips of a TPU host that a process can have; two of them have no bounds that are set
for half of a host's row."""
_HOST = TPU_LEASES[-1]
_HEAD_TOKENS = 2048  # vocabulary x this many logits are the most that may exist on a device


class Plan(Table):
    """Sizes and placement: which processes own which devices and how much they do at once."""

    fixed: bool = Field(
        True,
        description="true: sizes are the ones below, whatever happens; false: they are planned, "
        "and smaller ones taken when memory runs out",
    )
    platform: Literal["cpu", "tpu", "gpu"] = Field(description="kind of device; never substituted")
    placement: Literal["split", "colocated"] = Field(
        description="split: samplers and learner own devices each; colocated: one process owns all"
    )
    learner_devices: int = Field(1, ge=1, description="devices of the learner (colocated: all)")
    samplers: int | None = Field(None, ge=1, description="split only: sampler processes, default 1")
    sampler_devices: int | None = Field(
        None, ge=1, description="split only: devices of each sampler, default 1"
    )
    fsdp: int = Field(
        1, ge=1, description="parts of the learner's weights that are gathered layer by layer"
    )
    tp: int = Field(
        1, ge=1, description="parts of the learner's heads and widths that are computed apart"
    )
    sampler_tp: int | None = Field(
        None, ge=1, description="split only: tp of each sampler, default 1"
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="slots of a sampler: rollouts it decodes at once; with plan.fixed = false the "
        "most that there may be, default: no such bound",
    )
    calibration_share: float | None = Field(
        None,
        ge=0,
        le=0.5,
        description="plan.fixed = false only, not on gpu, where given sizes are tried: share of "
        "the budget's time, with budget.steps of an hour, in which sizes are measured at the "
        "start, the largest first; 0: they are estimated; default: 0.02",
    )
    slot_buckets: Sizes | None = Field(
        None,
        description="fewer slots into which the last rollouts are moved, the most first; default: "
        "slots halved up to three times",
    )
    kv_cache: Literal["model", "int8"] = Field(
        "model",
        description="type of the sampler's KV caches: the model's; or 8 bits with a scale for each "
        "token and head, half of bfloat16's bytes, log-probs a little off the learner's. "
        "launch.evaluate and launch.chat use the model's unless the command line says otherwise",
    )
    rollout_weights: Literal["shared", "merged", "int8", "int8_matmul"] = Field(
        "shared",
        description="what samplers multiply with, in a run's evaluations too: base and adapter as "
        "the learner; merged: a copy of the adapted matrices with the adapter added, made at each "
        "sync, in model.dtype, as an export is; int8, int8_matmul: a copy of the layers' matrices "
        "kept as model.quantization says, the adapter beside it. int8, int8_matmul and merged with "
        "bfloat16 round otherwise than the learner and need learner.importance_cap. "
        "launch.evaluate and launch.chat use shared unless the command line says otherwise",
    )
    hbm_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of each device that may be used; drawing, scoring and learning whose "
        "programs take more by the compiler's account count as out of memory before they begin; "
        "default: all there is, and the device says when it is used up",
    )
    segment_steps: int = Field(
        32,
        ge=1,
        description="decode steps between two looks by the host, at most rollout.max_new_tokens",
    )
    prefill_tokens: int = Field(
        4096,
        ge=1,
        description="prompt positions read at a time, and between two segments, per device: at "
        "least a prompt, and more while less than half of the slots decode",
    )
    prompt_buckets: Sizes = Field(
        (), description="prompt lengths below max_prompt_tokens that get a program of their own"
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="positions in one gradient program, over all devices of the learner; rollouts "
        "are packed into rows of row_tokens; with plan.fixed = false the most that there may be, "
        "default: no such bound",
    )
    row_tokens: int | None = Field(
        None,
        ge=1,
        description="positions of a packed row; default: the longest sequence, "
        "max_prompt_tokens + max_new_tokens, which it must hold",
    )
    head_tokens: int = Field(
        2048,
        ge=1,
        le=_HEAD_TOKENS,
        description="positions whose logits exist at the same time, per device; "
        "the top k has blocks of its own",
    )
    head_vocab: int = Field(
        8192,
        ge=1,
        description="vocabulary entries whose logits exist at the same time, per device",
    )
    remat: Literal["none", "dots", "full", "offload"] = Field(
        "full",
        description="what the backward pass computes again: nothing; all but matrix products; "
        "each layer; each layer, whose input waits in host memory",
    )
    layer_tokens: int = Field(
        2048,
        ge=1,
        description="positions that a layer computes at a time in the gradient, per device",
    )
    attention: Literal["blocked", "splash"] = Field(
        "blocked",
        description="the learner's: in blocks of queries; or jax's splash kernels, TPU only",
    )
    chip_hour_usd: float | None = Field(
        None,
        ge=0,
        description="price of a device for an hour, on the CPU of the machine, for the cost that "
        "launch.plan tells; default: the list price of 2025 of the chip on Google Cloud, none for "
        "CPUs and GPUs",
    )

    @model_validator(mode="after")
    def _placement(self) -> Plan:
        problems: list[Problem] = []
        if self.placement == "colocated":
            problems += [
                (key, "means nothing in colocated placement; remove it")
                for key in ("samplers", "sampler_devices", "sampler_tp")
                if getattr(self, key) is not None
            ]
        problems += self._meshes()
        rows, shards, tp = self.slots, self.sampler_shards, self.tp_of_sampler
        problems += self._fixed_problems() if self.fixed else self._planned_problems()
        if rows is not None and rows % shards:
            nearest = nearest_multiples(rows, shards)
            parts = f"{shards} devices" if tp == 1 else f"{shards} groups of tp = {tp} devices"
            what = f"must be a multiple of a sampler's {parts}; nearest valid: {nearest}"
            problems.append(("slots", what))
        problems += self._slot_problems()
        if self.attention == "splash" and self.platform != "tpu":
            what = f'needs plan.platform = "tpu", not "{self.platform}"; nearest valid: "blocked"'
            problems.append(("attention", what))
        refuse(problems)
        return self

    def _fixed_problems(self) -> list[Problem]:
        what = "is needed with plan.fixed = true; set it, or plan.fixed = false, which plans it"
        sizes = ("slots", "micro_batch_tokens")
        problems = [(key, what) for key in sizes if getattr(self, key) is None]
        if self.calibration_share is not None:
            what = "measures nothing where sizes are fixed, plan.fixed = true; remove it"
            problems.append(("calibration_share", what))
        return problems

    def _planned_problems(self) -> list[Problem]:
        problems: list[Problem] = []
        if self.slot_buckets is not None and self.slots is None:
            what = "means nothing without plan.slots; remove it"
            problems.append(("slot_buckets", what))
        if self.calibration_share is not None and self.platform == "gpu":
            what = "measures nothing on gpu, where given sizes are tried; remove it"
            problems.append(("calibration_share", what))
        return problems

    def _slot_problems(self) -> list[Problem]:
        if self.slot_buckets is None or self.slots is None:
            return []
        most = self.slots
        fits = {size for size in self.slot_buckets if size < most}
        valid = sorted((size for size in fits if size % self.sampler_shards == 0), reverse=True)
        if valid == list(self.slot_buckets):
            return []
        what = f"must fall and stay below slots = {most}"
        if self.sampler_shards > 1:
            what += f", in multiples of a sampler's {self.sampler_shards} parts"
        return [("slot_buckets", f"{what}; nearest valid: {valid}")]

    @property
    def slot_ladder(self) -> tuple[int, ...]:
        """Slots of a sampler, and the fewer that the last rollouts are moved into, falling.

        Only once there are sizes: of a plan that is not fixed, not of the configuration as written.
        """
        assert self.slots is not None, "sizes are planned first"
        if self.slot_buckets is not None:
            return (self.slots, *self.slot_buckets)
        halves = (self.slots // 2**times for times in range(1, 4))
        exact = (size for size in halves if size and size % self.sampler_shards == 0)
        return (self.slots, *dict.fromkeys(exact))

    def _meshes(self) -> list[Problem]:
        checks = [("learner_devices", self.learner_devices, "fsdp x tp", self.fsdp * self.tp)]
        if self.placement == "split":
            tp = self.tp_of_sampler
            checks.append(("sampler_devices", self.devices_per_sampler, "sampler_tp", tp))
        problems = []
        for key, devices, what, ways in checks:
            told = f"must be a multiple of {what} = {ways}"
            if devices % ways == 0:
                told = f"a process leases 1, 4 or 8 TPU chips of a host, or whole hosts of {_HOST}"
                if self.platform != "tpu" or _is_leased(devices):
                    continue
            nearest = self._nearest_devices(devices, ways)
            problems.append((key, f"{told}; nearest valid: {nearest}"))
        return problems

    def _nearest_devices(self, devices: int, ways: int) -> str:
        """What a process can have around `devices`, a multiple of `ways`, in words."""
        if self.platform != "tpu":
            return nearest_multiples(devices, ways)
        hosts = math.lcm(_HOST, ways)
        whole = devices // hosts * hosts
        valid = {size for size in (*TPU_LEASES, whole, whole + hosts) if size % ways == 0} - {0}
        below = max((size for size in valid if size < devices), default=None)
        above = min(size for size in valid if size > devices)
        return f"{above}" if below is None else f"{below} or {above}"

    @property
    def num_samplers(self) -> int:
        """Sampler processes; the colocated process counts as one."""
        return self.samplers or 1

    @property
    def devices_per_sampler(self) -> int:
        """Devices over which one sampler shards its rows."""
        if self.placement == "colocated":
            return self.learner_devices
        return self.sampler_devices or 1

    @property
    def fsdp_of_sampler(self) -> int:
        """Parts of the weights that a sampler gathers layer by layer; it saves no time there."""
        return self.fsdp if self.placement == "colocated" else 1

    @property
    def tp_of_sampler(self) -> int:
        """Parts into which a sampler splits heads and widths."""
        return self.tp if self.placement == "colocated" else self.sampler_tp or 1

    @property
    def sampler_shards(self) -> int:
        """Parts into which the rows of one sampler are split."""
        return max(1, self.devices_per_sampler // self.tp_of_sampler)

    @property
    def learner_shards(self) -> int:
        """Parts into which the rows of a batch are split in the learner."""
        return max(1, self.learner_devices // self.tp)


def _is_leased(chips: int) -> bool:
    """Whether a process can have so many TPU chips; several hosts are planned for only."""
    return chips in TPU_LEASES or (chips > _HOST and chips % _HOST == 0)


def rollout_weights_problems(plan: Plan, model: Model, learner: Learner) -> list[Problem]:
    """What `plan.rollout_weights` needs of the other tables."""
    kind, problems = plan.rollout_weights, list[Problem]()
    if kind == "shared":
        return problems
    if model.quantization != "none":
        what = f'needs model.quantization = "none", not "{model.quantization}"'
        problems.append(("plan.rollout_weights", f'{what}; nearest valid: "shared"'))
    rounds = kind != "merged" or model.dtype != "float32"
    if rounds and learner.importance_cap == 0:
        base = f" with a {model.dtype} base" if kind == "merged" else ""
        what = (
            f'plan.rollout_weights = "{kind}"{base} makes the policy that is sampled another one '
            "than the learner's, by rounding; its loss must be weighted by their ratio; nearest "
            'valid: 2.0, or plan.rollout_weights = "shared"'
        )
        problems.append(("learner.importance_cap", what))
    return problems
