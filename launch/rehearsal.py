"""Rehearses a run: a normal run of one step at full length in a temporary folder, and its table.

    configuration -> one step of each phase, no W&B --.
    data          -> prompts of the maximum length    |-> run_session -> records -> table beside
    workers       -> completions of full length     --'                             the plan's times

Sizes are measured and reduced, and everything is checked and recorded, as in any run. Only program
cache and measured speeds are kept.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actors.handles import RunActors
from configs.schema import Budget, Config, Wandb
from launch.exits import EXIT_FAILED, say
from launch.preparation import Prepared, prepare
from launch.session import run_session
from pipeline.contracts.adapters import Restored
from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.model_shape import DTYPE_BYTES, ModelShape
from pipeline.contracts.rollouts import Completion, Demonstration, Rollout, RolloutRequest
from pipeline.contracts.topology import GIB
from pipeline.inputs.dataset.splits import LoadedData, LoadedSplit
from pipeline.inputs.hub.hf_folder import flax_folder
from pipeline.inputs.hub.model_shape import shape_of
from pipeline.inputs.hub.model_source import HF
from pipeline.inputs.hub.random_folder import write_random_folder, write_random_weights
from pipeline.plan.forecast import calibration_share_s, saved_bytes
from pipeline.report.rehearsal import PHASE_OF_PROMPTS, Observed, figures, lines
from pipeline.rollout.workers import TrainingStopped
from pipeline.run.run_folder import RunFolder

_PHASE_OF_CALL = {
    "prepare": "start",
    "sampler_speed": "calibration",
    "learner_speed": "calibration",
    "sft_update": "SFT update",
    "export": "export",
}
"""Phases of the workers' methods that a rehearsal does not change."""
_EVALUATED = 8
"""Least number of prompts of an evaluation."""
_REPEATED = -1
"""Version that tokens have which no version sampled: they are not compared with the learner's."""
_MOST_SHARE, _SHARE_OF_S = 0.5, 3600.0
"""Maximum of `plan.calibration_share`, and what it refers to with a budget of steps."""


def rehearse(config: Config, *, random_weights: bool, json_file: Path | None) -> int:
    """Rehearses a run and prints the table; returns the exit status.

    Args:
        config: of the run.
        random_weights: use random weights instead of the model's.
        json_file: file for the figures; None: they are only shown.

    Raises:
        FileNotFoundError: if model, tokenizer or data are missing.
        ValueError: with the mistakes in the request, in words for the user.
        Failure: as `run_session`.
    """
    shape = _shape(config, random_weights=random_weights)
    if shape is not None:
        _check_disk(config, shape, weights=random_weights)
    # Until the session listens: without a handler SIGTERM would leave the folder behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with temporary_folder(config) as folder:
        inside = _inside(config, folder)
        if random_weights:
            assert shape is not None
            prepared = _prepare_random(inside, shape, folder / "model")
        else:
            prepared = prepare(inside, extend=None, tracked=False)
        data = full_length_data(prepared.data, prepared.config)
        run = replace(prepared, config=one_step(prepared.config), data=data)
        observed: list[Observed] = []
        change = partial(full_length_actors, config=run.config, observed=observed)
        status = asyncio.run(run_session(run, started=time.monotonic(), rehearse=change))
        if status in {0, EXIT_FAILED} and run.folder.holds_run:
            found = figures(run.config, observed, shape=shape)
            found["random_weights"] = random_weights
            say("\n".join(["", *lines(found)]))
            if json_file is not None:
                text = json.dumps(found, indent=2, ensure_ascii=False)
                json_file.write_text(text + "\n", encoding="utf-8")
    return status


# --- the run: configuration, data, workers


def one_step(config: Config) -> Config:
    """The configuration for one step of each phase, with the programs and sizes of the run.

    Only `apply` of the SFT phase, and of GRPO where the clock plans the decay, is another program.
    """
    sft, learner, plan = config.sft, config.learner, config.plan
    if config.run.has_sft_phase:
        sft = sft.model_copy(update={"steps": 1, "warmup_steps": 0})
    if learner.schedule != "constant":
        end = config.decay_steps or learner.warmup_steps + 1
        learner = learner.model_copy(update={"decay_steps": end})
    if not plan.fixed and plan.platform != "gpu":
        share = min(_MOST_SHARE, calibration_share_s(config) / _SHARE_OF_S)
        plan = plan.model_copy(update={"calibration_share": share})
    update = {
        "sft": sft,
        "learner": learner,
        "plan": plan,
        "rollout": config.rollout.model_copy(update={"min_prompts_per_step": None}),
        "budget": Budget(steps=int(config.run.has_sft_phase) + 1),
    }
    return Config.model_validate({**dict(config), **update})


