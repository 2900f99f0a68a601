"""Steers a running run: asks its process for a checkpoint, another learning rate, more time.

    python -m launch.control RUN_DIR checkpoint | evaluate | export | stop-after-step
    python -m launch.control RUN_DIR set KEY VALUE
    python -m launch.control RUN_DIR extend AMOUNT

The request is a line in `control.jsonl` in the run folder. The run takes it up between two steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launch.exits import Failure, exit_status
from launch.flags import Parser

if TYPE_CHECKING:
    from pipeline.contracts.steering import Request, Verb
    from pipeline.run.run_folder import RunFolder

DESCRIPTION = """\
Steer a run while it runs. The command leaves a request in the run folder, waits until the run has
taken it up between two steps, and says at which step. The journal of the run records it, and a
resumed run repeats it at the same step.

  checkpoint       write a checkpoint
  evaluate         validate the current version now
  export           write the current version to exports/step_NNNNNN in the run folder; export/ stays
                   the best version, which the run replaces itself
  stop-after-step  end as after Ctrl-C (checkpoint, exit status 130); the command that started the
                   run resumes it
  set KEY VALUE    change a setting from the next step on; VALUE as on the command line of
                   launch.train. The command that started the run resumes it with the new value
  extend AMOUNT    extend the budget, by steps (50) or time (1h)

Keys of set:
"""
EPILOG = """\
Exit status: 0 the run has taken the request up (with --no-wait: the request is there), 1 the run
refused it or ended before, 2 a mistake in the request, 130 after Ctrl-C: the request remains."""
_POLL_S = 0.2
_ARGUMENTS = {"set": ("KEY", "VALUE"), "extend": ("AMOUNT",)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: prepare(argv), run)


@dataclass(frozen=True)
class Prepared:
    """A valid request to a running run.

    Attributes:
        folder: of the run.
        verb: what to do.
        key: set: the key.
        value: set: the value; extend: the amount as text.
        waits: whether to wait until the run has taken it up.
    """

    folder: RunFolder
    verb: Verb
    key: str | None
    value: Any
    waits: bool


def prepare(argv: Sequence[str] | None) -> Prepared:
    """Checks the request; nothing is written.

    Raises:
        ValueError: if there is no such run, or no process runs it; if it cannot do this.
        FileNotFoundError: if there is no such folder.
    """
    flags = _parse(sys.argv[1:] if argv is None else argv)
    # Imported late: `--help` needs none of it.
    from configs.load import load_config
    from configs.steering import parse_value
    from pipeline.contracts.steering import VERBS, Request
    from pipeline.control.steering import check

    if flags.verb not in VERBS:
        (nearest,) = get_close_matches(flags.verb, VERBS, n=1, cutoff=0.0)
        raise ValueError(f"command line: {flags.verb}: unknown; did you mean {nearest}?")
    verb = cast("Verb", flags.verb)
    names = _ARGUMENTS.get(verb, ())
    if len(flags.values) != len(names):
        needs = " ".join((verb, *names))
        given = " ".join((verb, *flags.values))
        raise ValueError(f"command line: {given}: the arguments are {needs}")
    folder = _running(flags.run)
    key = flags.values[0] if verb == "set" else None
    value: Any = flags.values[-1] if names else None
    value = parse_value(value) if verb == "set" else value
    check(Request("", verb, key, value), load_config(flags.run))
    return Prepared(folder, verb, key, value, waits=not flags.no_wait)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; those of a verb may begin with a minus sign.

    Raises:
        ValueError: with a line.
    """
    options = [one for one in argv if one.startswith("--") or one == "-h"]
    positional = [one for one in argv if one not in options]
    return _parser().parse_args([*options, "--", *positional])


def _parser() -> argparse.ArgumentParser:
    from configs.steering import steerable_lines

    keys = "\n".join(steerable_lines())
    parser = Parser(
        prog="python -m launch.control",
        usage="%(prog)s RUN_DIR VERB [KEY VALUE | AMOUNT] [--no-wait]",
        description=DESCRIPTION + keys,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the run folder")
    parser.add_argument("verb", metavar="VERB", help="what to do, see above")
    parser.add_argument(
        "values", metavar="...", nargs="*", help="KEY VALUE of set, AMOUNT of extend"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="do not wait until the run has taken the request up"
    )
    return parser


def _running(path: Path) -> RunFolder:
    """The run folder, if a process runs the run.

    Raises:
        ValueError: if there is no run, it is finished, or no process runs it.
        FileNotFoundError: if there is no such folder.
    """
    from configs.base import nearest_hint
    from pipeline.run.run_folder import RunFolder

    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such run folder{nearest_hint(path)}")
    folder = RunFolder(path)
    if folder.is_locked and not folder.holds_run:
        raise ValueError(
            f"{path}: the run starts for the first time ({_phase(folder)}); try again "
            "when it trains"
        )
    if not folder.holds_run:
        raise ValueError(f"{path}: not a run folder: it has no config.json")
    if not folder.is_locked:
        summary = folder.summary
        if summary is not None and summary["ended"] == "finished":
            raise ValueError(
                f"{path}: the run has finished after {summary['steps']} steps; launch.train with "
                "--extend continues it"
            )
        raise ValueError(
            f"{path}: no process runs this run; resume it with the command that started it, and "
            "then give this command: while the run loads it takes effect before the next step"
        )
    return folder


def _phase(folder: RunFolder) -> str:
    """What the run does, in words."""
    from pipeline.run.status import phase_words

    try:
        return phase_words(json.loads(folder.status.read_bytes())["phase"])
    except (OSError, ValueError, KeyError):  # not written yet
        return phase_words("loading")


def run(prepared: Prepared) -> int:
    """Leaves the request in the run folder, and waits for the run."""
    from pipeline.run.requests import append_request

    request = append_request(
        prepared.folder.path, prepared.verb, key=prepared.key, value=prepared.value
    )
    if not prepared.waits:
        print("requested; the run takes it up after the step that it trains now")
        return 0
    entry = _wait(prepared.folder, request)
    from pipeline.contracts.steering import described

    if "refused" in entry:
        raise Failure(described(entry))
    print(described(entry))
    return 0


def _waiting(folder: RunFolder) -> str:
    return (
        "the run takes the request up between two steps; now it is "
        f"{_phase(folder)}. Ctrl-C does not withdraw the request"
    )


def _wait(folder: RunFolder, request: Request) -> Mapping[str, Any]:
    """The journal entry that answers the request.

    Raises:
        Failure: if the run ends without it.
    """
    from pipeline.run.requests import answer

    began, terminal = time.monotonic(), sys.stderr.isatty()
    if not terminal:
        print(_waiting(folder), file=sys.stderr, flush=True)
    while True:
        runs = folder.is_locked  # before the journal is read: its last entry may be the answer
        entry = answer(folder.entries(), request)
        if terminal:
            shown = "" if entry else f"{time.monotonic() - began:.0f} s: {_waiting(folder)}"
            print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
        if entry is not None:
            return entry
        if not runs:
            raise Failure(
                "the run has ended without taking the request up; its next start does, after the "
                "requests that it repeats"
            )
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
