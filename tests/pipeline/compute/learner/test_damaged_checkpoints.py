"""Each file of a checkpoint is damaged, one at a time: it is never restored to a wrong state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.compute.learner.checkpoint import Checkpoints
from tests.damage import damages
from tests.pipeline.compute.learner.test_checkpoint import fresh, same_bits, trained

pytestmark = pytest.mark.slow


def test_invariant_12_a_damaged_checkpoint_is_restored_exactly_or_skipped(tmp_path: Path):
    written = Checkpoints(tmp_path / "whole" / "checkpoints", keep=2)
    for version in (1, 2):
        written.save(trained(version), {"step": version})
        written.wait()
    files = [path for path in (tmp_path / "whole/checkpoints/2").rglob("*") if path.is_file()]
    skipped = 0
    for path in sorted(files):
        name = path.relative_to(tmp_path / "whole")
        for what, content in damages(path.read_bytes(), flips=1):
            run = tmp_path / "damaged"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(tmp_path / "whole", run)
            if content is None:
                (run / name).unlink()
            else:
                (run / name).write_bytes(content)
            found = Checkpoints(run / "checkpoints", keep=2).restore(fresh())
            assert found is not None, f"{name} {what}"
            state, meta, lines = found
            same_bits(state, trained(state.version))
            assert meta == {"step": state.version}
            assert len(lines) == 2 - state.version, f"{name} {what}: {lines}"
            skipped += len(lines)
    assert skipped > len(files) / 2
