"""What others wrote is never run, and names no file elsewhere."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path

import pytest

from pipeline.data.models import hf_folder
from tests.launch.cluster_fixtures import PROJECT

PACKAGES = ("actors", "configs", "launch", "pipeline", "rewards")
UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}
UNSAFE |= {"tarfile", "zipfile", "yaml"}
"""Modules that load pickles, or unpack archives to paths that these name."""
EXCEPTIONS = {
    "launch/bench/torch_peer.py": "a benchmark's peer, which reads the safetensors that it wrote",
    "launch/demo/gemma.py": "reads one named file from wheels whose SHA-256 pip has compared",
    "rewards/processes/process.py": "writes pickles for the process that it starts; reads none",
    "rewards/processes/worker.py": "reads pickles that its parent process sends",
}


@functools.cache
def sources() -> list[tuple[str, ast.AST]]:
    paths = [path for package in PACKAGES for path in sorted((PROJECT / package).rglob("*.py"))]
    return [
        (str(path.relative_to(PROJECT)), ast.parse(path.read_text(encoding="utf-8")))
        for path in paths
    ]


def imported(tree: ast.AST) -> set[str]:
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_no_module_loads_a_pickle_or_unpacks_an_archive():
    assert [name for name, tree in sources() if imported(tree) & UNSAFE] == list(EXCEPTIONS)


def test_no_call_allows_pickles_or_code_of_others():
    calls = [
        (name, keyword.arg)
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in {"allow_pickle", "trust_remote_code"}
    ]
    assert calls == []


@pytest.mark.parametrize(
    "file",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "../model.safetensors",
        "a/b.safetensors",
        "pytorch_model.bin",
        "..\\x.safetensors",
    ],
)
def test_an_index_names_only_weights_of_its_folder(tmp_path: Path, file: str):
    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / hf_folder.INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match=r"not the name of a \.safetensors file in this folder"):
        hf_folder._read_index(tmp_path)
