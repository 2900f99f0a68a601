"""Settings of the plan: batch sizes, memory options, and placement on devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import ConfigDict, Field

from configs.base import (
    ALTERS,
    FREE,
    HARDWARE,
    NO_PROGRAM,
    OF_LEARNER,
    OF_SAMPLER,
    PositiveInts,
    Problem,
    Table,
    nearest_multiples,
)
from configs.machine import GpuName

TPU_LEASES = (1, 4, 8)
"""Numbers of contiguous TPU chips of a host that a process can lease; libtpu has no topology bounds
for two."""
_HOST = TPU_LEASES[-1]
HEAD_TOKENS, HEAD_VOCAB = 2048, 8192
"""Positions and entries of the vocabulary per device whose logits exist at the same time. The top k
and sampling without truncation have blocks of their own."""
LAYER_TOKENS = 2048
"""Positions per device that a layer computes at a time in the gradient; at least one row."""


class Plan(Table):
    """Batch sizes, memory options, and placement of samplers and learner on devices."""

    model_config = ConfigDict(json_schema_extra=HARDWARE)

    platform: Literal["auto", "cpu", "tpu", "gpu"] = Field(
        "auto",
        description="device type, never replaced by another one. auto: that of this machine: a "
        "TPU, else an NVIDIA GPU that JAX can use, else the CPU",
    )
    gpu: GpuName | None = Field(
        None,
        description="NVIDIA GPU whose memory and published limits are those of the devices, for "
        "plans and MFU; default: that of this machine, or else a GPU with hbm_gib",
        json_schema_extra=FREE | NO_PROGRAM,
    )
    placement: Literal["auto", "split", "colocated"] = Field(
        "auto",
        description="split: samplers and learner are processes with their own devices; colocated: "
        "one process owns all devices; auto: on TPUs what launch.plan chooses for learner_devices "
        "chips, else colocated, with the best segment_steps, prefill_tokens, remat and "
        "per_layer_embeddings where these have their defaults",
        json_schema_extra=NO_PROGRAM,
    )
    learner_devices: int = Field(
        1,
        ge=1,
        description="number of devices of the learner (colocated: of the one process; auto: of the "
        "run)",
        json_schema_extra=HARDWARE
        | {"implied": '1, with platform = "auto" all TPU chips of this machine'}
        | NO_PROGRAM,
    )
    samplers: int | None = Field(
        None,
        ge=1,
        description="split only: number of sampler processes; default: 1",
        json_schema_extra=NO_PROGRAM,
    )
    sampler_devices: int | None = Field(
        None,
        ge=1,
        description="split only: number of devices of each sampler; default: 1",
        json_schema_extra=NO_PROGRAM,
    )
    fsdp: int = Field(
        1,
        ge=1,
        description="fully sharded data-parallel (FSDP) size of the learner: parameters are "
        "sharded over this many devices and gathered layer by layer",
        json_schema_extra=NO_PROGRAM,
    )
    tp: int = Field(
        1,
        ge=1,
        description="tensor-parallel size of the learner: attention heads and MLP width are "
        "split over this many devices",
        json_schema_extra=NO_PROGRAM,
    )
    sampler_tp: int | None = Field(
        None,
        ge=1,
        description="split only: tensor-parallel size of each sampler; default: 1",
        json_schema_extra=NO_PROGRAM,
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="slots of a sampler: rollouts that it decodes concurrently; default: what "
        "launch.plan chooses, or half or twice as many where a run measures them to be faster",
        json_schema_extra=OF_SAMPLER,
    )
    slot_buckets: PositiveInts | None = Field(
        None,
        description="slot counts below slots to which a sampler compacts its last rollouts, whole "
        "on each of its devices; default: slots halved up to three times",
        json_schema_extra=NO_PROGRAM,
    )
    kv_cache: Literal["model", "int8"] = Field(
        "model",
        description="data type of the sampler's KV cache. model: model.dtype; int8: 8 bits with "
        "one scale per token and head, half the memory of bfloat16, with small differences to the "
        "learner's log-probs. launch.evaluate and launch.chat use model unless overridden on the "
        "command line",
        json_schema_extra=ALTERS | OF_SAMPLER,
    )
    rollout_weights: Literal["shared", "merged", "int8", "int8_matmul"] = Field(
        "shared",
        description="weights that samplers use, also in a run's evaluations. shared: base and "
        "adapter, as the learner; merged: a copy of the adapted matrices with the adapter merged, "
        "made at each sync, in model.dtype, as in an export; int8, int8_matmul: a copy of the "
        "layers' matrices, quantized as by model.quantization, with a separate adapter. int8, "
        "int8_matmul and merged with bfloat16 round differently from the learner and need "
        "learner.importance_cap. launch.evaluate and launch.chat use shared unless overridden on "
        "the command line",
        json_schema_extra=ALTERS | OF_SAMPLER,
    )
    per_layer_embeddings: Literal["chips", "host"] = Field(
        "chips",
        description="where the per-layer embeddings of a Gemma 4 are. chips: sharded over all "
        "devices of a process; host: in host memory, once for each device, which copies the rows "
        "of its tokens from there, with the same results but slower; for few devices",
    )
    hbm_gib: float | None = Field(
        None,
        gt=0,
        description="memory limit of each device in GiB: sizes whose programs for sampling, "
        "scoring or updates exceed it by the compiler's estimate do not fit; default: the device's "
        "memory",
        json_schema_extra=FREE | NO_PROGRAM,
    )
    segment_steps: int = Field(
        32,
        ge=1,
        description="decode steps of a segment, between two interventions of the host; at most "
        "rollout.max_new_tokens",
        json_schema_extra=OF_SAMPLER,
    )
    prefill_tokens: int = Field(
        4096,
        ge=1,
        description="prompt tokens per device in one prefill, and between two decode segments: at "
        "least one prompt, and more while fewer than half of the slots decode",
        json_schema_extra=OF_SAMPLER,
    )
    prompt_buckets: PositiveInts = Field(
        (),
        description="additional compiled prefill lengths, ascending, below max_prompt_tokens",
        json_schema_extra=NO_PROGRAM,
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of a micro-batch over all devices of the learner; sequences are packed "
        "into rows of row_tokens; default: as for slots",
        json_schema_extra=NO_PROGRAM,
    )
    row_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of a packed row; at least the maximum sequence length, "
        "max_prompt_tokens + max_new_tokens; a group that shares its prompt repeats it once for "
        "each row; default: the maximum, or with shared prompts up to 2048 for a whole group",
        json_schema_extra=ALTERS | OF_LEARNER,
    )
    remat: Literal["none", "dots", "full", "offload"] = Field(
        "full",
        description="rematerialization: what the backward pass recomputes. none: nothing; dots: "
        "everything but matrix products; full: each layer; offload: each layer, with the layer's "
        "input stored in host memory",
        json_schema_extra=OF_LEARNER,
    )
    attention: Literal["blocked", "splash"] | None = Field(
        None,
        description="attention of the learner. blocked: in blocks of queries; splash: JAX's splash "
        "attention kernel, TPU only; default: splash on a TPU, where it is faster, else blocked",
        json_schema_extra=OF_LEARNER,
    )
    chip_hour_usd: float | None = Field(
        None,
        ge=0,
        description="price of a device-hour in USD (on cpu: of the machine) for the cost that "
        "launch.plan reports; default: Google Cloud's list price of 2025 for the chip, none for "
        "CPUs and GPUs",
        json_schema_extra=FREE | NO_PROGRAM,
    )

    def conflicts(self) -> Iterator[Problem]:
        """Devices form whole shards, sizes suit the shards, every setting has an effect."""
        if self.platform != "gpu":
            yield from self.unused("gpu", why='without plan.platform = "gpu"')
        elif self.gpu is None and self.hbm_gib is None:
            for key in self.planned_sizes:
                yield key, "is required on a gpu without plan.gpu and plan.hbm_gib; set one of them"
        yield from self._bucket_problems()
        if self.attention == "splash" and self.platform != "tpu":
            what = f'needs plan.platform = "tpu", not "{self.platform}"; nearest valid: "blocked"'
            yield "attention", what
        if self.embeddings_in_host and self.platform == "gpu":
            what = '"host" is not supported on gpu; nearest valid: "chips"'
            yield "per_layer_embeddings", what
        yield from self._placement_problems()

    def _bucket_problems(self) -> Iterator[Problem]:
        if self.slots is None or self.searches_placement:
            yield from self.unused("slot_buckets", why="without plan.slots and plan.placement")
        elif set(self.slot_buckets or ()) - set(valid := self.slot_ladder[1:]):
            what = f"must be multiples of {self.sampler_shards} below slots = {self.slots}"
            yield "slot_buckets", f"{what}; nearest valid: {list(valid)}"

    def _placement_problems(self) -> Iterator[Problem]:
        of_samplers = ("samplers", "sampler_devices", "sampler_tp")
        if self.placement == "colocated":
            yield from self.unused(*of_samplers, why="in colocated placement")
        if self.placement == "auto":
            for key in self.changed(*of_samplers, "fsdp", "tp"):
                if key in of_samplers or self.searches_placement:
                    what = 'needs a plan.placement that is set, and it is "auto"; set it, or remove'
                    yield key, f"{what} this key"
        if self.searches_placement:
            chips = self.learner_devices
            nearest = 1 << (chips.bit_length() - 1)
            if chips > _HOST and chips != nearest:
                what = f'with plan.placement = "auto" must be a power of two; nearest: {nearest}'
                yield "learner_devices", what
                return
        yield from self._mesh_problems()

    def _mesh_problems(self) -> Iterator[Problem]:
        checks = [("learner_devices", self.learner_devices, "fsdp x tp", self.fsdp * self.tp)]
        if self.placement == "split":
            tp = self.tp_of_sampler
            checks.append(("sampler_devices", self.devices_per_sampler, "sampler_tp", tp))
        for key, devices, what, ways in checks:
            needs, valid = f"a multiple of {what} = {ways}", nearest_multiples(devices, ways)
            is_leased = True
            if self.platform == "tpu":
                needs += ", and 1, 4 or 8 TPU chips of a host"
                valid = " or ".join(str(size) for size in TPU_LEASES if size % ways == 0)
                of_several = self.searches_placement and devices > _HOST
                is_leased = devices in TPU_LEASES or of_several
            if devices % ways or not is_leased:
                yield key, f"must be {needs}; nearest valid: {valid or 'none'}"

    @property
    def searches_placement(self) -> bool:
        """Whether the planner chooses the placement; else "auto" is colocated."""
        return self.placement == "auto" and self.platform == "tpu"

    @property
    def planned_sizes(self) -> tuple[Literal["slots", "micro_batch_tokens"], ...]:
        """The sizes that are not given: `slots`, `micro_batch_tokens`, or none."""
        keys: tuple[Literal["slots", "micro_batch_tokens"], ...] = ("slots", "micro_batch_tokens")
        return tuple(key for key in keys if getattr(self, key) is None)

    @property
    def embeddings_in_host(self) -> bool:
        """Whether the per-layer embeddings are in host memory."""
        return self.per_layer_embeddings == "host"

    @property
    def uses_splash(self) -> bool:
        """Whether the learner's attention is the splash kernel."""
        return self.attention == "splash" or (self.attention is None and self.platform == "tpu")

    @property
    def slot_ladder(self) -> tuple[int, ...]:
        """Slot counts of a sampler, descending: `slots`, then the buckets for the last rollouts.

        Available only after planning.
        """
        slots, buckets = self.slots, self.slot_buckets
        assert slots is not None, "sizes are not planned yet"
        if buckets is None:
            buckets = tuple(slots // 2**times for times in range(1, 4))
        smaller = {size for size in buckets if 0 < size < slots and size % self.sampler_shards == 0}
        return (slots, *sorted(smaller, reverse=True))

    @property
    def num_samplers(self) -> int:
        """Number of sampler processes; the colocated process counts as one."""
        return self.samplers or 1

    @property
    def devices_per_sampler(self) -> int:
        """Number of devices of one sampler."""
        if self.placement != "split":
            return self.learner_devices
        return self.sampler_devices or 1

    @property
    def fsdp_of_sampler(self) -> int:
        """FSDP size of a sampler: above 1 only in the colocated process."""
        return self.fsdp if self.placement != "split" else 1

    @property
    def tp_of_sampler(self) -> int:
        """Tensor-parallel size of a sampler."""
        return self.tp if self.placement != "split" else self.sampler_tp or 1

    @property
    def sampler_shards(self) -> int:
        """Data-parallel size of a sampler: the number of shards of its slots."""
        return max(1, self.devices_per_sampler // self.tp_of_sampler)

    @property
    def learner_shards(self) -> int:
        """Data-parallel size of the learner: the number of shards of a micro-batch's rows."""
        return max(1, self.learner_devices // self.tp)
