"""The programs of a Gemma 3 with random weights on one chip: seconds, limits and memory.

A program's limit is the roofline of its operations and bytes at the speeds that the chip reaches in
large products and sums (`devices.measured`), not at the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.machine import nvidia_gpus
from configs.schema import Config
from pipeline.compute.decode.engine import Engine
from pipeline.compute.device_memory import argument_bytes, array_bytes, program_bytes
from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.learner.timing import fastest_s, full_micro_batch, plain_token
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import by_row, make_mesh
from pipeline.data.batching import Packing
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import read_model_shape
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.cost_model.hardware import TOPOLOGIES, Chip
from pipeline.plan.cost_model.roofline import RooflineModel, Seconds
from pipeline.plan.lengths import Lengths
from tests.accelerator.devices import Rates
from tests.accelerator.small_model import GEMMA3, VOCABULARY, SmallModel, make_config

_LARGE = {"query_pre_attn_scalar": 256, "sliding_window_pattern": 6}
_USEFUL = 4.0
"""Operations per token and parameter that a LoRA update needs: MFU counts them."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the programs.

    Attributes:
        slots: of decoding, descending.
        rows: of a micro-batch.
        prompt: largest prompt.
        new: largest number of new tokens; a row has the positions of both.
    """

    slots: tuple[int, int] = (512, 64)
    rows: int = 32
    prompt: int = 256
    new: int = 768

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration's."""
        row = self.prompt + self.new
        return {
            "rollout__group_size": 8,
            "rollout__max_prompt_tokens": self.prompt,
            "rollout__max_new_tokens": self.new,
            "learner__kl": "k3",
            "learner__kl_coef": 0,
            "plan__slots": self.slots[0],
            "plan__slot_buckets": [self.slots[1]],
            "plan__segment_steps": 32,
            "plan__prefill_tokens": 16 * self.prompt,
            "plan__row_tokens": row,
            "plan__micro_batch_tokens": self.rows * row,
        }


@dataclass(frozen=True)
class Measured:
    """A program.

    Attributes:
        seconds: of the fastest run.
        limit_s: least seconds at the chip's measured speeds.
        regime: what limits it.
        rate: tokens, or positions of an update, a second.
        mfu: useful operations as a share of the chip's published bfloat16 speed, or where that is
            not known of the measured one; None: not an update.
        expected_bytes: memory in use while it runs, by the compiler, with all live arrays.
        peak_bytes: the process's peak after it; None: the devices do not report it.
        sets_peak: whether more memory was expected than the peak before.
    """

    seconds: float
    limit_s: float
    regime: str
    rate: float
    mfu: float | None
    expected_bytes: int
    peak_bytes: int | None
    sets_peak: bool

    @property
    def share(self) -> float:
        """The limit's share of the seconds: 1 is as fast as the chip can be."""
        return self.limit_s / self.seconds

    @property
    def limit(self) -> str:
        """The share of the limit, in words."""
        return f"{self.share:.0%} of the limit ({self.regime})"


