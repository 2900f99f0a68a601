"""The settings that say how much is done at once, and on which devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.base import Problem, Sizes, Table, nearest_multiples, refuse

_HEAD_TOKENS = 2048  # vocabulary x this many logits are the most that may exist on a device


class Plan(Table):
    """Sizes and placement: which processes own which devices and how much they do at once."""

    fixed: Literal[True] = Field(True, description="sizes are the ones below, whatever happens")
    platform: Literal["cpu", "tpu", "gpu"] = Field(description="kind of device; never substituted")
    placement: Literal["split", "colocated"] = Field(
        description="split: samplers and learner own devices each; colocated: one process owns all"
    )
    learner_devices: int = Field(1, ge=1, description="devices of the learner (colocated: all)")
    samplers: int | None = Field(None, ge=1, description="split only: sampler processes, default 1")
    sampler_devices: int | None = Field(
        None, ge=1, description="split only: devices of each sampler, default 1"
    )
    rollout_rows: int = Field(ge=1, description="rollouts a sampler decodes at once")
    segment_steps: int = Field(32, ge=1, description="decode steps between two looks by the host")
    prompt_buckets: Sizes = Field(
        (), description="prompt lengths below max_prompt_tokens that get a program of their own"
    )
    micro_batch_rows: int = Field(ge=1, description="sequences in one gradient program")
    sequence_buckets: Sizes = Field(
        (), description="sequence lengths below the longest that get a program of their own"
    )
    head_tokens: int = Field(
        1024,
        ge=1,
        le=_HEAD_TOKENS,
        description="positions whose logits exist at the same time, per device",
    )
    remat: bool = Field(True, description="recompute each layer in the backward pass")

    @model_validator(mode="after")
    def _placement(self) -> Plan:
        problems: list[Problem] = []
        if self.placement == "colocated":
            problems += [
                (key, "means nothing in colocated placement; remove it")
                for key in ("samplers", "sampler_devices")
                if getattr(self, key) is not None
            ]
        for key, whose, devices, most in (
            ("rollout_rows", "a sampler's", self.devices_per_sampler, _HEAD_TOKENS),
            ("micro_batch_rows", "the learner's", self.learner_devices, self.head_tokens),
        ):
            rows = getattr(self, key)
            if rows % devices:
                nearest = nearest_multiples(rows, devices)
                what = f"must be a multiple of {whose} {devices} devices; nearest valid: {nearest}"
                problems.append((key, what))
            elif rows > most * devices:
                # Each row has a position whose logits exist at the same time as the others'.
                what = f"may be at most {most} a device; nearest valid: {most * devices}"
                problems.append((key, what))
        refuse(problems)
        return self

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
