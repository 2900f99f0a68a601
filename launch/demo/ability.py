"""Measures the demo's base model: greedy accuracy, pass@1 and pass@8.

python -m launch.demo.ability [--model DIR] [--prompts 500]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from configs.load import load_config
from configs.schema import Config


def measure(config: Config, *, prompts: int) -> dict[str, float]:
    """Measures the base of a configuration on the first `prompts` test prompts.

    Returns:
        Shares of the prompts: `greedy`: correct at temperature 0; `pass@1` at temperature 1, mean
        over the samples; `pass@8`: correct in at least one sample; `well formed`: greedy answers in
        the requested form.
    """
    from launch.bench.rates import SAMPLES, Runs  # late: imports JAX

    runs = Runs(config)
    chosen, base = runs.data.test.prompts[:prompts], runs.policy.no_adapter()
    greedy, sampled = (
        runs.measure(chosen, base, samples=samples, phase="test") for samples in (1, SAMPLES)
    )
    return {
        "greedy": float(greedy.correct.mean()),
        "pass@1": float(sampled.correct.mean()),
        f"pass@{SAMPLES}": float(sampled.correct.any(axis=1).mean()),
        "well formed": float(greedy.well_formed.mean()),
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
