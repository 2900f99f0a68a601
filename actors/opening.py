"""Opens devices and model, the same way for every process that has any. Runs inside actors only."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from actors.devices import open_mesh
from configs.schema import Config
from pipeline.inputs.hub.model_source import find_model
from pipeline.inputs.text.special_tokens import check_tokenizer
from pipeline.inputs.text.tokenizer_files import open_tokenizer

if TYPE_CHECKING:
    from pipeline.compute.model.policy import Params, Policy
    from pipeline.compute.model.vocabulary import Vocabulary
    from pipeline.inputs.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenedModel:
    """What sampler and learner stand on.

    Attributes:
        policy: the model on this process's devices.
        base: its frozen parameters, there once.
        vocabulary: token ids with a meaning.
        tokenizer: for what is decided by text.
        load_s: seconds that loading the base took.
    """

    policy: Policy
    base: Params
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    load_s: float

    def wait(self) -> OpenedModel:
        """Itself: see `OpeningModel`."""
        return self


@dataclass(frozen=True)
class OpeningModel:
    """A model whose base is being read.

    Attributes:
        policy: see `OpenedModel`; and so on.
        loading: the base, and how long reading it took.
    """

    policy: Policy
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    loading: Future[tuple[Params, float]]

    def wait(self) -> OpenedModel:
        """Returns when the base is there.

        Raises:
            ValueError: if the weights are not what the configuration says.
        """
        base, load_s = self.loading.result()
        return OpenedModel(self.policy, base, self.vocabulary, self.tokenizer, load_s)


def open_model(config: Config, *, which: Literal["learner", "sampler"]) -> OpenedModel:
    """Starts JAX on the devices of a learner or of a sampler and loads the base.

    Raises:
        ValueError: if devices, weights or tokenizer are not what the configuration says.
        FileNotFoundError: if weights or tokenizer are not there.
    """
    return begin_model(config, which=which).wait()


def begin_model(config: Config, *, which: Literal["learner", "sampler"]) -> OpeningModel:
    """Likewise; the base is read in a thread, so that programs can be compiled meanwhile.

    Raises:
        ValueError: likewise.
        FileNotFoundError: likewise.
    """
    plan = config.plan
    count, fsdp, tp = plan.learner_devices, plan.fsdp, plan.tp
    quantization: str = config.model.quantization
    if which == "sampler":
        count, fsdp, tp = plan.devices_per_sampler, plan.fsdp_of_sampler, plan.tp_of_sampler
        quantization = config.sampler_quantization
    mesh = open_mesh(platform=plan.platform, count=count, fsdp=fsdp, tp=tp)
    from pipeline.compute.model.open_policy import make_policy
    from pipeline.compute.model.vocabulary import Vocabulary
    from pipeline.compute.model.weights import read_text_config

    folder, tokenizer = find_model(config.model), open_tokenizer(config.model)
    vocabulary = Vocabulary.of(tokenizer, config.rollout)
    # Here also for checkpoints that say their size by their shapes only.
    check_tokenizer(
        tokenizer,
        folder=folder,
        vocab_size=read_text_config(folder)["vocab_size"],
        stop_tokens=config.rollout.stop_tokens,
    )
    policy = make_policy(
        folder, dtype=config.model.dtype, lora=config.lora, mesh=mesh, quantization=quantization
    )

    def load() -> tuple[Params, float]:
        started = time.monotonic()
        return policy.load_base(folder), time.monotonic() - started

    reader = ThreadPoolExecutor(1)
    loading = reader.submit(load)
    reader.shutdown(wait=False)
    if policy.is_quantized:
        # Quantizing runs qwix's own code, which is not to run while it changes what others trace.
        wait([loading])
    return OpeningModel(policy, vocabulary, tokenizer, loading)
