"""Makes the demo's base: a tiny Gemma in the real formats, with a low accuracy.

It is pretrained on solutions with mistakes: most carries are forgotten, and sometimes plus and
minus are swapped. So correct solutions are in its distribution but rare, as with real bases, and
reinforcement learning can make them likely. The written folder can be used as `model.path`:
safetensors (bfloat16), config.json, tokenizer.model.

    python -m launch.demo.tiny --out launch/demo/tiny_gemma3 [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import trange

from configs.schema import Lora
from configs.schema import Prompt as PromptConfig
from launch.demo.task import ErrorRates, Terms, make_problem, make_splits, solution
from launch.demo.tokenizer import train_tokenizer
from pipeline.compute.model import save
from pipeline.compute.model.head import scaled_logits
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import make_policy
from pipeline.data.text import chat
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import read_tokenizer

BASE = Path(__file__).with_name("tiny_gemma3")
CONFIG: dict[str, Any] = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
"""The model's `config.json`, as in the repository."""
ERROR_RATES = ErrorRates(carry=0.57, operator=0.12)
BATCH, TOKENS = 128, 80
STEPS, PEAK_LR = 900, 2e-3
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def write_tokenizer(folder: Path, *, seed: int) -> None:
    """Writes the tokenizer, made of the task's words and the answer tags."""
    rng, texts = Random(seed), list[str]()
    for _ in range(2000):
        problem = make_problem(rng)
        texts.append(_prompt(problem.question) + solution(problem, rng))
    path = folder / "tokenizer.model"
    train_tokenizer(texts, path, vocab_size=CONFIG["vocab_size"], whole=TAGS)
    shutil.copy(BASE / "tokenizer_config.json", folder)


def _prompt(question: str) -> str:
    return chat.render(PromptConfig(), {"question": question}, template=None, turns=chat.GEMMA3)


def batches(
    tokenizer: Tokenizer, *, seed: int, held_out: set[Terms]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields training batches without end: tokens `batch seq`, and the mask of solution tokens."""
    rng = Random(seed)
    end = tokenizer.piece_id("<end_of_turn>")
    while True:
        tokens = np.zeros((BATCH, TOKENS), np.int32)
        learned = np.zeros((BATCH, TOKENS), bool)
        row = 0
        while row < BATCH:
            problem = make_problem(rng)
            if problem.terms in held_out:
                continue
            prompt = [tokenizer.bos_id, *tokenizer.encode(_prompt(problem.question))]
            answer = [*tokenizer.encode(solution(problem, rng, ERROR_RATES)), end]
            length = len(prompt) + len(answer)
            tokens[row, :length] = prompt + answer
            learned[row, len(prompt) : length] = True
            row += 1
        yield tokens, learned


def pretrain(draft: Path, out: Path, *, seed: int, steps: int) -> None:
    """Trains all parameters on solutions with mistakes and writes the model folder `out`.

    `draft` has `config.json` and the tokenizer's files; `out` exists and is empty.
    """
    mesh = make_mesh(jax.devices()[:1])
    policy = make_policy(draft, dtype="float32", lora=Lora(rank=1), mesh=mesh)
    no_adapter = policy.no_adapter()
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_LR, steps // 10, steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.01)
    )

    @jax.jit
    def step(params: Any, state: Any, tokens: Any, learned: Any) -> Any:
        value, grads = jax.value_and_grad(_loss)(params, policy, no_adapter, tokens, learned)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    held_out = {
        problem.terms for split in ("validation", "test") for problem in make_splits(seed)[split]
    }
    params = _initial(policy.base_shapes, seed=seed)
    state = optimizer.init(params)
    feed = batches(read_tokenizer(draft), seed=seed + 1, held_out=held_out)
    bar = trange(steps, desc="pretraining", mininterval=5)
    for number in bar:
        params, state, value = step(params, state, *next(feed))
        if number % 10 == 0:
            bar.set_postfix(loss=f"{value:.3f}")
    written = {name: np.asarray(value).astype(jnp.bfloat16) for name, value in params.items()}
    save.save_folder(out, written, like=draft)


def _loss(
    params: Params, policy: Policy, adapter: Params, tokens: jax.Array, learned: jax.Array
) -> jax.Array:
    """Mean cross entropy of the learned tokens, with whole logits: the embedding is trained."""
    positions = jnp.broadcast_to(jnp.arange(TOKENS - 1), (BATCH, TOKENS - 1))
    hidden, _ = policy.bind(params, adapter)(tokens[:, :-1], positions)
    logits = scaled_logits(
        hidden,
        policy.embedding(params),
        softcap=policy.architecture.shape.final_softcap,
        temperature=1.0,
        forbidden=jnp.zeros(policy.vocab_size, bool),
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * learned[:, 1:]) / jnp.sum(learned[:, 1:])


def _initial(shapes: Mapping[str, jax.ShapeDtypeStruct], *, seed: int) -> dict[str, jax.Array]:
    """Initializes: normal, variance 1 / fan-in; scales of norms, to which 1 is added, 0."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    params = {}
    for key, (name, shape) in zip(keys, sorted(shapes.items()), strict=True):
        if name.endswith(".scale"):
            params[name] = jnp.zeros(shape.shape)
        else:
            sums_all = name.endswith((".kernel", ".attn_vec_einsum.w"))
            inputs = math.prod(shape.shape[:-1]) if sums_all else CONFIG["hidden_size"]
            params[name] = jax.random.normal(key, shape.shape) * inputs**-0.5
    return params


def main() -> None:
    """Writes the model folder."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.tiny",
        description="Make the demo's tiny Gemma: about 20 minutes on two cores.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of data and parameters (default: 0)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"pretraining steps (default: {STEPS})"
    )
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder)
        shutil.copy(BASE / "config.json", draft)
        write_tokenizer(draft, seed=args.seed)
        pretrain(draft, args.out, seed=args.seed, steps=args.steps)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
