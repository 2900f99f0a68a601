"""A quantized base saves TPU memory, according to the TPU compiler. Takes about ten minutes.

make test ARGS="-m slow"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

COMPILE = """
import json
import jax, jax.numpy as jnp
from jax.experimental import topologies
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import lowered, make_mesh
from tests import tiny
from tests.pipeline.compute.model.test_quantize import GEMMA3_1B

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
shape = architecture(tiny.hf_config(**GEMMA3_1B), dtype=jnp.dtype("bfloat16"))
config = tiny.make_config(
    lora={"rank": 32, "alpha": 64.0},
    plan={"micro_batch_tokens": 8 * 1024, "head_tokens": 1024},
    rollout={"max_prompt_tokens": 256, "max_new_tokens": 768},
)
for kind in ("none", "int8", "nf4"):
    policy = Policy(
        shape, lora=config.lora, mesh=make_mesh(devices[:1]), quantization=kind
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
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {row["kind"]: row for row in map(json.loads, done.stdout.splitlines())}
    for kind, row in found.items():
        gb = {name: round(row[name] / 1e9, 2) for name in ("base", "arguments", "temporary")}
        sys.stdout.write(f"{kind}: {gb} GB\n")
    plain = found.pop("none")
    for kind, row in found.items():
        # Device memory equals the size of the arrays: 4 bits are not padded to 8.
        saved = plain["arguments"] - row["arguments"]
        assert saved == pytest.approx(plain["base"] - row["base"], rel=0.02), kind
        assert row["temporary"] <= plain["temporary"] + 0.5 * saved, kind
