"""Takes the screenshots of the documentation, with headless Chromium.

    python -m launch.demo.screenshots RUN_DIR [--out docs]

writes `report_desktop.png` (light) and `report_phone.png` (dark) of the run's report.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from launch.exits import Failure, exit_status
from launch.report import main as write_report

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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.screenshots",
        description="Take the documentation's screenshots.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run of configs/demo.toml")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder (default: docs)")
    flags = parser.parse_args(argv)
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
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        status = write_report([run_dir, "--out", str(page)])
        if status:
            return status
        capture(chromium, page, out / "report_desktop.png", width=1280, height=1240)
        capture(chromium, page, out / "report_phone.png", width=390, height=1240, dark=True)
    return 0


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
