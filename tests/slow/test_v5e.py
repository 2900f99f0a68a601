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


SORT = """
import json
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from pipeline.compute.aot.compile import compile_for, v5e_devices
from pipeline.compute.model.sharding import make_mesh

place = NamedSharding(make_mesh(v5e_devices(1)), PartitionSpec())
given = jax.ShapeDtypeStruct((1024, 2048), jnp.float32, sharding=place)
program = compile_for(jax.jit(lambda x: jax.lax.top_k(x, 128)).trace(given))
print(json.dumps([program.schedule, sum(part.modelled_s for part in program.parts().values())]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sort_takes_the_bundles_of_its_final_schedule():
    schedule, modelled_s = json.loads(printed(SORT).splitlines()[-1])
    # Counted by hand in the schedule of libtpu 0.0.42: 0.436 ms at 1.5 GHz.
    assert schedule["sort"] == pytest.approx(653_280, rel=0.05)
    assert modelled_s == pytest.approx(schedule["sort"] / 1.5e9, rel=0.05)


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


QUANTIZED = """
import json
import jax, jax.numpy as jnp
from pipeline.compute.aot.compile import v5e_devices
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import lowered, make_mesh
from tests import tiny
from tests.pipeline.compute.model.test_quantize import GEMMA3_1B

shape = architecture(tiny.hf_config(**GEMMA3_1B), dtype=jnp.dtype("bfloat16"))
config = tiny.make_config(
    lora={"rank": 32, "alpha": 64.0},
    plan={"micro_batch_tokens": 8 * 1024},
    rollout={"max_prompt_tokens": 256, "max_new_tokens": 768},
)
for kind in ("none", "int8", "nf4"):
    policy = Policy(
        shape, lora=config.lora, mesh=make_mesh(v5e_devices(1)), quantization=kind
    )
    programs = LearnerPrograms(policy, config, tiny.VOCABULARY)
    base, adapter = policy.abstract_params()
    gradient = jax.jit(programs.gradient, donate_argnums=2)
    traced = gradient.trace(base, adapter, adapter, programs.abstract_batch(8))
    memory = lowered(traced, policy.mesh).compile().memory_analysis()
    size = sum(s.size * s.dtype.itemsize for s in policy.base_shapes.values())
    print(json.dumps({"kind": kind, "base": size, "arguments": memory.argument_size_in_bytes,
                      "temporary": memory.temp_size_in_bytes}))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_dequantizing_does_not_use_the_saved_memory():
    found = {row["kind"]: row for row in map(json.loads, printed(QUANTIZED).splitlines())}
    for kind, row in found.items():
        gb = {name: round(row[name] / 1e9, 2) for name in ("base", "arguments", "temporary")}
        sys.stdout.write(f"{kind}: {gb} GB\n")
    plain = found.pop("none")
    for kind, row in found.items():
        # Device memory equals the size of the arrays: 4 bits are not padded to 8.
        saved = plain["arguments"] - row["arguments"]
        assert saved == pytest.approx(plain["base"] - row["base"], rel=0.02), kind
        assert row["temporary"] <= plain["temporary"] + 0.5 * saved, kind
