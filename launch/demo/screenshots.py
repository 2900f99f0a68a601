"""Takes the screenshots of the documentation.

    python -m launch.demo.screenshots RUN_DIR [--out docs]

writes `console.svg`, what a terminal showed after half of the run's steps, and with headless
Chromium `report_desktop.png` (light) and `report_phone.png` (dark) of its report.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console as Terminal

from launch.exits import Failure, exit_status
from launch.report import main as write_report
from pipeline.evaluate.summary import mean_of
from pipeline.run.console import Console, view
from pipeline.run.record_files import TIME_FORMAT, read_rows
from pipeline.run.records import evaluation_line
from pipeline.run.run_folder import RunFolder
from pipeline.run.status import BestValidation

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_COLOURS = 64
"""Colours of a picture: enough for text and flat areas, and a third of the size."""
_WAIT_S = 120
_COLUMNS = 100
"""Width of the terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.screenshots",
        description="Take the documentation's screenshots.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run of configs/demo.toml")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder (default: docs)")
    flags = parser.parse_args(argv)
    if not RunFolder(Path(flags.run_dir)).metrics:
        parser.error(f"{flags.run_dir} has no step; name the folder of a run")
    return exit_status(browser, lambda found: take(found, flags.run_dir, flags.out))


def browser() -> str:
    """The path of Chromium.

    Raises:
        FileNotFoundError: if it is not installed, with what to install.
    """
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise FileNotFoundError(
        f"none of {', '.join(BROWSERS)} is installed; on Debian: apt-get install chromium"
    )


def take(chromium: str, run_dir: str, out: Path) -> int:
    """Writes the screenshots; returns the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    draw_console(RunFolder(Path(run_dir)), out / "console.svg")
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        status = write_report([run_dir, "--out", str(page)])
        if status:
            return status
        capture(chromium, page, out / "report_desktop.png", width=1280, height=1240)
        capture(chromium, page, out / "report_phone.png", width=390, height=1240, dark=True)
    return 0


def draw_console(folder: RunFolder, picture: Path) -> None:
    """Writes a picture of the console of a run after half of its steps, from its records.

    Args:
        folder: of a run with a step.
        picture: SVG to write; it loads nothing.
    """
    rows = list(read_rows(folder.path / "metrics.jsonl"))
    row = rows[(len(rows) - 1) // 2]
    step, then = row["step"], datetime.strptime(row["time"], TIME_FORMAT).replace(tzinfo=UTC)
    evaluated = [entry for entry in folder.valid_entries("evaluated") if entry["step"] < step]
    validations = [entry for entry in evaluated if entry["name"] == "validation"]
    console = Console(folder.path.name, phase=lambda: "sample", write=_nowhere, now=lambda: then)
    if validations:
        console.update(best_validation=BestValidation.of(max(validations, key=_value)))
    console.step(step, {name: value for name, value in row.items() if name != "time"})
    terminal = Terminal(record=True, width=_COLUMNS, file=StringIO())
    for entry in evaluated:
        terminal.print(f"{entry['name']}: {evaluation_line(entry)}", markup=False, highlight=False)
    terminal.print(view(replace(console.status, elapsed_s=row["time/elapsed_s"])))
    drawn = terminal.export_svg(title="python -m launch.train configs/demo.toml")
    # The reader's own fixed-width font, instead of one from the network.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    picture.write_text(drawn, encoding="utf-8")
    print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")


def _nowhere(_: str) -> None:
    """The line of a step is not in the picture."""


def _value(entry: Mapping[str, Any]) -> float:
    value = mean_of(entry)
    return -math.inf if value is None else value


def capture(
    chromium: str, page: Path, picture: Path, *, width: int, height: int, dark: bool = False
) -> None:
    """Writes a picture of the top of a page.

    Args:
        chromium: path of the browser.
        page: an HTML file.
        picture: PNG to write.
        width: of the window, in CSS pixels.
        height: of the window.
        dark: whether the page's reader prefers dark colours.

    Raises:
        Failure: if the browser fails, with its last lines.
    """
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                chromium,
                *_FLAGS,
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--window-size={width},{height}",
                f"--screenshot={picture.resolve()}",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            check=False,
        )
    if done.returncode or not picture.is_file():
        raise Failure("\n".join([f"{chromium} failed:", *done.stderr.splitlines()[-3:]]))
    with Image.open(picture) as found:
        found.convert("RGB").quantize(_COLOURS).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())
