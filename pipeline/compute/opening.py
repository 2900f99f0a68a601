"""Opens devices and model, the same way in every process that computes.

JAX is imported inside functions, so that the driver can import the actors that use this module.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from configs.schema import Config, Lora
from pipeline.compute.devices import open_mesh
from pipeline.data.models.model_source import find_model
from pipeline.data.text.special_tokens import check_tokenizer
from pipeline.data.text.tokenizer_files import open_tokenizer

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from pipeline.compute.model.policy import Params, Policy
    from pipeline.compute.model.vocabulary import Vocabulary
    from pipeline.data.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenedModel:
    """The model that sampler and learner use; its base may still be loading.

    Attributes:
        policy: the model on this process's devices.
        vocabulary: special token ids.
        tokenizer: for stop strings.
        loading: its frozen parameters, loaded once, and the seconds of loading them.
    """

    policy: Policy
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    loading: Future[tuple[Params, float]]

    @property
    def base(self) -> Params:
        """Its frozen parameters; waits until they are loaded.

        Raises:
            ValueError: if the weights do not match the configuration.
        """
        return self.loading.result()[0]


def open_model(config: Config, *, role: Literal["learner", "sampler"]) -> OpenedModel:
    """Starts JAX on the devices of a learner or of a sampler and begins to load the base.

    The base is loaded in a thread, so that programs can compile meanwhile.

    Raises:
        ValueError: if devices or tokenizer do not match the configuration.
        FileNotFoundError: if there are no weights or no tokenizer.
    """
    plan = config.plan
    count, fsdp, tp = plan.learner_devices, plan.fsdp, plan.tp
    quantization: str = config.model.quantization
    if role == "sampler":
        count, fsdp, tp = plan.devices_per_sampler, plan.fsdp_of_sampler, plan.tp_of_sampler
        quantization = config.sampler_quantization
    mesh = open_mesh(platform=plan.platform, count=count, fsdp=fsdp, tp=tp)
    from pipeline.compute.model.vocabulary import Vocabulary
    from pipeline.compute.model.weights import read_text_config

    folder, tokenizer = find_model(config.model), open_tokenizer(config.model)
    vocabulary = Vocabulary.of(tokenizer, config.rollout)
    # Checked here, too, for checkpoints whose size follows only from the shapes of their arrays.
    check_tokenizer(
        tokenizer,
        folder=folder,
        vocab_size=read_text_config(folder)["vocab_size"],
        stop_tokens=config.rollout.stop_tokens,
    )
    policy = make_policy(
        folder,
        dtype=config.model.dtype,
        lora=config.lora,
        mesh=mesh,
        quantization=quantization,
        embeddings_in_host=plan.embeddings_in_host,
    )

    def load() -> tuple[Params, float]:
        started = time.monotonic()
        return policy.load_base(folder), time.monotonic() - started

    reader = ThreadPoolExecutor(1)
    loading = reader.submit(load)
    reader.shutdown(wait=False)
    if policy.is_quantized:
        # Quantizing runs qwix's own code, which must not run while qwix patches JAX for a trace.
        wait([loading])
    return OpenedModel(policy, vocabulary, tokenizer, loading)


def make_policy(
    folder: Path,
    *,
    dtype: str,
    lora: Lora,
    mesh: Mesh,
    quantization: str = "none",
    embeddings_in_host: bool = False,
) -> Policy:
    """The policy of a model folder, with the shapes of `lora.start`'s adapter; reads no weights.

    Raises:
        FileNotFoundError: naming the missing file.
        ValueError: naming each unusable part of the folder, and why.
    """
    import jax.numpy as jnp

    from pipeline.compute.model.adapter_source import needs_separate
    from pipeline.compute.model.architecture import architecture
    from pipeline.compute.model.policy import Policy
    from pipeline.compute.model.weights import read_text_config

    return Policy(
        architecture(read_text_config(folder), dtype=jnp.dtype(dtype)),
        lora=lora,
        mesh=mesh,
        quantization=quantization,
        separate=needs_separate(lora),
        embeddings_in_host=embeddings_in_host,
    )


def check_model(folder: Path, config: Config) -> None:
    """Checks what loading would refuse: the tensors' names and shapes, and `lora.start`.

    Reads the adapter, but no weights. For a process that does not compute otherwise: JAX uses no
    devices but the CPU after that.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: naming what is damaged, or does not fit the configuration or the base.
    """
    import jax

    from pipeline.compute.model import weights
    from pipeline.compute.model.adapter_source import load_adapter
    from pipeline.compute.model.sharding import make_mesh

    jax.config.update("jax_platforms", "cpu")  # the chips are the actors'
    mesh = make_mesh(jax.devices("cpu")[:1])
    policy = make_policy(folder, dtype=config.model.dtype, lora=config.lora, mesh=mesh)
    weights.stream(folder, policy.plain_shapes)
    if config.lora.start is not None:
        load_adapter(config.lora.start, policy)


def open_policy(
    folder: Path, *, dtype: str, lora: Lora, mesh: Mesh, quantization: str = "none"
) -> tuple[Policy, Params]:
    """Policy and base of a model folder; see `make_policy`.

    Raises:
        FileNotFoundError: naming the missing file.
        ValueError: naming each unusable part of the folder, and why.
    """
    policy = make_policy(folder, dtype=dtype, lora=lora, mesh=mesh, quantization=quantization)
    return policy, policy.load_base(folder)
