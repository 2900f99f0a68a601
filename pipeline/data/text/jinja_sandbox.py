"""Renders untrusted chat templates in jinja2's sandbox, with what transformers adds to it.

The sandbox blocks access to files, processes and attributes, but limits neither time nor memory.
`try_template` adds these limits by rendering once in a child process, which runs this file as a
script; therefore the file imports nothing of the project.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CPU_S = 2
_MEMORY_BYTES = 2**30
_MOST_CHARACTERS = 2**20
_MOST_REASON = 200


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a template up to the beginning of the model's turn, as transformers does.

    Unlike there `strftime_now` is not defined: a row gives the same prompt on every day.

    Args:
        template: the Jinja template.
        variables: `messages`, the turns, and other variables of the template.

    Raises:
        jinja2.TemplateError: if the template is invalid or refuses the messages.
    """
    given = {"tools": None, "documents": None, "add_generation_prompt": True}
    return _compiled(template).render(given | dict(variables))


class _Generation(Extension):
    """`{% generation %}`: marks turns that are trained on, and changes no text."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements up to `{% endgeneration %}`, as a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@lru_cache
def _compiled(template: str) -> Template:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    return sandbox.from_string(template)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: FBT001, FBT002
    """JSON without the escapes of HTML, which jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)


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
    template, variables = json.load(sys.stdin)
    for limit, most in (
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    reason = _reason(template, variables)
    sys.stdout.buffer.write((reason or "").encode("utf-8", "backslashreplace"))
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(_main())
