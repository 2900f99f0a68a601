"""Exports a run's policy: merged model, PEFT adapter or flax checkpoint.

    python -m launch.export RUN_DIR[@STEP|@best|@last] --out DIR [--format hf|peft|orbax ...]
                            [--push hf://USER/NAME]

This process never imports JAX, which would take the devices from the exporter.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.base import scheme_problem
from configs.cli import parse
from configs.model import FORMATS, Format
from configs.schema import Config
from launch.exits import Failure, exit_status
from launch.flags import command_flags
from launch.push import check_push, push
from launch.versions import MEANING, METAVAR, find_version
from pipeline.data.models.model_source import HF_LOG_IN

if TYPE_CHECKING:
    from actors.handles import ExporterHandle
    from pipeline.types import Completion

DESCRIPTION = """\
Export a run's policy: hf, the merged model as a Hugging Face folder; peft, the adapter in adapter/;
orbax, the merged model as a flax checkpoint in flax/. Each format is loaded back and compared with
the policy before it is put in place. It takes one device of the run's kind (--plan.platform cpu:
none).
--push uploads it with its model card to the Hugging Face hub.
Exit status: 0 done, 1 it failed, the export differs from the policy or was not pushed, 2 a mistake
in the request, 130 / 143 after Ctrl-C / SIGTERM."""

ONE_DEVICE = {
    "placement": "colocated",
    "learner_devices": 1,
    "samplers": None,
    "sampler_devices": None,
    "fsdp": 1,
    "tp": 1,
    "sampler_tp": None,
}
"""Settings of `[plan]`."""


@dataclass(frozen=True)
class Prepared:
    """A validated request, checked as far as possible without devices.

    `adapter` is the folder of the checkpoint, `out` that of the export. Log-probs of `examples`
    verify it; without a `repository` (`USER/NAME`) it is not pushed.
    """

    config: Config
    adapter: Path
    out: Path
    formats: tuple[Format, ...]
    examples: tuple[Completion, ...]
    repository: str | None
    private: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: run(prepare(argv)))


def _check_push(flags: argparse.Namespace) -> str | None:
    """The repository of `--push`; see `check_push`."""
    if flags.push is None:
        if flags.public:
            raise ValueError("command line: --public has no effect without --push")
        return None
    return check_push(flags.push)


def _flags() -> argparse.ArgumentParser:
    flags = command_flags()
    flags.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="folder to write to; must be empty or not exist",
    )
    flags.add_argument(
        "--format",
        nargs="+",
        choices=FORMATS,
        default=["hf", "peft"],
        help="formats to write (default: hf peft)",
    )
    flags.add_argument(
        "--push",
        metavar="hf://USER/NAME",
        help="upload the export to this model repository, which is made if it does not exist, as a "
        "private one; one that exists stays private or public, and its weights of an earlier "
        f"export are replaced; needs {HF_LOG_IN}",
    )
    flags.add_argument(
        "--public", action="store_true", help="with --push: a repository that is made is public"
    )
    return flags


def prepare(argv: Sequence[str] | None) -> Prepared:
    """Reads the arguments and checks all that can be checked without devices.

    Raises:
        FileNotFoundError: if run, version, model or tokenizer are missing.
        ValueError: with the mistakes in them, in words for the user.
    """
    command = parse(
        argv,
        prog="python -m launch.export",
        description=DESCRIPTION,
        flags=_flags(),
        argument=METAVAR,
        meaning=MEANING,
    )
    flags, version = command.flags, find_version(command.path)
    config, repository = version.config(command.overrides), _check_push(flags)
    # Imported late: `--help` and mistakes in the configuration need none of it.
    from launch.preparation import open_model_files
    from pipeline.evaluate.examples import recorded_examples
    from pipeline.run.run_folder import RunFolder

    problem = scheme_problem(flags.out)
    if problem is not None:
        raise ValueError(f"command line: --out {flags.out}: {problem}")
    out = Path(flags.out).absolute()
    parent = next(path for path in out.parents if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(f"--out {flags.out}: {parent} is not a writable folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {flags.out}: exists and is not an empty folder")
    folder, tokenizer = RunFolder.of(config), open_model_files(config)
    examples = recorded_examples(folder, tokenizer, max_tokens=config.rollout.max_tokens)
    if not examples:
        raise ValueError(
            f"{folder.rollouts} holds no texts on which export and policy could be compared; put "
            "the run's rollouts back"
        )
    formats = tuple(kind for kind in FORMATS if kind in flags.format)
    private = not flags.public
    return Prepared(config, version.adapter, out, formats, examples, repository, private)


def working_config(prepared: Prepared) -> Config:
    """Returns the run's configuration for one device, with the checkpoint as `lora.start`."""
    config = prepared.config
    plan = config.plan.model_copy(update=ONE_DEVICE | {"micro_batch_tokens": 8 * config.row_tokens})
    lora = config.lora.model_copy(update={"start": str(prepared.adapter)})
    return config.model_copy(update={"plan": plan, "lora": lora})


def run(prepared: Prepared) -> int:
    """Writes, verifies and pushes the export; returns the exit status."""
    from actors.groups import ExportActors
    from launch.cluster import with_actors

    config = working_config(prepared)

    def spawn() -> ExportActors:
        return ExportActors.spawn(config, described=prepared.config, examples=prepared.examples)

    try:
        with_actors(spawn, lambda actors: _write(actors.exporter, prepared), config=config)
    except (ValueError, FileNotFoundError) as mistake:
        raise ValueError(str(mistake).removeprefix("lora.start: ")) from mistake
    except RuntimeError as error:
        raise Failure(error) from error
    finally:
        shutil.rmtree(f"{prepared.out}.tmp", ignore_errors=True)
    if prepared.repository:
        title = f"{prepared.config.run.name}, checkpoint {prepared.adapter.name}"
        push(prepared.out, prepared.repository, private=prepared.private, title=title)
    return 0


async def _write(exporter: ExporterHandle, prepared: Prepared) -> None:
    print(f"exporting {await exporter.start()}", flush=True)
    report = await exporter.export(str(prepared.out), prepared.formats)
    result = "written, not verified"
    if prepared.examples:
        result = "written and loaded back: identical values"
    if report.mean_difference:
        result = (
            f"written and loaded back: log-probs of {report.tokens} tokens differ by "
            f"{report.mean_difference:.1e} on average"
        )
    print(f"{', '.join(prepared.formats)}: {result}")
    print(f"exported: {prepared.out}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
