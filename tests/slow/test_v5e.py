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
