"""Measures the demo's base model: greedy accuracy, pass@1 and pass@8.

python -m launch.demo.ability [--model DIR] [--prompts 500]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import load_config
from configs.schema import Config

SAMPLES = 8


def measure(config: Config, *, prompts: int) -> dict[str, float]:
    """Measures the base of a configuration on the first `prompts` test prompts.

    Returns:
        Shares of the prompts: `greedy`: correct at temperature 0; `pass@1` at temperature 1, mean
        over the samples; `pass@8`: correct in at least one sample; `well formed`: greedy answers in
        the requested form.
    """
    import jax
    import numpy as np

    from pipeline.compute.decode.engine import Engine
    from pipeline.compute.model.sharding import make_mesh
    from pipeline.compute.model.vocabulary import Vocabulary
    from pipeline.compute.opening import open_policy
    from pipeline.evaluate.evaluation import judge, requests
    from pipeline.inputs.dataset.load import load_data
    from pipeline.inputs.text.prompts import PromptMaker
    from pipeline.inputs.text.tokenizer_files import read_tokenizer
    from rewards.base import Tags

    folder = Path(config.model.path)
    tokenizer, mesh = read_tokenizer(folder), make_mesh(jax.devices()[:1])
    policy, base = open_policy(folder, dtype=config.model.dtype, lora=config.lora, mesh=mesh)
    vocabulary = Vocabulary.of(tokenizer, config.rollout)
    engine = Engine(policy, base, config, vocabulary, text_of=tokenizer.decode)
    maker = PromptMaker(config.prompt, tokenizer)
    chosen = load_data(config, tokenizer).test.prompts[:prompts]

    def sample(samples: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns which answers are correct and well-formed, bool `prompts samples` each."""
        completions = engine.generate(
            requests(chosen, phase="test", samples=samples),
            adapter=policy.no_adapter(),
            version=0,
            adapter_sha256="",
            temperature=temperature,
        )
        judged = judge(chosen, completions, maker=maker, tags=Tags.of_run(config))
        return judged.correct, judged.well_formed

    greedy, well_formed = sample(1, 0.0)
    sampled, _ = sample(SAMPLES, 1.0)
    return {
        "greedy": float(greedy.mean()),
        "pass@1": float(sampled.mean()),
        f"pass@{SAMPLES}": float(sampled.any(axis=1).mean()),
        "well formed": float(well_formed.mean()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the model and prints the shares."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.ability",
        description="Measure the demo's base: greedy accuracy, pass@1 and pass@8.",
    )
    parser.add_argument("--model", help="model folder (default: the demo's)")
    parser.add_argument("--prompts", type=int, default=500, help="test prompts (default: 500)")
    options = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    overrides = [("model.path", options.model)] if options.model else []
    found = measure(load_config("configs/demo.toml", overrides), prompts=options.prompts)
    print(", ".join(f"{name} {share:.1%}" for name, share in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
