"""The learner: adapter, optimizer state, and the updates on them: imitation, then GRPO.

What departs from the paper of GRPO (arXiv:2402.03300): log-probs of the policy that drew the
rollouts are the learner's own, never the sampler's; while each batch is used once they are the
current ones, so the ratio is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import Config
from pipeline.compute.learner.batches import DemonstrationBatch, DeviceBatch, Inputs, place_inputs
from pipeline.compute.learner.optimizer import grpo_rate, imitation_rate
from pipeline.compute.learner.programs import (
    ABOUT_UPDATE,
    BySize,
    CompiledPrograms,
    LearnerPrograms,
)
from pipeline.compute.learner.scorer import score_completions
from pipeline.compute.learner.state import LearnerState
from pipeline.compute.learner.timing import micro_batch_s
from pipeline.compute.model import lora
from pipeline.compute.model.footprint import array_bytes
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import by_row, replicated
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.batches import PackedRow, TokenBatch, padding_metrics
from pipeline.contracts.builds import BuildLog
from pipeline.contracts.rollouts import Completion, Rollout
from pipeline.contracts.speeds import LearnerSpeed
from pipeline.inputs.dataset.batching import batches_to_learn
from pipeline.inputs.dataset.packing import packed_batches


class Learner:
    """Compiled programs and the state they work on. Compiles when it is made, and when resized.

    Args:
        policy: the model.
        base: its frozen parameters, shared, never copied or donated; may be put in their place
            later, before anything is computed.
        config: the loss, the optimizer and the shapes.
        vocabulary: token ids with a meaning.
        log: told about each program.
    """

    def __init__(
        self,
        policy: Policy,
        base: Params,
        config: Config,
        vocabulary: Vocabulary,
        *,
        log: BuildLog | None = None,
    ) -> None:
        self.policy = policy
        self.base = base
        self._vocabulary = vocabulary
        self._rates = {"sft": imitation_rate(config), "grpo": grpo_rate(config)}
        for rate in self._rates.values():
            rate(0)  # compiles the operations that it consists of
        self._teacher = _open_teacher(config.learner.teacher, policy)
        self._config: Config
        self._programs: LearnerPrograms
        self._compiled: CompiledPrograms
        self.resize(config, log=log)
        self._zeros = policy.no_adapter()
        self._whole = replicated(policy.mesh)
        self.state = self._fresh()

    def resize(self, config: Config, *, log: BuildLog | None = None) -> None:
        """Compiles for the sizes of another configuration; the programs there were are gone first.

        Adapter and optimizer stay. If that fails, nothing can be computed before it succeeds for
        other sizes.

        Args:
            config: differs in sizes only.
            log: told about each program.
        """
        vars(self).pop("_compiled", None)
        self._config = config
        self._programs = LearnerPrograms(self.policy, config, self._vocabulary)
        self._compiled = self._programs.compile(log)

    @property
    def needs(self) -> dict[str, dict[str, int]]:
        """Bytes of each device beside base and adapter, by what for and by program."""
        return self._compiled.needs(array_bytes(self.policy.abstract_params()))

    @property
    def ends_phase(self) -> bool:
        """Whether the next update is the supervised phase's last, so that GRPO begins after it."""
        return self.state.version + 1 == self._config.sft_steps

    def host_state(self) -> LearnerState:
        """A copy of the state in host memory."""
        return self.state.on_host()

    def put_back(self, state: LearnerState) -> None:
        """Goes on from what `host_state` returned, bit for bit."""
        self.state = state.on_device(self._whole)

    def initial_adapter(self) -> Params:
        """The adapter that the run begins with, on the devices.

        Raises:
            FileNotFoundError: if `lora.start` is not there.
            ValueError: if it cannot be used.
        """
        start = self._config.lora.start
        if start is None:
            return self.policy.fresh_adapter(self._config.run.seed)
        from pipeline.compute.model.adapter_source import load_adapter

        return load_adapter(start, self.policy).adapter

    def _fresh(self) -> LearnerState:
        return self._begin_phase(self.initial_adapter(), version=0)

    def _begin_phase(self, adapter: Params, *, version: int) -> LearnerState:
        """The state in which a phase begins: a new optimizer, and this adapter as reference."""
        optimizer = jax.device_put(self._programs.optimizer.init(adapter), self._whole)
        moved = self._config.run.has_sft_phase or self._config.lora.start is not None
        reference = None
        if self._programs.keeps_reference and moved:
            # A copy: updates take the adapter's own memory.
            reference = self.policy.place_adapter(jax.device_get(adapter))
        return LearnerState(
            adapter,
            optimizer,
            version=version,
            updates=0,
            reference=reference,
            previous=self._copy_ahead(adapter),
        )

    def _copy_ahead(self, adapter: Params) -> Params | None:
        """What `LearnerState.previous` is to be; a copy, because updates take what they are given.

        None unless rollouts are drawn ahead.
        """
        if self._config.rollout.ahead == "off":
            return None
        return self.policy.place_adapter(jax.device_get(adapter))

    @property
    def teacher_sha256(self) -> str | None:
        """Hash of the teacher's adapter; None: there is no teacher."""
        return None if self._teacher is None else lora.sha256(self._teacher)

    @property
    def adapter_sha256(self) -> str:
        """Hash of the current adapter."""
        return lora.sha256(self.state.adapter)

    def host_adapter(self) -> dict[str, np.ndarray]:
        """The current adapter in host memory, for sending it elsewhere."""
        return jax.device_get(self.state.adapter)

    def update(self, rollouts: Sequence[Rollout], *, rate: float | None = None) -> dict[str, float]:
        """Learns from one step's rollouts and moves on to the next version.

        If no rollout carries a signal, adapter and optimizer stay as they are. Likewise if loss or
        gradient of an update are not finite; the step's other updates are skipped, too.

        Args:
            rollouts: what is learned from.
            rate: the learning rate of all updates of this step, where the decay is planned by the
                clock (`Config.plans_decay`); None elsewhere, where the schedule gives it.

        Returns:
            Metrics: means over learned tokens, and the parity between sampler and learner;
            `skipped_updates` (1) only if one was skipped.
        """
        batches = self._pack(rollouts)
        # Before the first update takes the adapter; the state stays as it is until one has ended,
        # and after it nothing may run out of memory: it would be made again.
        begun_with = self._copy_ahead(self.state.adapter)
        watched = self._parity_ahead(batches)
        # What is used once is asked for just before, so that it exists for one micro-batch only.
        placed: Iterable[DeviceBatch] = map(self._place, batches)
        if self._programs.keeps_old:
            placed = list(placed)
        weight = float(sum(batch.weights.sum() for batch in batches))
        metrics = {"tokens_trained": float(sum(batch.num_tokens for batch in batches))}
        metrics |= padding_metrics(batches) | watched
        for number in range(self._config.learner.updates_per_batch if batches else 0):
            shares, logprobs = self._one_update(placed, rate)
            if number == 0:
                metrics |= parity(batches, logprobs, version=self.state.version)
                if self._programs.keeps_old:
                    old = jax.device_put(logprobs, by_row(self.policy.mesh))
                    pairs = zip(placed, old, strict=True)
                    placed = [replace(batch, old_logprobs=scored) for batch, scored in pairs]
            # The loss is a sum over the whole step; what describes tokens is a mean over them.
            metrics |= {
                name: value if name in ABOUT_UPDATE else value / weight
                for name, value in shares.items()
            }
            if "skipped_updates" in shares:
                if number == 0:
                    metrics["tokens_trained"] = 0.0
                break
        self.state = replace(self.state, previous=begun_with, version=self.state.version + 1)
        return metrics

    def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """Learns from one step's packed examples and moves on to the next version.

        After the last step of the supervised phase the GRPO phase begins: with a new optimizer,
        and with the adapter as it is then for the KL term's reference.

        An update whose loss or gradient are not finite is skipped.

        Returns:
            Metrics: the loss in nats a token, the gradient's norm, the learning rate;
            `skipped_updates` (1) only if it was skipped.
        """
        apply = self._compiled.apply_imitation
        assert apply is not None
        batches = packed_batches(sequences, shape=self._programs.shape)
        state = self.state
        total = jax.tree.map(jnp.zeros_like, state.adapter)
        shares = []
        for batch in batches:
            weights = jax.device_put(batch.weights, by_row(self.policy.mesh))
            examples = DemonstrationBatch(place_inputs(batch, self.policy.mesh), weights)
            program = self._compiled.imitation[len(batch.tokens)]
            total, share = program(self.base, state.adapter, total, examples)
            shares.append(share)
        sums = self._apply(apply, total, jax.device_get(shares))
        version = state.version + 1
        self.state = replace(self.state, version=version)
        if version == self._config.sft_steps:
            self.state = self._begin_phase(self.state.adapter, version=version)
        trained = 0 if "skipped_updates" in sums else sum(batch.num_tokens for batch in batches)
        return {
            **sums,
            "lr": float(self._rates["sft"](state.updates)),
            "tokens_trained": float(trained),
            **padding_metrics(batches),
        }

    def speed(self) -> LearnerSpeed:
        """How long micro-batches take; adapter and optimizer stay as they are."""
        adapter, mesh = self.state.adapter, self.policy.mesh

        def work(batch: TokenBatch) -> None:
            total = jax.tree.map(jnp.zeros_like, adapter)
            program = self._compiled.gradient[len(batch.weights)]
            _, share, scored = program(self.base, adapter, total, self._place(batch))
            jax.device_get((share, scored))

        shape, vocabulary = self._programs.shape, self._vocabulary
        found = micro_batch_s(work, config=self._config, shape=shape, vocabulary=vocabulary)
        return LearnerSpeed(f"{mesh.size} x {mesh.devices.flat[0].device_kind}", found)

    def score(
        self, completions: Sequence[Completion], *, adapter: Params, base: Params | None = None
    ) -> list[np.ndarray]:
        """Log-probs of each completion's tokens, float32, in the given order.

        Args:
            completions: what is scored; their names must differ.
            adapter: the adapter to score under.
            base: another base of the same shape; None: the learner's own.
        """

        def run(inputs: Inputs) -> jax.Array:
            return self._run(self._compiled.score, adapter, inputs, base=base)

        return score_completions(
            completions, run, shape=self._programs.shape, mesh=self.policy.mesh
        )

    def _parity_ahead(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """`parity` of what the version before drew, if the one in force drew nothing: in one batch.

        Which one moves on from step to step, so that long and short rollouts have their turn.
        """
        adapter, now = self.state.previous, self.state.version
        if adapter is None or not batches or any(_drawn_by(now, batch).any() for batch in batches):
            return {}
        batch = batches[(now - 1) % len(batches)]
        inputs = place_inputs(batch, self.policy.mesh)
        scored = np.asarray(self._run(self._compiled.score, adapter, inputs))
        return parity([batch], [scored], version=now - 1)

    def _pack(self, rollouts: Sequence[Rollout]) -> list[TokenBatch]:
        return batches_to_learn(
            rollouts,
            config=self._config,
            shape=self._programs.shape,
            keep_zero_advantage=self._programs.learns_without_advantage,
        )

    def _place(self, batch: TokenBatch) -> DeviceBatch:
        """The batch on the devices, with what other policies say of its tokens."""
        programs = self._programs
        weights, advantages, sampled = jax.device_put(
            (batch.weights, batch.advantages, batch.processed_logprobs), by_row(self.policy.mesh)
        )
        inputs = place_inputs(batch, self.policy.mesh)
        placed = DeviceBatch(inputs, weights, advantages)
        if self._config.learner.importance_cap:
            placed = replace(placed, processed_logprobs=sampled)
        if programs.keeps_old:
            unknown = np.full(batch.weights.shape, np.nan, np.float32)
            old = jax.device_put(unknown, by_row(self.policy.mesh))
            placed = replace(placed, old_logprobs=old)
        if programs.keeps_reference:
            reference = self._zeros if self.state.reference is None else self.state.reference
            if self._config.learner.kl == "topk":
                kept = self._run(self._compiled.keep, reference, inputs)
                placed = replace(placed, reference=kept)
            else:
                logprobs = self._run(self._compiled.score, reference, inputs)
                placed = replace(placed, reference_logprobs=logprobs)
        if self._teacher is not None:
            placed = replace(placed, teacher=self._run(self._compiled.keep, self._teacher, inputs))
        return placed

    def _run(
        self, programs: BySize, adapter: Params, inputs: Inputs, *, base: Params | None = None
    ) -> Any:
        return programs[len(inputs.tokens)](base or self.base, adapter, inputs)

    def _one_update(
        self, batches: Iterable[DeviceBatch], rate: float | None
    ) -> tuple[dict[str, float], list[np.ndarray]]:
        """One pass over the step's batches and one optimizer update."""
        state = self.state
        assert (rate is not None) == self._config.plans_decay, rate
        total = jax.tree.map(jnp.zeros_like, state.adapter)
        shares, logprobs = [], []
        for batch in batches:
            program = self._compiled.gradient[len(batch.weights)]
            total, share, scored = program(self.base, state.adapter, total, batch)
            del batch  # its memory is free before the next one is made
            # Added up on the host: sums of device scalars would be compiled at the first update.
            shares.append(jax.device_get(share))
            logprobs.append(np.asarray(scored))
        planned = () if rate is None else (rate,)
        sums = self._apply(self._compiled.apply, total, shares, *planned)
        told = float(self._rates["grpo"](state.updates)) if rate is None else float(rate)
        return sums | {"lr": told}, logprobs

    def _apply(
        self,
        program: jax.stages.Compiled,
        total: Params,
        shares: Sequence[Mapping[str, Any]],
        *planned: float,
    ) -> dict[str, float]:
        """Applies a gradient, or skips it if loss or norm are not finite; the version stays.

        Args:
            program: what applies it.
            total: the gradient.
            shares: what each micro-batch adds to the metrics.
            planned: the learning rate, if the program takes it.

        Returns:
            The sums of the shares, the gradient's norm, and `skipped_updates` if it was skipped.
        """
        state = self.state
        sums = {name: float(sum(share[name] for share in shares)) for name in shares[0]}
        with np.errstate(over="ignore"):
            given = [np.float32(value) for value in (sums["loss"], *planned)]
        scalars = jax.device_put(given, self._whole)
        adapter, optimizer, norm = program(state.adapter, state.optimizer, total, *scalars)
        sums["grad_norm"] = float(norm)
        made = bool(np.isfinite(given[0]) & np.isfinite(sums["grad_norm"]))  # as in the program
        self.state = replace(
            state, adapter=adapter, optimizer=optimizer, updates=state.updates + made
        )
        return sums if made else sums | {"skipped_updates": 1.0}


def _open_teacher(path: str | None, policy: Policy) -> Params | None:
    """The teacher's adapter on the devices, if there is a teacher.

    Raises:
        FileNotFoundError: if there is no adapter at `path`.
        ValueError: if it cannot be used.
    """
    if path is None:
        return None
    from pipeline.compute.model.adapter_source import load_adapter

    try:
        return load_adapter(path, policy).adapter
    except (FileNotFoundError, ValueError) as mistake:
        what = str(mistake).removeprefix("lora.start: ")
        raise type(mistake)(f"learner.teacher: {what}") from mistake


def parity(
    batches: Sequence[TokenBatch], logprobs: Sequence[np.ndarray], *, version: int
) -> dict[str, float]:
    """|learner's - sampler's log-prob| over the learned tokens: mean, 99.9th percentile, max.

    Of the tokens that `version` drew: what older ones drew differs rightly. Nothing, if there is no
    such token.
    """
    differences = np.concatenate(
        [
            np.abs(learned - batch.sampled_logprobs)[_drawn_by(version, batch)]
            for batch, learned in zip(batches, logprobs, strict=True)
        ]
    )
    if not differences.size:
        return {}
    return {
        "parity_mean": float(differences.mean()),
        "parity_p999": float(np.quantile(differences, 0.999)),
        "parity_max": float(differences.max()),
    }


def _drawn_by(version: int, batch: TokenBatch) -> np.ndarray:
    """Which learned tokens this version drew, bool `rows seq`."""
    found: np.ndarray = (batch.weights > 0) & (batch.versions == version)
    return found
