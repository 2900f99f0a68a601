"""The learner: adapter, optimizer state, and their updates: SFT, then GRPO.

Departure from the GRPO paper (arXiv:2402.03300): the old log-probs are the learner's own, never the
sampler's; if each batch is used once, they are the current ones, so the ratio is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import Config
from pipeline.compute.builds import BuildLog
from pipeline.compute.device_memory import array_bytes, program_bytes
from pipeline.compute.learner.batches import DeviceBatch, Inputs, place_inputs
from pipeline.compute.learner.checkpoint import saved_optimizer
from pipeline.compute.learner.optimizer import grpo_rate, sft_rate
from pipeline.compute.learner.programs import Compiled, LearnerPrograms, combined
from pipeline.compute.learner.scorer import score_completions
from pipeline.compute.learner.state import LearnerState
from pipeline.compute.learner.timing import fastest_s, full_micro_batch, plain_token
from pipeline.compute.model import lora
from pipeline.compute.model.adapter_source import load_adapter
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import by_row, replicated
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.batching import batches_to_learn
from pipeline.data.packed_batch import PackedRow, TokenBatch, padding_metrics
from pipeline.data.packing import packed_batches
from pipeline.types import Completion, Rollout


class Learner:
    """Compiled programs and the training state. Compiles at construction and on `resize`.

    Args:
        policy: the model.
        base: its frozen parameters, shared, never copied or donated; the attribute may be set
            later, before the first computation.
        config: the loss, the optimizer and the shapes.
        vocabulary: special token ids.
        log: receives an entry for each compiled program.
        progressed: called after each micro-batch of an update.
    """

    def __init__(
        self,
        policy: Policy,
        base: Params,
        config: Config,
        vocabulary: Vocabulary,
        *,
        log: BuildLog | None = None,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = policy
        self._progressed = progressed
        self.base = base
        self._vocabulary = vocabulary
        self._sft_rate = sft_rate(config)
        for schedule in (self._sft_rate, grpo_rate(config)):
            schedule(0)  # compiles the operations of the schedule
        self._teacher = _open_teacher(config.learner.teacher, policy)
        self._config: Config
        self._programs: LearnerPrograms
        self._compiled: Compiled
        self.resize(config, log=log)
        self._zeros = policy.no_adapter()
        self._whole = replicated(policy.mesh)
        self.state = self._fresh()

    def resize(self, config: Config, *, log: BuildLog | None = None) -> None:
        """Compiles for a configuration of other sizes; drops the existing programs first.

        The training state does not change. After a failure the learner cannot compute until a later
        `resize` succeeds. `log` receives an entry for each compiled program.
        """
        vars(self).pop("_compiled", None)
        self._config = config
        self._programs = LearnerPrograms(self.policy, config, self._vocabulary)
        self._compiled = self._programs.compile(log)

    @property
    def needs(self) -> dict[str, int]:
        """Bytes per device besides base and adapter while a program runs, by its name.

        `apply` and `apply_sft` are left out: they donate the optimizer state and need less than a
        gradient.
        """
        weights = array_bytes(self.policy.abstract_params())
        return {
            name: program_bytes(program) - weights
            for name, program in self._compiled.items()
            if not name.startswith("apply")
        }

    def initial_adapter(self) -> Params:
        """The initial adapter of the run, on the devices.

        Raises:
            FileNotFoundError: if there is no adapter at `lora.start`.
            ValueError: if it cannot be used.
        """
        start = self._config.lora.start
        if start is None:
            return self.policy.fresh_adapter(self._config.run.seed)
        return load_adapter(start, self.policy).adapter

    def _fresh(self) -> LearnerState:
        state = self._begin_phase(self.initial_adapter(), version=0)
        start = self._config.lora.start
        if self._config.run.fork is None or start is None:
            return state
        return replace(state, optimizer=saved_optimizer(Path(start), state))

    def _begin_phase(self, adapter: Params, *, version: int) -> LearnerState:
        """Initial state of a phase: a new optimizer, and this adapter as reference."""
        optimizer = jax.device_put(self._programs.optimizer.init(adapter), self._whole)
        # A fresh adapter is the identity, and the reference is the base.
        nonzero = self._config.run.has_sft_phase or self._config.lora.start is not None
        return LearnerState(
            adapter,
            optimizer,
            version=version,
            updates=0,
            reference=self._copy(adapter) if self._programs.uses_reference and nonzero else None,
            previous=self._copy(adapter) if self._samples_ahead else None,
        )

    @property
    def _samples_ahead(self) -> bool:
        return self._config.rollout.ahead != "off"

    def _copy(self, adapter: Params) -> Params:
        """A copy, because updates donate the adapter."""
        return self.policy.place_adapter(jax.device_get(adapter))

    @property
    def teacher_sha256(self) -> str | None:
        """Hash of the teacher's adapter; None without a teacher."""
        return None if self._teacher is None else lora.sha256(self._teacher)

    @property
    def adapter_sha256(self) -> str:
        """Hash of the current adapter."""
        return lora.sha256(self.state.adapter)

    def update(
        self,
        rollouts: Sequence[Rollout],
        *,
        rate: float | None = None,
    ) -> dict[str, float]:
        """Trains on one step's rollouts and increments the version.

        Adapter and optimizer do not change if no rollout carries a signal. An update whose loss or
        gradient is not finite is skipped, together with the step's later updates.

        Args:
            rollouts: the step's rollouts.
            rate: the learning rate of all updates of this step; None: that of the schedule.

        Returns:
            Metrics of the last update: those of `objective`, `loss`, `grad_norm` before clipping,
            `adapter_norm` after it (`lora.norms`), `lr`; of the first one `mismatch`; of the
            batches `tokens_trained` and `padding_metrics`; `skipped_updates` (1) only if an
            update was skipped.
        """
        batches = self._pack(rollouts)
        # Copied before the first update donates the adapter.
        initial = self._copy(self.state.adapter) if self._samples_ahead else None
        mismatch_ahead = self._mismatch_ahead(batches)
        # Batches that are used once are placed lazily, so that only one exists at a time.
        placed: Iterable[DeviceBatch] = map(self._place, batches)
        if self._programs.uses_old_logprobs:
            placed = list(placed)
        weight = float(sum(batch.weights.sum() for batch in batches))
        metrics = {"tokens_trained": float(sum(batch.num_tokens for batch in batches))}
        metrics |= padding_metrics(batches) | mismatch_ahead
        schedule = grpo_rate(self._config)
        for number in range(self._config.learner.updates_per_batch if batches else 0):
            now = float(schedule(self.state.updates)) if rate is None else rate
            found, logprobs = self._one_update(placed, now, weight=weight)
            if number == 0:
                metrics |= mismatch(batches, logprobs, version=self.state.version)
                if self._programs.uses_old_logprobs:
                    old = jax.device_put(logprobs, by_row(self.policy.mesh))
                    pairs = zip(placed, old, strict=True)
                    placed = [replace(batch, old_logprobs=scored) for batch, scored in pairs]
            metrics |= found
            if "skipped_updates" in found:
                if number == 0:
                    metrics["tokens_trained"] = 0.0
                break
        self.state = replace(self.state, previous=initial, version=self.state.version + 1)
        return metrics

    def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """Trains on one step's packed demonstrations and increments the version.

        After the last step of the SFT phase the GRPO phase begins, with a new optimizer and the
        current adapter as the KL term's reference.

        An update whose loss or gradient is not finite is skipped.

        Returns:
            Metrics: the loss in nats per token, norms of gradient and adapter, the learning rate;
            `skipped_updates` (1) only if the update was skipped.
        """
        batches = packed_batches(sequences, shape=self._programs.shape)
        state = self.state
        total = jax.tree.map(jnp.zeros_like, state.adapter)
        shares = []
        for batch in batches:
            inputs = place_inputs(batch, self.policy.mesh)
            program = self._compiled[f"sft_gradient {len(batch.tokens)}"]
            total, share = program(self.base, state.adapter, total, inputs)
            shares.append(jax.device_get(share))
            self._progressed()
        found = self._apply("apply_sft", total, combined(shares, weight=1.0))
        version = state.version + 1
        self.state = replace(self.state, version=version)
        if version == self._config.sft_steps:
            self.state = self._begin_phase(self.state.adapter, version=version)
        trained = 0 if "skipped_updates" in found else sum(batch.num_tokens for batch in batches)
        return {
            **found,
            "lr": float(self._sft_rate(state.updates)),
            "tokens_trained": float(trained),
            **padding_metrics(batches),
        }

    def micro_batch_s(self) -> float:
        """Seconds of the largest micro-batch, from host arrays to the gradient.

        Scoring by reference and teacher is included. The training state does not change.
        """
        adapter, token = self.state.adapter, plain_token(self._vocabulary)
        batch = full_micro_batch(self._config, shape=self._programs.shape, token=token)
        program = self._compiled[f"gradient {len(batch.weights)}"]

        def work() -> None:
            total = jax.tree.map(jnp.zeros_like, adapter)
            _, share, scored = program(self.base, adapter, total, self._place(batch))
            jax.device_get((share, scored))

        return fastest_s(work)

    def score(
        self, completions: Sequence[Completion], *, adapter: Params, base: Params | None = None
    ) -> list[np.ndarray]:
        """Log-probs of each completion's tokens, float32, in the given order.

        Args:
            completions: completions with distinct names.
            adapter: the adapter to score under.
            base: another base of the same shape; None: the learner's own.
        """
        weights, programs = (base or self.base, adapter), self._programs
        return score_completions(
            completions, self._compiled, weights, shape=programs.shape, mesh=self.policy.mesh
        )

    def _mismatch_ahead(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """`mismatch` of one batch under the previous version, if the current one sampled no token.

        The batch changes from step to step, so that long and short rollouts are covered.
        """
        adapter, now = self.state.previous, self.state.version
        if adapter is None or not batches:
            return {}
        if any(_sampled_by(now, batch).any() for batch in batches):
            return {}
        batch = batches[(now - 1) % len(batches)]
        inputs = place_inputs(batch, self.policy.mesh)
        scored = np.asarray(self._run("score", adapter, inputs))
        return mismatch([batch], [scored], version=now - 1)

    def _pack(self, rollouts: Sequence[Rollout]) -> list[TokenBatch]:
        return batches_to_learn(
            rollouts,
            config=self._config,
            shape=self._programs.shape,
            keep_zero_advantage=self._programs.learns_without_advantage,
        )

    def _place(self, batch: TokenBatch) -> DeviceBatch:
        """The batch on the devices, with the log-probs of reference and teacher."""
        programs = self._programs
        advantages, sampled = jax.device_put(
            (batch.advantages, batch.processed_logprobs), by_row(self.policy.mesh)
        )
        inputs = place_inputs(batch, self.policy.mesh)
        placed = DeviceBatch(inputs, advantages)
        if self._config.learner.importance_cap:
            placed = replace(placed, processed_logprobs=sampled)
        if programs.uses_old_logprobs:
            unknown = np.full(batch.weights.shape, np.nan, np.float32)
            old = jax.device_put(unknown, by_row(self.policy.mesh))
            placed = replace(placed, old_logprobs=old)
        if programs.uses_reference:
            coef = np.float32(self._config.learner.kl_coef)
            placed = replace(placed, kl_coef=jax.device_put(coef, self._whole))
            reference = self._zeros if self.state.reference is None else self.state.reference
            if self._config.learner.kl == "topk":
                top = self._run("reference_top_k", reference, inputs)
                placed = replace(placed, reference=top)
            else:
                logprobs = self._run("score", reference, inputs)
                placed = replace(placed, reference_logprobs=logprobs)
        if self._teacher is not None:
            top = self._run("reference_top_k", self._teacher, inputs)
            placed = replace(placed, teacher=top)
        return placed

    def _run(self, kind: str, adapter: Params, inputs: Inputs) -> Any:
        return self._compiled[f"{kind} {len(inputs.tokens)}"](self.base, adapter, inputs)

    def _one_update(
        self, batches: Iterable[DeviceBatch], rate: float, *, weight: float
    ) -> tuple[dict[str, float], list[np.ndarray]]:
        """One pass over the step's batches, whose weights sum to `weight`, and one update."""
        state = self.state
        total = jax.tree.map(jnp.zeros_like, state.adapter)
        shares, logprobs = [], []
        for batch in batches:
            program = self._compiled[f"gradient {len(batch.advantages)}"]
            total, share, scored = program(self.base, state.adapter, total, batch)
            del batch  # its memory is free before the next one is made
            # Summed on the host: sums of device scalars would be compiled at the first update.
            shares.append(jax.device_get(share))
            logprobs.append(np.asarray(scored))
            self._progressed()
        found = self._apply("apply", total, combined(shares, weight=weight), rate)
        return found | {"lr": rate}, logprobs

    def _apply(
        self,
        name: str,
        total: Params,
        metrics: Mapping[str, float],
        *rate: float,
    ) -> dict[str, float]:
        """Applies the gradient `total`, or skips it if loss or norm is not finite.

        The program `name` is `apply`, which takes the learning rate, or `apply_sft`. Returns the
        metrics, the norms of gradient and adapter, and `skipped_updates` if it was skipped.
        """
        state = self.state
        with np.errstate(over="ignore"):
            given = [np.float32(value) for value in (metrics["loss"], *rate)]
        scalars = jax.device_put(given, self._whole)
        program = self._compiled[name]
        adapter, optimizer, norms = program(state.adapter, state.optimizer, total, *scalars)
        found = {**metrics, **{name: float(norm) for name, norm in norms.items()}}
        finite = bool(np.isfinite(given[0]) & np.isfinite(found["grad_norm"]))  # as in the program
        self.state = replace(
            state, adapter=adapter, optimizer=optimizer, updates=state.updates + finite
        )
        return found if finite else found | {"skipped_updates": 1.0}


def _open_teacher(path: str | None, policy: Policy) -> Params | None:
    """The teacher's adapter on the devices; None without a teacher.

    Raises:
        FileNotFoundError: if there is no adapter at `path`.
        ValueError: if it cannot be used.
    """
    if path is None:
        return None
    try:
        return load_adapter(path, policy).adapter
    except (FileNotFoundError, ValueError) as mistake:
        what = str(mistake).removeprefix("lora.start: ")
        raise type(mistake)(f"learner.teacher: {what}") from mistake


def mismatch(
    batches: Sequence[TokenBatch], logprobs: Sequence[np.ndarray], *, version: int
) -> dict[str, float]:
    """|learner's - sampler's log-prob| over the learned tokens: mean, 99.9th percentile, max.

    Only the tokens that `version` sampled, because log-probs of other versions differ by design;
    empty if there are none.
    """
    differences = np.concatenate(
        [
            np.abs(learned - batch.sampled_logprobs)[_sampled_by(version, batch)]
            for batch, learned in zip(batches, logprobs, strict=True)
        ]
    )
    if not differences.size:
        return {}
    return {
        "mismatch_mean": float(differences.mean()),
        "mismatch_p999": float(np.quantile(differences, 0.999)),
        "mismatch_max": float(differences.max()),
    }


def _sampled_by(version: int, batch: TokenBatch) -> np.ndarray:
    """Mask of the learned tokens that this version sampled, bool `rows seq`."""
    found: np.ndarray = (batch.weights > 0) & (batch.versions == version)
    return found
