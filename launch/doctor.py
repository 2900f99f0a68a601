"""Checks whether this host can run a configuration, and says what is missing.

    python -m launch.doctor [CONFIG.toml] [--table.key VALUE ...] [--json FILE]

Takes no device, starts no Ray, downloads no model.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from configs.cli import parse
from configs.load import load_config
from configs.schema import Config
from launch.exits import EXIT_FAILED, exit_status, print_lines, say
from launch.flags import add_json, command_flags, json_file, write_figures

if TYPE_CHECKING:
    from launch.host_checks import Finding, Host

DESCRIPTION = """\
Check this host: versions, TPU chips and who uses them, Ray, memory and disk, clock, model and data,
logins. With CONFIG.toml against what that run needs; it may also be a run folder. The chips are not
taken: `make test-accelerator` computes on them. launch.train --dry-run checks the request itself.
Exit status: 0 the configuration can run, perhaps with notes; 1 it cannot; 2 a mistake in the
request; 130 after Ctrl-C."""
_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    prog = "python -m launch.doctor"
    flags = command_flags()
    add_json(flags)
    command = parse(argv, prog=prog, description=DESCRIPTION, flags=flags, optional=True)
    config = load_config(command.path, command.overrides, say=say) if command.path else None
    file = json_file(command.flags)
    # Imported late: `--help` and mistakes in the configuration need none of it.
    from launch.host_checks import Host

    found = list(examine(Host.of_this_process(), config))
    print_lines(lines(found))
    checks = [asdict(one) for one in found]
    figures = {"config": command.path or None, "can_run": can_run(found), "checks": checks}
    write_figures(file, figures)
    return 0 if can_run(found) else EXIT_FAILED


def examine(host: Host, config: Config | None) -> Iterator[Finding]:
    """Makes all checks of a host.

    Args:
        host: this one, or an imitated one.
        config: of the run; None: only checks that need none.
    """
    from launch import host_checks, run_checks

    yield host_checks.packages(host, config)
    if config is None or config.plan.platform == "tpu":
        yield from host_checks.tpu_checks(host, config)
    yield run_checks.clock(config)
    if config is None:
        memory = f"{host.memory_bytes / 2**30:.1f} GiB available"
        yield host_checks.Finding("memory", "ok", memory)
    else:
        yield from run_checks.run_checks(host, config)
    yield from run_checks.logins(config)


def can_run(found: Sequence[Finding]) -> bool:
    """Whether the findings allow a run."""
    return all(one.state != "fault" for one in found)


def lines(found: Sequence[Finding]) -> Iterator[str]:
    """The findings as a table, and its result in one line."""
    width = max(len(one.check) for one in found)
    wrapper = textwrap.TextWrapper(_WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * (width + 9)
    for one in found:
        state = one.state.upper() if one.state == "fault" else one.state
        wrapper.initial_indent = f"{state:<7}{one.check:<{width}}  "
        yield wrapper.fill(one.finding)
        wrapper.initial_indent = wrapper.subsequent_indent
        if one.remedy:
            yield wrapper.fill(f"-> {one.remedy}")
    faults, notes = (sum(one.state == state for one in found) for state in ("fault", "note"))
    yield ""
    if faults:
        yield f"{faults} fault(s), {notes} note(s): the configuration cannot run on this host yet"
    else:
        yield f"no fault, {notes} note(s): nothing here prevents a run"


if __name__ == "__main__":
    sys.exit(main())
