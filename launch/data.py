"""Shows the data that a run will read: rows, exact tokens, lengths, dropped rows.

    python -m launch.data CONFIG.toml [--table.key VALUE ...]

Needs the tokenizer only: no weights, no devices, no JAX.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

from configs.cli import parse
from configs.load import load_config
from configs.schema import Config
from launch.exits import exit_status, print_lines

DESCRIPTION = """\
Show what the model will see: tokens of the first prompt of each split, lengths, dropped rows with
the reason, and how many are repeated or in a later split. CONFIG.toml may also be a run folder.
Exit status: 0 done, 2 a mistake in the request or data that a run refuses, 130 after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: _show(argv))


def _show(argv: Sequence[str] | None) -> int:
    prog = "python -m launch.data"
    command = parse(argv, prog=prog, description=DESCRIPTION)
    config = load_config(command.path, command.overrides)
    width = shutil.get_terminal_size(fallback=(100, 24)).columns
    print_lines(_lines(config, width=width))
    return 0


def _lines(config: Config, *, width: int) -> Iterator[str]:
    """Yields the report line by line, up to the first mistake.

    Raises:
        FileNotFoundError: if tokenizer or data are missing.
        ValueError: for data that a run would refuse.
    """
    # Imported late: `--help` and mistakes in the configuration need none of it.
    from pipeline.data.inspection import demonstration_lines, split_lines
    from pipeline.data.load import load_splits, make_disjoint
    from pipeline.data.references import reference_notices
    from pipeline.data.text.prompts import PromptMaker
    from pipeline.data.text.tokenizer_files import open_tokenizer
    from pipeline.evaluate.notices import data_notices

    # Malformed rows are shown, and refused at the end.
    lenient = config.model_copy(
        update={"data": config.data.model_copy(update={"malformed": "skip"})}
    )
    maker = PromptMaker(config.prompt, open_tokenizer(config.model))
    rollout, tokenizer = config.rollout, maker.tokenizer
    splits = load_splits(lenient, maker)
    for name, split in splits.items():
        yield from split_lines(name, split, rollout=rollout, tokenizer=tokenizer, width=width)
        yield ""
    data = make_disjoint(splits, config=lenient, maker=maker)
    if data.sft is not None:
        yield from demonstration_lines(data.sft, rollout=rollout, tokenizer=tokenizer, width=width)
        yield ""
    yield "what a run reads:"
    yield from data.report
    for notice in reference_notices(config, data):
        yield f"note: {notice.what}; {notice.advice}"
    yield from (f"note: {line}" for line in data_notices(config, data.train.prompts))
    bad = [name for name, split in data.splits() if split.malformed]
    bad += ["sft"] if data.sft is not None and data.sft.malformed else []
    if bad and config.data.malformed == "refuse":
        raise ValueError(
            f"a run would refuse the malformed rows of {', '.join(bad)}; fix them, or drop them "
            'with data.malformed = "skip"'
        )


if __name__ == "__main__":
    sys.exit(main())
