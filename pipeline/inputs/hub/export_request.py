"""What an export of a run is made of: which checkpoint, which formats, what it is compared on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contracts.record_files import DamagedFileError
from pipeline.contracts.rollouts import Completion, RolloutName
from pipeline.inputs.text.tokenizer import Tokenizer
from pipeline.run.run_folder import RunFolder

_EXAMPLES = 8
"""Texts whose log-probs are compared."""


def find_checkpoint(folder: RunFolder, which: str | None) -> Path:
    """Where the adapter of a run is that `which` means.

    Args:
        folder: the run's.
        which: `best` (by validation), `last`, or a step; None: the best if one was kept, else the
            last.

    Raises:
        FileNotFoundError: naming the checkpoints that there are.
    """
    there = folder.checkpoints.iterdir() if folder.checkpoints.is_dir() else ()
    names = {path.name for path in there if path.is_dir()}
    steps = sorted((name for name in names if name.isdecimal()), key=int)
    names = {"best"} & names | set(steps)
    if steps:
        names.add("last")
    wanted = which or ("best" if "best" in names else "last")
    if wanted not in names:
        found = f"there are {', '.join(sorted(names))}" if names else "there is none yet"
        raise FileNotFoundError(f"{folder.path} has no checkpoint {wanted}; {found}")
    return folder.checkpoints / (steps[-1] if wanted == "last" else wanted)


def find_examples(
    folder: RunFolder, tokenizer: Tokenizer, *, max_tokens: int
) -> tuple[Completion, ...]:
    """Texts that the run drew, as completions of the empty prompt; only tokens are looked at.

    Args:
        folder: the run's.
        tokenizer: the model's.
        max_tokens: the longest sequence that can be scored.

    Raises:
        ValueError: if there are none.
    """
    steps = sorted(path.stem for path in folder.rollouts.glob("step_*.jsonl"))
    for name in ("test_after", "test_before", *reversed(steps)):
        rows: list[dict[str, Any]] = []
        with suppress(DamagedFileError):  # another file serves as well
            rows = folder.read_rollouts(name)
        texts = [row["text"] for row in rows if row["text"]][:_EXAMPLES]
        if texts:
            return tuple(
                _completion(number, tokenizer, tokenizer.encode(text)[: max_tokens - 1])
                for number, text in enumerate(texts)
            )
    raise ValueError(
        f"{folder.rollouts} holds no texts on which export and policy could be compared; "
        "--no-verify exports without"
    )


def _completion(number: int, tokenizer: Tokenizer, tokens: np.ndarray) -> Completion:
    return Completion(
        name=RolloutName("export", 0, prompt_id=number, sample=0),
        prompt_tokens=np.asarray([tokenizer.bos_id], np.int32),
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        stop_reason="length",
        version=0,
        adapter_sha256="",
    )
