"""Compiler requests, the cache keys of reports, and the compiler itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from pipeline.data.models.find_shape import shape_of
from pipeline.data.models.hf_config import read_model_shape
from pipeline.plan import compiler
from pipeline.plan.compiler import CompilerReport, NoCompiler, cache_key, compile_programs
from pipeline.plan.topology import HBM_GIB
from tests import tiny

PRESETS = Path(__file__).parents[3] / "configs"
SHAPE = read_model_shape(tiny.hf_config())
GIB = 2**30


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMA_GRPO_CACHE", str(tmp_path / "cache"))


def preset(**settings):
    given = {"plan__placement": "colocated", "plan__remat": "none", "plan__slots": 512}
    changes = given | {"model.path": "hf://google/gemma-3-1b-it"} | settings
    overrides = [(key.replace("__", "."), str(value)) for key, value in changes.items()]
    return load_config(PRESETS / "gemma3_1b_gsm8k_v5e8.toml", overrides)


def key_of(program, **settings):
    return cache_key(preset(**settings), SHAPE, program)


OF_PREFILL = {"plan__prefill_tokens": 2048, "lora__rank": 16, "model__dtype": "float32"}
OF_SEGMENT = {"plan__segment_steps": 16, "rollout__top_k": 64, "plan__learner_devices": 4}
# The longest prompt gives the share of learned positions.
OF_GRADIENT = {"plan__remat": "dots", "plan__tp": 2, "rollout__max_prompt_tokens": 200}
KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # program: settings of which each gives another program; settings that give the same one
    "prefill 320": (OF_PREFILL, {"plan__slots": 256, "plan__remat": "dots"}),
    "fill 320": ({"plan__slots": 256, "plan__prefill_tokens": 2048}, {}),
    "segment 64": (OF_SEGMENT, {"plan__slots": 256, "learner__kl_coef": 0.5}),
    "gradient 8": (OF_GRADIENT, {"plan__slots": 256, "plan__kv_cache": "int8"}),
    "apply": ({"learner__weight_decay": 0.1}, {"learner__schedule": "constant"}),
}
ALWAYS_SAME = {"run__name": "other", "run__seed": 7, "budget__time": "1h", "learner__lr": 1e-4}
ALWAYS_SAME |= {"rollout__prompts_per_step": 8}


@pytest.mark.parametrize("program", KEYS)
def test_a_key_depends_on_what_its_program_depends_on(program):
    changing, irrelevant = KEYS[program]
    before = key_of(program)
    for setting, value in changing.items():
        assert key_of(program, **{setting: value}) != before, setting
    assert key_of(program, **ALWAYS_SAME, **irrelevant) == before


def test_the_key_depends_on_model_sources_and_versions(monkeypatch):
    config, before = preset(), key_of("segment 64")
    assert cache_key(config, shape_of(config), "segment 64") != before
    assert before["versions"]["jax"]
    monkeypatch.setattr(compiler, "versions", lambda: {"jax": "99"})
    assert key_of("segment 64") != before


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(NoCompiler, match="the TPU compiler is missing: install the package libtpu"):
        compile_programs(preset(), SHAPE, ["apply"])


def test_cached_reports_are_not_compiled_again(monkeypatch):
    asked = []

    def compile_(_config, _shape, programs, **_settings):
        for program in programs:
            asked.append(program)
            yield program, CompilerReport(fits=True, hbm_bytes=3 * GIB, compile_s=2.0, seconds=0.5)

    monkeypatch.setattr(compiler, "_compile", compile_)
    compile_programs(preset(), SHAPE, ["apply", "segment 64"])
    again = compile_programs(preset(run__name="other"), SHAPE, ["segment 64", "score 8", "apply"])
    assert asked == ["apply", "segment 64", "score 8"]
    assert list(again) == ["segment 64", "score 8", "apply"]
    assert again["apply"].hbm_bytes == 3 * GIB


@pytest.mark.slow
def test_the_compiler_compiles_demo_programs():
    """Demo-sized programs for v5e chips; one that cannot fit; failures are reported."""
    config = load_config(PRESETS / "demo.toml", [("plan.segment_steps", "4")])
    shape = shape_of(config)
    lines: list[str] = []
    found = compile_programs(config, shape, ["segment 192", "apply"], say=lines.append)
    assert lines[0] == "compiling segment 192, apply ..."
    assert lines[1].startswith("[1/2] apply: =0.0")
    assert lines[2].startswith("[2/2] segment 192: =0.")
    held = found["segment 192"]
    base = shape.base_bytes(config.model.dtype)
    assert held.hbm_bytes is not None
    assert base < held.hbm_bytes < HBM_GIB * GIB
    assert held.seconds > 0
    applied = found["apply"].hbm_bytes
    assert applied is not None
    assert applied >= 4 * 4 * shape.adapter_parameters(config.lora)
    lengths = {"rollout.max_new_tokens": "400000", "plan.row_tokens": "400052"}
    sizes = {"plan.segment_steps": "4", "plan.micro_batch_tokens": "800104"}
    large = load_config(PRESETS / "demo.toml", [*(lengths | sizes).items()])
    figures = compile_programs(large, shape, ["segment 192"])["segment 192"]
    assert not figures.fits
