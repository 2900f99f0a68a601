"""Host memory used for loading a model of real size."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import Lora
from pipeline.compute.model import weights
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.tensors import entry
from pipeline.data.models.hf_folder import stored_tensors

CONFIG = Path(__file__).parent / "configs" / "gemma3_1b.json"
BEYOND_DEVICE = 0.7e9
"""Maximum bytes of anonymous memory that loading uses in addition to the parameters."""


def shapes() -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of gemma3-1b's parameters in bfloat16."""
    found = json.loads(CONFIG.read_text(encoding="utf-8"))
    shape = architecture(found, dtype=jnp.dtype("bfloat16"))
    mesh = make_mesh(jax.devices()[:1])
    return dict(Policy(shape, lora=Lora(), mesh=mesh).plain_shapes)


def write_random(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Writes a safetensors file of bfloat16 numbers between 0 and 2, piece by piece."""
    header, offset = {}, 0
    for name, shape in wanted.items():
        end = offset + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in wanted.values():
            left = prod(shape)
            while left:
                piece = rng.integers(0, 0x4000, min(left, 1 << 22), np.uint16)
                file.write(piece.tobytes())
                left -= len(piece)


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Watch:
    """Measures the peak of this process's anonymous memory; a context manager."""

    def __enter__(self) -> Watch:
        self.before = self.peak = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_loading_needs_little_host_memory_beyond_the_parameters(tmp_path: Path):
    parameters = shapes()
    wanted: dict[str, tuple[int, ...]] = {}
    for name, spec in parameters.items():
        wanted |= dict.fromkeys(entry(name).tensors, entry(name).stored_shape(spec.shape))
    (tmp_path / "config.json").write_bytes(CONFIG.read_bytes())
    write_random(tmp_path / "model.safetensors", wanted)
    jax.device_put(np.zeros(1)).block_until_ready()
    with Watch() as watch:
        loaded = dict(weights.stream(tmp_path, parameters))
    size = sum(value.nbytes for value in loaded.values())
    assert 1.99e9 < size < 2.01e9
    beyond = watch.peak - watch.before - size
    print(f"{beyond / 1e9:.2f} GB beyond the {size / 1e9:.2f} GB of the parameters")  # noqa: T201  # for README
    assert beyond <= BEYOND_DEVICE
    # The parameters equal the file's values, and are copies.
    stored = stored_tensors(tmp_path)["model.layers.25.mlp.down_proj.weight"]
    expected = np.array(stored.data().view(jnp.bfloat16).reshape(stored.shape))
    (tmp_path / "model.safetensors").write_bytes(b"")
    np.testing.assert_array_equal(loaded["layers.25.mlp.down_proj.kernel"], expected.T)
