"""Renders untrusted chat templates in transformers' sandbox.

The sandbox blocks access to files, processes and attributes, but limits neither time nor memory.
`try_template` adds these limits by rendering once in a child process, which runs this file as a
script; therefore the file imports nothing of the project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

_CPU_S = 2
_MEMORY_BYTES = 2**30
_MOST_CHARACTERS = 2**20
_MOST_REASON = 200


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a template up to the beginning of the model's turn, without the current time.

    A row therefore gives the same prompt on every day.

    Args:
        template: the Jinja template.
        variables: `messages`, the turns, and other variables of the template.

    Raises:
        jinja2.TemplateError: if the template is invalid or refuses the messages.
    """
    # Late: the import takes seconds. Without torch it would print a warning.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from jinja2 import Undefined
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {name: value for name, value in variables.items() if name != "messages"}
    (text,), _ = render_jinja_template(
        [variables["messages"]],
        chat_template=template,
        add_generation_prompt=True,
        strftime_now=Undefined(name="strftime_now"),
        **named,
    )
    return str(text)


def try_template(template: str, variables: Mapping[str, Any]) -> None:
    """Compiles and renders a template in a child process with 2 s of CPU time and 1 GiB of memory.

    Raises:
        ValueError: with the reason, if it fails.
    """
    child = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps([template, variables]).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if child.returncode == 0:
        return
    reason = child.stdout.decode("utf-8", "replace")
    if child.returncode < 0:
        reason = f"it takes more than {_CPU_S} s of CPU time, or crashes Python"
    raise ValueError(reason or f"Python exits with status {child.returncode}")


def _reason(template: str, variables: Mapping[str, Any]) -> str | None:
    """The reason why the template cannot be rendered; None if it can."""
    try:
        text = render_template(template, variables)
        text.encode()
    except MemoryError:
        return "it takes more than 1 GiB of memory"
    except Exception as error:  # noqa: BLE001  # templates may raise anything
        return describe(error)
    if len(text) > _MOST_CHARACTERS:
        return f"it writes {len(text):,} characters, more than {_MOST_CHARACTERS:,}"
    return None


def describe(error: Exception) -> str:
    """A short line that describes an error of a template."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _MOST_REASON else f"{line[:_MOST_REASON]}..."


def _main() -> int:
    import resource

    template, variables = json.load(sys.stdin)
    render_template("", {"messages": []})  # imports what it needs before the limits apply
    cpu_s = int(time.process_time()) + 1 + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    # Beyond what is reserved already: each thread of NumPy's BLAS takes 40 MiB of addresses.
    with open("/proc/self/statm", encoding="ascii") as sizes:  # noqa: PTH123
        most = int(sizes.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reason = _reason(template, variables)
    sys.stdout.buffer.write((reason or "").encode("utf-8", "backslashreplace"))
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(_main())
