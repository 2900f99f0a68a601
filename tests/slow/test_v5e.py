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

from pipeline.plan.topology import HBM_GIB, TPU_COMPILER

PROJECT = Path(__file__).parents[2]

COMPILE = """
import json, sys
from pathlib import Path
from configs.load import load_config
from tests.whole_logits import whole_logits
from pipeline.compute.aot.compile import compile_for, trace
from pipeline.compute.aot.hlo import parse
from pipeline.data.models.hf_config import read_model_shape
from pipeline.plan.cost_model.programs import programs_of
from pipeline.plan.search.fitting import PlanCase, choose_placement

model = sys.argv[1]
case = PlanCase.of(load_config(f"configs/{model}_gsm8k_v5e8.toml"))
config = choose_placement(case).chosen.config
shape = read_model_shape(json.loads(Path(f"tests/slow/configs/{model}.json").read_text()))
vocab = shape.vocab // (config.plan.fsdp * config.plan.tp)
for name in programs_of(config):
    traced, _ = trace(config, shape, name)
    program = compile_for(traced)
    large = whole_logits(parse(program.text), vocab=vocab, model=(shape.embed, shape.hidden))
    found = {"name": name, "gib": program.hbm_bytes / 2**30, "large": [str(b) for b in large]}
    print(json.dumps(found), flush=True)
"""


def printed(script: str, *arguments: str) -> str:
    """What a script prints in a process that has the TPU compiler."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=PROJECT,
        env=os.environ | TPU_COMPILER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["gemma3_1b", "gemma3_270m", "gemma2_2b", "gemma3_4b"])
def test_a_preset_fits_a_v5e_chip_and_has_no_whole_logits(model):
    for line in printed(COMPILE, model).splitlines():
        program = json.loads(line)
        sys.stdout.write(f"{model} {program['name']}: {program['gib']:.2f} of {HBM_GIB} GiB\n")
        assert program["gib"] < HBM_GIB, program
        assert not program["large"], program


IN_HOST = """
import json, sys
import jax
import jax.numpy as jnp
from pipeline.compute.aot.compile import compile_for, v5e_devices
from pipeline.compute.model.lookup import look_up_in_host
from pipeline.compute.model.sharding import by_row, in_host, make_mesh
from pipeline.data.models.find_shape import PUBLISHED, read_model_shape

shape = read_model_shape(PUBLISHED["gemma-4-e2b"])
mesh = make_mesh(v5e_devices(int(sys.argv[1])))
table = (shape.vocab, *shape.host_row)
table = jax.ShapeDtypeStruct(table, jnp.bfloat16, sharding=in_host(mesh))
tokens = jax.ShapeDtypeStruct((64, 1), jnp.int32, sharding=by_row(mesh))

def segment(tokens, table):
    def step(_, tokens):
        found = look_up_in_host(tokens, table, mesh=mesh)
        return found.argmax(-1).astype(jnp.int32) % shape.vocab
    return jax.lax.fori_loop(0, 32, step, tokens)

program = compile_for(jax.jit(segment).trace(tokens, table))
host = program.stats.host_argument_size_in_bytes
print(json.dumps({"hbm": program.hbm_bytes, "host": host, "wanted": shape.host_bytes("bfloat16")}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chips", ["1", "8"])
def test_a_loop_reads_embeddings_in_host_memory_without_copying_the_table(chips):
    found = json.loads(printed(IN_HOST, chips))
    assert found["host"] == found["wanted"] == 262_144 * 72 * 128 * 2
    assert found["hbm"] < 2**24
