"""Keeps what README quotes of a run, in a folder of at most 300 kB.

    python -m launch.demo.keep_run RUN_DIR --command "make gemma SEED=0" [--out docs/runs]

Writes `summary.json` and `config.json`, with paths relative to the project, the figures of each
step as `metrics.csv`, the report as `report.html`, and in `about.json` the command, commit, code
hash, machine and versions.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

from launch.bench.harness import machine
from launch.report import main as write_report
from pipeline.run.run_folder import RunFolder

COLUMNS = (
    "step",
    "reward/mean",
    "rollout/correct_share",
    "rollout/well_formed_share",
    "rollout/entropy",
    "rollout/tokens_mean",
    "rollout/slots_useful",
    "groups/mixed",
    "learner/lr",
    "learner/grad_norm",
    "learner/adapter_norm",
    "learner/mismatch_mean",
    "learner/mismatch_p999",
    "time/sample_s",
    "time/learn_s",
    "time/step_s",
    "time/elapsed_s",
)
"""Of `metrics.jsonl`."""


_PROJECT = Path(__file__).parents[2]


def keep(run_dir: Path, out: Path, *, command: str) -> Path:
    """Writes the folder of a run, named as the run; returns it.

    Args:
        run_dir: of a finished run.
        out: folder of such folders.
        command: with which the run was started.

    Raises:
        FileNotFoundError: if there is no summary.
    """
    run, kept = RunFolder(run_dir), out / run_dir.name
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        rows.writeheader()
        rows.writerows(
            {key: f"{row[key]:.6g}" for key in COLUMNS if key in row} for row in run.metrics
        )
    page = kept / "report.html"
    write_report([str(run_dir), "--out", str(page)])
    for path in (run_dir / "summary.json", run_dir / "config.json", page):
        text = path.read_text(encoding="utf-8").replace(f"{_PROJECT}/", "")
        (kept / path.name).write_text(text.replace(str(Path.home()), "~"), encoding="utf-8")
    git = ["git", "-C", str(_PROJECT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    code = run.valid_entries("started")[0]["code"]
    about = {"command": command, "commit": commit, "code": code, **machine()}
    (kept / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return kept


def main() -> int:
    """Keeps a run."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.keep_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a finished run")
    parser.add_argument("--command", required=True, help="with which the run was started")
    parser.add_argument("--out", type=Path, default=Path("docs/runs"), help="default: docs/runs")
    given = parser.parse_args()
    try:
        print(keep(given.run_dir, given.out, command=given.command))
    except FileNotFoundError as error:
        parser.error(f"{error.filename}: no such file; the run must be finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
