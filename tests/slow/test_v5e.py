"""The v5e-8 presets, compiled by the real TPU compiler, which needs no TPU. Minutes to an hour.

make test ARGS="-m slow"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.bench.child import TPU_COMPILER

PROJECT = Path(__file__).parents[2]
HBM_GIB = 15.75

COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from configs.load import load_config
from pipeline.decode.programs import DecodePrograms
from pipeline.learner.programs import LearnerPrograms
from pipeline.model.architecture import architecture
from pipeline.model.policy import Policy
from pipeline.model.sharding import make_mesh
from pipeline.model.vocabulary import Vocabulary
from pipeline.plan.figures import whole_logits
from pipeline.plan.hlo import parse

which, model = sys.argv[1:]
config = load_config(f"configs/{model}_gsm8k_v5e8.toml")
hf = json.loads(open(f"tests/slow/configs/{model}.json").read())
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = make_mesh(devices, fsdp=config.plan.fsdp, tp=config.plan.tp)
policy = Policy.create(
    architecture(hf, dtype=jnp.dtype("bfloat16")), lora=config.lora, mesh=mesh
)
vocabulary = Vocabulary(pad=0, stops=(106, 1), forbidden=(0, 2, 3, 4, 105))
if which == "decode":
    prefills, segment = DecodePrograms(policy, config, vocabulary).compile()
    programs = {f"prefill {size}": program for size, program in prefills.items()}
    programs["segment"] = segment
else:
    found = LearnerPrograms(policy, config, vocabulary).compile()
    programs = {f"gradient {size}": program for size, program in found.gradient.items()}
    programs |= {f"score {size}": program for size, program in found.score.items()}
    programs |= {f"keep {size}": program for size, program in found.keep.items()}
    programs["apply"] = found.apply
for name, program in programs.items():
    memory = program.memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = (policy.architecture.config.embed_dim, policy.architecture.config.hidden_dim)
    large = whole_logits(parse(program.as_text()), vocab=policy.vocab_size, model=sizes)
    print(json.dumps({"name": name, "gib": total / 2**30, "large": [str(b) for b in large]}))
"""


def compiled(which, model):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, which, model],
        cwd=PROJECT,
        env=os.environ | TPU_COMPILER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", ["decode", "learner"])
@pytest.mark.parametrize("model", ["gemma3_1b", "gemma3_270m", "gemma2_2b", "gemma3_4b"])
def test_a_preset_fits_a_v5e_chip_and_never_holds_the_vocabulary(model, which):
    for program in compiled(which, model):
        sys.stdout.write(f"{model} {program['name']}: {program['gib']:.2f} of {HBM_GIB} GiB\n")
        sys.stdout.flush()
        assert program["gib"] < HBM_GIB, program
        assert not program["large"], program
