"""Opens devices and model, the same way for every process that has any. Runs inside actors only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from actors.devices import open_mesh
from configs.schema import Config
from pipeline.model_files.model_source import find_model
from pipeline.text.special_tokens import check_tokenizer
from pipeline.text.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from pipeline.model.policy import Params, Policy
    from pipeline.model.vocabulary import Vocabulary
    from pipeline.text.tokenizer import Tokenizer


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


def open_model(config: Config, *, which: Literal["learner", "sampler"]) -> OpenedModel:
    """Starts JAX on the devices of a learner or of a sampler and loads the base.

    Raises:
        ValueError: if devices, weights or tokenizer are not what the configuration says.
        FileNotFoundError: if weights or tokenizer are not there.
    """
    plan = config.plan
    count, fsdp, tp = plan.learner_devices, plan.fsdp, plan.tp
    if which == "sampler":
        count, fsdp, tp = plan.devices_per_sampler, plan.fsdp_of_sampler, plan.tp_of_sampler
    mesh = open_mesh(platform=plan.platform, count=count, fsdp=fsdp, tp=tp)
    from pipeline.model.policy import open_policy
    from pipeline.model.vocabulary import Vocabulary
    from pipeline.model.weights import read_text_config

    folder, tokenizer = find_model(config.model), open_tokenizer(config.model)
    vocabulary = Vocabulary.of(tokenizer, config.rollout)
    # Here also for checkpoints that say their size by their shapes only.
    check_tokenizer(
        tokenizer,
        folder=folder,
        vocab_size=read_text_config(folder)["vocab_size"],
        stop_tokens=config.rollout.stop_tokens,
    )
    started = time.monotonic()
    policy, base = open_policy(
        folder,
        dtype=config.model.dtype,
        lora=config.lora,
        mesh=mesh,
        quantization=(
            config.sampler_quantization if which == "sampler" else config.model.quantization
        ),
    )
    return OpenedModel(policy, base, vocabulary, tokenizer, time.monotonic() - started)