def full_length_data(data: LoadedData, config: Config) -> LoadedData:
    """Training data of the maximum length, and a few prompts to evaluate, as they are."""
    longest, new = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    stretched = tuple(
        replace(prompt, tokens=_full_prompt(prompt.tokens, longest))
        for prompt in data.train.prompts
    )
    sft = data.sft
    if sft is not None:
        demonstrations = tuple(
            Demonstration(
                one.id,
                _full_prompt(one.prompt_tokens, longest),
                np.resize(one.completion_tokens, new),
            )
            for one in sft.demonstrations
        )
        sft = replace(sft, demonstrations=demonstrations)
    slots, evaluated = config.plan.num_samplers * (config.plan.slots or 0), _EVALUATED
    if slots > config.rollout.size:  # only evaluations fill the slots
        evaluated = max(evaluated, -(-slots // config.eval.samples))
    validation = data.validation
    return replace(
        data,
        train=replace(data.train, prompts=stretched),
        validation=None if validation is None else _first(validation, evaluated),
        test=_first(data.test, evaluated),
        sets={},
        sft=sft,
    )


def _full_prompt(tokens: np.ndarray, length: int) -> np.ndarray:
    """`length` tokens: <bos>, then the other tokens repeated. int32 `seq`."""
    body = tokens[1:] if len(tokens) > 1 else tokens
    return np.concatenate([tokens[:1], np.resize(body, length - 1)]).astype(np.int32)


def _first(split: LoadedSplit, count: int) -> LoadedSplit:
    return replace(split, prompts=split.prompts[:count])


def full_length_actors(actors: RunActors, *, config: Config, observed: list[Observed]) -> RunActors:
    """The actors with a `FullLengthWorker` for each; adds what they observe to `observed`."""
    workers: list[Any] = [actors.learner, *actors.samplers]
    # By identity: with a colocated placement the sampler is the learner.
    wrapped: dict[int, Any] = {id(one): FullLengthWorker(one, config) for one in workers}
    observed += [one.observed for one in wrapped.values()]
    learner, *samplers = (wrapped[id(one)] for one in workers)
    return replace(actors, learner=learner, samplers=samplers)


@dataclass
class FullLengthWorker:
    """The methods of a worker, at full length.

    Rollouts keep their slots as long as the longest completion takes. An update gets them at full
    length, half of them with a positive and half with a negative advantage. Each checkpoint is
    restored at once.

    Attributes:
        worker: sampler, learner, or both in one process.
        config: of the run.
        observed: its memory, and the seconds of the first checkpoint.
    """

    worker: Any
    config: Config
    observed: Observed = field(default_factory=Observed)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        """A method that is called unchanged."""
        work: Callable[..., Awaitable[Any]] = getattr(self.worker, method)
        if method not in _PHASE_OF_CALL:
            return work

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await work(*args, **kwargs)
            await self._observe(_PHASE_OF_CALL[method])
            return result

        return call

    async def _observe(self, phase: str) -> None:
        use: MemoryUse = await self.worker.memory()
        self.observed.memory = use
        if use.peak is not None:
            self.observed.peaks.setdefault(phase, use.peak)

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,  # noqa: ARG002  # all finish: the largest update
    ) -> list[Completion]:
        """See `pipeline.contracts.workers.Sampler`."""
        phase = requests[0].name.phase
        if phase == "train" and self.config.rollout.partial == "keep":
            await self.worker.generate([self._continuing(requests[0])], temperature=temperature)
        held = [replace(request, hold=True) for request in requests]
        completions: list[Completion] = await self.worker.generate(held, temperature=temperature)
        if phase in PHASE_OF_PROMPTS:
            await self._observe(PHASE_OF_PROMPTS[phase])
        return completions

    def _continuing(self, request: RolloutRequest) -> RolloutRequest:
        """A request that lacks one token: the longest prefill of a run."""
        rollout, size = self.config.rollout, self.config.rollout.max_new_tokens - 1
        zeros = np.zeros(size, np.float32)
        partial = Completion(
            request.name,
            request.prompt_tokens,
            np.resize(request.prompt_tokens, size),
            zeros,
            "truncated",
            version=_REPEATED,
            adapter_sha256="",
            processed_logprobs=zeros if rollout.truncates else None,
        )
        return replace(request, partial=partial)

    async def update(
        self, rollouts: Sequence[Rollout], **scalars: float | None
    ) -> dict[str, float]:
        """See `pipeline.contracts.workers.Learner`."""
        new = self.config.rollout.max_new_tokens
        full = [
            _full_rollout(rollout, new, advantage=1.0 - 2.0 * (number % 2))
            for number, rollout in enumerate(rollouts)
        ]
        metrics: dict[str, float] = await self.worker.update(full, **scalars)
        await self._observe("update")
        return metrics

    async def save(self, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint to its end, restores it, and compares.

        Raises:
            TrainingStopped: if the restored state is another one.
        """
        began, seconds = time.monotonic(), self.observed.seconds
        await self.worker.save(meta)
        await self.worker.saved(wait=True)
        seconds.setdefault("checkpoint", time.monotonic() - began)
        before, began = await self.worker.publish(), time.monotonic()
        restored: Restored = await self.worker.restore()
        seconds.setdefault("restore", time.monotonic() - began)
        after = await self.worker.publish()
        step = (restored.meta or {}).get("step")
        if restored.damaged or (step, after.sha256) != (meta["step"], before.sha256):
            found = "; ".join(restored.damaged) or f"step {step}, {after.sha256[:12]}"
            raise TrainingStopped(
                f"restored another state than that of step {meta['step']}, {before.sha256[:12]}: "
                f"{found}"
            )
        await self._observe("restore")


def _full_rollout(rollout: Rollout, length: int, *, advantage: float) -> Rollout:
    """A rollout of `length` tokens that is trained on: its own, then the same ones repeated."""
    own = rollout.completion
    repeated = np.zeros(length - len(own.tokens), np.float32)
    processed = own.processed_logprobs
    completion = replace(
        own,
        tokens=np.resize(own.tokens, length),
        logprobs=np.concatenate([own.logprobs, repeated]),
        processed_logprobs=None if processed is None else np.concatenate([processed, repeated]),
        stop_reason="eos",  # `learner.overlong` may exclude those cut off by length
        version=_REPEATED,
        adapter_sha256="",
        earlier_spans=own.version_spans,
    )
    reward = 0.0 if rollout.reward is None else rollout.reward
    return replace(rollout, completion=completion, reward=reward, advantage=advantage)


# --- the temporary folder and the model


@contextmanager
def temporary_folder(config: Config) -> Iterator[Path]:
    """An empty folder beside the run folders, locked; deleted afterwards with its new parents.

    Leftovers of a killed rehearsal are deleted first.

    Raises:
        ValueError: if another process uses the folder.
    """
    folder = RunFolder(Path(config.run.dir) / f".rehearsal-{config.run.name}")
    try:
        with folder.held():
            _empty(folder.path)
            try:
                yield folder.path
            finally:
                _empty(folder.path)
    finally:
        # The lock removes only a folder that it made, not one that a killed rehearsal left.
        with suppress(OSError):
            folder.path.rmdir()


def _empty(folder: Path) -> None:
    """Deletes everything but the lock file."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != ".lock":
            path.unlink()


def _inside(config: Config, folder: Path) -> Config:
    """The configuration with its run folder in `folder`, without W&B."""
    run = config.run.model_copy(update={"dir": str(folder), "mirror": None})
    return config.model_copy(update={"run": run, "wandb": Wandb(mode="disabled")})


def _shape(config: Config, *, random_weights: bool) -> ModelShape | None:
    """The model's shape; None for a flax checkpoint without a configuration file."""
    try:
        return shape_of(config)
    except FileNotFoundError:
        folder = Path(config.model.path)
        if random_weights or not folder.is_dir() or flax_folder(folder) is None:
            raise
    return None


def _check_disk(config: Config, shape: ModelShape, *, weights: bool) -> None:
    """Refuses a rehearsal for which the disk is too small.

    Raises:
        ValueError: with the needed and the free space.
    """
    needed = sum(saved_bytes(config, shape, checkpoints=1).values())
    if weights:
        needed += shape.parameters * DTYPE_BYTES[config.model.dtype]
    folder = Path(config.run.dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"run.dir = {config.run.dir}: a rehearsal temporarily writes {needed / GIB:.1f} GiB "
            f"there, and {free / GIB:.1f} are free; choose a folder on a larger disk"
        )


def _prepare_random(config: Config, shape: ModelShape, folder: Path) -> Prepared:
    """Checks everything, then writes the random weights.

    Raises:
        FileNotFoundError: if tokenizer or data are missing.
        ValueError: with the mistakes in the request, in words for the user.
    """
    model = config.model
    if model.tokenizer is None and "://" in model.path and not model.path.startswith(HF):
        raise ValueError(
            f"command line: --random-weights: {model.path} provides its tokenizer only with "
            "the weights; set model.tokenizer to a local one"
        )
    update = {"path": str(folder), "tokenizer": model.tokenizer or model.path}
    config = config.model_copy(update={"model": model.model_copy(update=update)})
    write_random_folder(folder, shape)
    weights_bytes = shape.parameters * DTYPE_BYTES[model.dtype]
    prepared = prepare(config, extend=None, tracked=False, weights_bytes=weights_bytes)
    say(f"writing {shape.parameters:,} random weights, {model.dtype}")
    write_random_weights(folder, shape, dtype=model.dtype, seed=config.run.seed)
    return prepared
