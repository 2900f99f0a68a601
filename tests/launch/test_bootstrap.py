"""`launch/bootstrap.sh`, with fake interpreters and installers.

`tests/clean_root.sh` runs them with the real ones in a new Debian.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("bootstrap.sh", "make_venv.sh")
TOOLS = ["sh", "cat", "chmod", "cp", "dirname", "find", "mkdir", "rm", "sed", "touch"]
UV = "uv python install 3.12"

# Answers the probe of make_venv.sh, and makes environments whose python logs its arguments.
PYTHON = """#!/bin/sh
if [ "$1" = -I ]; then
    echo "$0"
elif [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    printf '#!/bin/sh\\n[ "$1" = -I ] || echo "$@" >>"{log}"\\n' >"$3/bin/python"
    chmod +x "$3/bin/python"
fi
"""
# Installs a Python where the real one does, with the commands that the scripts call.
INSTALLER = """case "$*" in
"python install 3.12") ;;
"python find 3.12") echo "{home}/python3.12" ;;
*) exit 9 ;;
esac"""


class Host:
    """A copy of the scripts and an empty PATH; `home` has a Python that is not on it."""

    def __init__(self, folder: Path) -> None:
        self.project, self.bin, self.home = folder / "project", folder / "bin", folder / "home"
        self.log = folder / "log"
        for path in (self.project / "launch", self.bin, self.home):
            path.mkdir(parents=True)
        for name in SCRIPTS:
            shutil.copy(ROOT / "launch" / name, self.project / "launch" / name)
        for name in ("pyproject.toml", "requirements.txt", "requirements-tpu.txt"):
            (self.project / name).touch()
        for name in TOOLS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        python = self.home / "python3.12"
        python.write_text(PYTHON.replace("{log}", str(self.log)), encoding="utf-8")
        python.chmod(0o755)

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text.replace('{home}', str(self.home))}\n", encoding="utf-8")
        path.chmod(0o755)

    def has_python(self, name: str = "python3.12") -> None:
        shutil.copy(self.home / "python3.12", self.bin / name)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Runs the script; returns its status and output. `log` then has what its python did."""
        self.log.write_text("")
        done = subprocess.run(
            ["/bin/sh", str(self.project / "launch/bootstrap.sh"), *arguments],
            cwd=self.project.parent,
            env={"PATH": str(self.bin)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def steps(self) -> list[str]:
        """What the environment's python was called for, without pip's own options."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        quiet = "pip install --quiet --disable-pip-version-check --require-virtualenv "
        return [line.removeprefix("-m ").removeprefix(quiet) for line in lines]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


INSTALLED = ["--requirement requirements.txt", "--no-deps --editable ."]


def test_an_environment_is_made_and_the_doctor_asked(host: Host) -> None:
    host.has_python()
    assert host.run("my.toml")[0] == 0
    # Paths are relative to the folder of the command.
    doctor = f"launch.doctor {host.project.parent}/my.toml"
    assert host.steps() == [*INSTALLED, doctor]
    status, shown = host.run("--tpu", "my.toml")
    assert (status, host.steps()) == (0, ["--requirement requirements-tpu.txt", doctor])
    assert shown.splitlines()[-1].endswith("make test-accelerator")


def test_a_missing_python_needs_consent(host: Host) -> None:
    host.program("uv", INSTALLER)
    status, shown = host.run()
    assert status == 1
    assert f"This installs a Python:\n  {UV}\n" in shown
    assert not (host.project / ".venv").exists()
    status, shown = host.run("--yes")
    assert (status, host.steps()) == (0, [*INSTALLED, "launch.doctor"]), shown
    assert UV in shown.splitlines()


def test_wheels_are_installed_without_an_index_by_their_python(host: Host) -> None:
    wheels = host.project.parent / "my wheels"
    wheels.mkdir()
    host.has_python("python3.11")
    host.has_python("python3.12")
    status, shown = host.run("--wheels", "my wheels")
    assert (status, "has no wheels for Python" in shown) == (1, True)
    (wheels / "numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert host.run("--wheels", "my wheels")[0] == 0
    assert (host.project / ".venv/.python").read_text() == f"{host.bin}/python3.11\n"
    offline = f"--no-index --find-links {wheels} "
    assert host.steps() == [*(offline + step for step in INSTALLED), "launch.doctor"]
