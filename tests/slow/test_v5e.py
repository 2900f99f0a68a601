"""Compiles the v5e-8 presets with the TPU compiler, without a TPU. Takes minutes to an hour.

make test ARGS="-m slow"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.contracts.topology import TPU_COMPILER

PROJECT = Path(__file__).parents[2]
HBM_GIB = 15.75

COMPILE = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax.experimental import topologies
from configs.load import load_config
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.aot.cost_figures import whole_logits
from pipeline.compute.aot.hlo import parse
from pipeline.compute.aot.cost_figures import HBM, memory_spaces

which, model, dump = sys.argv[1:]
config = load_config(f"configs/{model}_gsm8k_v5e8.toml")
hf = json.loads(open(f"tests/slow/configs/{model}.json").read())
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = make_mesh(devices, fsdp=config.plan.fsdp, tp=config.plan.tp)
policy = Policy(
    architecture(hf, dtype=jnp.dtype("bfloat16")), lora=config.lora, mesh=mesh
)
vocabulary = Vocabulary(pad=0, stops=(106, 1), forbidden=(0, 2, 3, 4, 105))
if which == "decode":
    found = DecodePrograms(policy, config, vocabulary).compile()
    programs = {f"prefill {size}": program for size, program in found.prefill.items()}
    programs |= {f"fill {size}": program for size, program in found.fill.items()}
    programs |= {f"segment {size}": program for size, program in found.segment.items()}
else:
    found = LearnerPrograms(policy, config, vocabulary).compile()
    programs = {f"gradient {size}": program for size, program in found.gradient.items()}
    programs |= {f"score {size}": program for size, program in found.score.items()}
    for size, program in found.reference_top_k.items():
        programs[f"reference_top_k {size}"] = program
    programs["apply"] = found.apply
vocab = policy.vocab_size // (config.plan.fsdp * config.plan.tp)
reports = {
    kind: sorted(Path(dump).glob(f"*.jit_{kind}.*memory-usage-report.txt"))
    for kind in {name.split()[0] for name in programs}
}
for name, program in programs.items():
    report = reports[name.split()[0]].pop(0)  # in the order in which they were compiled
    total = memory_spaces(report.read_text())[HBM]
    sizes = (policy.architecture.config.embed_dim, policy.architecture.config.hidden_dim)
    large = whole_logits(parse(program.as_text()), vocab=vocab, model=sizes)
    print(json.dumps({"name": name, "gib": total / 2**30, "large": [str(b) for b in large]}))
"""


def compiled(which, model, dump):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, which, model, dump],
        cwd=PROJECT,
        env=os.environ
        | TPU_COMPILER
        | {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"},
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
def test_a_preset_fits_a_v5e_chip_and_has_no_whole_logits(model, which, tmp_path):
    for program in compiled(which, model, str(tmp_path)):
        sys.stdout.write(f"{model} {program['name']}: {program['gib']:.2f} of {HBM_GIB} GiB\n")
        sys.stdout.flush()
        assert program["gib"] < HBM_GIB, program
        assert not program["large"], program