class Programs:
    """Programs of a model, each compiled and run once, on demand.

    Args:
        name: of a shape in `PUBLISHED`, such as "gemma-3-1b"; None: a small one.
        chip: the device.
        rates: its measured speeds.
        sizes: of the programs.
    """

    def __init__(self, name: str | None, chip: jax.Device, rates: Rates, sizes: Sizes) -> None:
        hf = GEMMA3 if name is None else GEMMA3 | _LARGE | PUBLISHED[name]
        self.model = _random_model(hf, chip, make_config([chip], sizes.settings))
        self._chip, self._sizes = chip, sizes
        self._shape: ModelShape = read_model_shape(hf)
        limits = Chip(
            chip.device_kind,
            chip.platform,
            hbm_gib=0.0,
            bf16_flops=rates.bf16_flops,
            bytes_per_s=rates.bytes_per_s,
            link_bytes_per_s=np.inf,
            layer_s=0.0,
        )
        self._roofline = RooflineModel(self.model.config, self._shape, limits)

    @cached_property
    def gradient(self) -> Measured:
        """The gradient of a micro-batch whose rows are full."""
        model, config = self.model, self.model.config
        programs = LearnerPrograms(model.policy, config, VOCABULARY)
        program = programs.trace_gradient(self._sizes.rows).lower().compile()
        token = plain_token(VOCABULARY)
        batch = full_micro_batch(config, shape=programs.shape, token=token)
        placed: DeviceBatch = replace(
            _zeros(programs.abstract_batch(self._sizes.rows)),
            inputs=place_inputs(batch, model.policy.mesh),
            advantages=jax.device_put(batch.advantages, by_row(model.policy.mesh)),
        )
        total = jax.tree.map(jnp.zeros_like, model.adapter)
        needed = program_bytes(program) - argument_bytes(program)
        expected = array_bytes((model.base, model.adapter, total, placed)) + needed
        before = self._peak()

        def work() -> None:
            nonlocal total
            total, _, _ = program(model.base, model.adapter, total, placed)
            jax.block_until_ready(total)

        seconds, positions = fastest_s(work), batch.tokens.size
        limit = self._roofline.gradient(
            positions, Packing.expected(config, Lengths.expected(config))
        )
        learned = positions - np.count_nonzero(batch.segments == 0)
        operations = _USEFUL * self._shape.parameters * float(learned)
        mfu = operations / (seconds * self._peak_flops())
        return self._measured(seconds, limit, positions, before=before, expected=expected, mfu=mfu)

    @cached_property
    def decode(self) -> dict[str, Measured]:
        """Segments with all slots busy, by number of slots, and prefill.

        Decoding takes more memory than the gradient, whose peak is measured before.
        """
        _ = self.gradient
        model, config, before = self.model, self.model.config, self._peak()
        engine = Engine(model.policy, None, config, VOCABULARY)
        times = engine.times(model.base, model.adapter)
        expected = array_bytes((model.base, model.adapter)) + max(engine.needs.values())
        steps, (bucket,) = config.segment_steps, config.prompt_buckets
        tokens = config.prefill_rows(bucket) * bucket
        found = {
            f"{slots} slots": (times.segment_s[slots], self._roofline.segment(slots), slots * steps)
            for slots in self._sizes.slots
        }
        prefill = self._roofline.prefill(tokens, seq=bucket)
        found["prefill"] = times.prefill_s[bucket], prefill, tokens
        return {
            name: self._measured(*one, before=before, expected=expected)
            for name, one in found.items()
        }

    def _measured(
        self,
        seconds: float,
        limit: Seconds,
        tokens: int,
        *,
        before: int | None,
        expected: int,
        mfu: float | None = None,
    ) -> Measured:
        return Measured(
            seconds=seconds,
            limit_s=limit.low,
            regime=limit.regime,
            rate=tokens / seconds,
            mfu=mfu,
            expected_bytes=expected,
            peak_bytes=self._peak(),
            sets_peak=before is not None and expected > before,
        )

    def _peak(self) -> int | None:
        stats: Mapping[str, int] = self._chip.memory_stats() or {}
        return stats.get("peak_bytes_in_use")

    def _peak_flops(self) -> float:
        known = "v5e-1" if self._chip.platform == "tpu" else nvidia_gpus().gpu
        if known is None or self._chip.platform == "cpu":
            return self._roofline.chip.bf16_flops
        return TOPOLOGIES[known].chip.bf16_flops


def _random_model(hf: Mapping[str, Any], chip: jax.Device, config: Config) -> SmallModel:
    """A model with random weights, made on the chip: zeros would take less power."""
    mesh = make_mesh([chip])
    policy = Policy(architecture(hf, dtype=jnp.dtype("bfloat16")), lora=config.lora, mesh=mesh)
    shapes, adapter = policy.abstract_params()

    def random(like: Any) -> jax.Array:
        make = jax.jit(partial(jax.random.normal, shape=like.shape, dtype=like.dtype))
        return jax.device_put(0.02 * make(jax.random.key(0)), like.sharding)

    with jax.default_device(chip):
        base = {name: random(like) for name, like in shapes.items()}
        return SmallModel(policy, base, jax.tree.map(random, adapter), config)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
