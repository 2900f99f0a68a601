"""Renders untrusted chat templates in transformers' sandbox.

The sandbox blocks access to files, processes and attributes, but limits neither time nor memory.
`check_limits` does, in a child process, which runs this file as a script; therefore the file
imports nothing of the project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_CPU_S = 2
_MEMORY_BYTES = 2**30
_MOST_CHARACTERS = 2**20


def render_template(
    template: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]
) -> str:
    """Renders a template up to the beginning of the model's turn.

    Without the current time: a row gives the same prompt every day.

    Raises:
        jinja2.TemplateError: if the template is invalid or refuses the messages.
    """
    # Late: the import takes seconds. Without torch it would print a warning.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from jinja2 import Undefined
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [messages],
        chat_template=template,
        add_generation_prompt=True,
        strftime_now=Undefined(name="strftime_now"),
        **variables,
    )
    return str(text)


def check_limits(
    template: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]
) -> None:
    """Renders a template with 2 s of CPU time and 1 GiB of memory for at most 2**20 characters.

    Raises:
        ValueError: if that is not enough. Other errors are those of `render_template`.
    """
    child = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps([template, messages, variables]).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if child.returncode != 0:
        raise ValueError(f"it takes more than {_CPU_S} s of CPU time, or crashes Python")
    if child.stdout:
        raise ValueError(child.stdout.decode())


def _main() -> None:
    import resource

    template, messages, variables = json.load(sys.stdin)
    render_template("", [], {})  # imports what it needs before the limits apply
    cpu_s = int(time.process_time()) + 1 + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    # Beyond what is reserved already: each thread of NumPy's BLAS takes 40 MiB of addresses.
    with open("/proc/self/statm", encoding="ascii") as sizes:  # noqa: PTH123
        most = int(sizes.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        count = len(render_template(template, messages, variables))
    except MemoryError:
        sys.stdout.write("it takes more than 1 GiB of memory")
    else:
        if count > _MOST_CHARACTERS:
            sys.stdout.write(f"it writes {count:,} characters, more than {_MOST_CHARACTERS:,}")


if __name__ == "__main__":
    with suppress(Exception):  # the parent, which renders it next, reports it
        _main()
