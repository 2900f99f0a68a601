"""Asks a run's base and tuned policy the same questions and shows the answers side by side.

    python -m launch.chat RUN_DIR[@STEP|@best|@last] [--question TEXT ...] [--temperature T]
    python -m launch.chat CONFIG.toml [--question TEXT ...] [--temperature T]

This process never imports JAX, which would take the devices from the sampler.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from configs.cli import parse
from configs.load import AS_TRAINED
from configs.schema import Config
from launch.exits import EXIT_MISTAKE, exit_status
from launch.flags import command_flags
from launch.versions import MEANING, METAVAR, read_policy

if TYPE_CHECKING:
    import asyncio

    from pipeline.data.text.prompts import PromptMaker
    from pipeline.evaluate.conversation import Conversation

DESCRIPTION = """\
Ask the base and the tuned policy of a run the same questions, with the run's own prompt, and show
the answers side by side; with CONFIG.toml the base alone. Questions come from --question, or else
from the terminal or standard input, one per line; where prompt.template has several columns, a line
is a JSON object of them.
Exit status: 0 done, 1 it failed, 2 a mistake in the request, 130 after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: _command(argv))


def _flags() -> argparse.ArgumentParser:
    flags = command_flags()
    flags.add_argument(
        "--question",
        metavar="TEXT",
        action="append",
        help="ask this question and end; can be repeated",
    )
    flags.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="sampling temperature of the answers (default: 0, greedy)",
    )
    return flags


def _command(argv: Sequence[str] | None) -> int:
    command = parse(
        argv,
        prog="python -m launch.chat",
        description=DESCRIPTION,
        flags=_flags(),
        argument=f"{METAVAR}|CONFIG.toml",
        meaning=f"{MEANING}; or a configuration, for its base",
    )
    config, version = read_policy(command.path, (*AS_TRAINED, *command.overrides))
    adapter = None if version is None else str(version.adapter)
    temperature = command.flags.temperature
    if not temperature >= 0:
        raise ValueError(f"command line: --temperature {temperature:g}: must be at least 0")
    return _chat(config, adapter, temperature=temperature, questions=command.flags.question)


def _chat(
    config: Config, adapter: str | None, *, temperature: float, questions: list[str] | None
) -> int:
    # Imported late: `--help` and mistakes in the configuration need none of it.
    import asyncio

    from actors.groups import SamplerActors
    from launch.cluster import cluster, wait_for_devices
    from launch.preparation import open_model_files
    from pipeline.data.text.prompts import PromptMaker
    from pipeline.evaluate.conversation import Conversation
    from pipeline.evaluate.measurement import open_adapter
    from pipeline.plan.sizes import Sizes

    plan = config.plan.model_copy(update={"samplers": config.plan.samplers and 1})
    lora = config.lora.model_copy(update={"start": adapter})  # gives the LoRA's layout, too
    config = config.model_copy(update={"plan": plan, "lora": lora})
    maker = PromptMaker(config.prompt, open_model_files(config))
    with cluster(config, learner=False), asyncio.Runner() as runner:
        actors = SamplerActors.spawn(config)
        try:
            runner.run(wait_for_devices(actors.devices))
            print("Devices acquired; loading weights and compiling.", flush=True)
            # One question at a time.
            sizes = Sizes(plan.sampler_shards, config.row_tokens * plan.learner_shards)
            runner.run(actors.start(sizes))
            if adapter is not None:
                opened = runner.run(open_adapter(actors.samplers, adapter))
                print(f"tuned: {opened.what}", flush=True)
            conversation = Conversation(
                config, maker, actors.samplers, adapter=adapter, temperature=temperature
            )
            return _converse(conversation, maker, runner, questions)
        finally:
            actors.kill()


def _converse(
    conversation: Conversation,
    maker: PromptMaker,
    runner: asyncio.Runner,
    questions: list[str] | None,
) -> int:
    """Asks all questions; returns 2 if a question could not be asked, unless typed by hand."""
    from pipeline.evaluate.conversation import QuestionError, read_question, side_by_side

    status = 0
    for text in _read_questions(questions):
        try:
            values = read_question(text, columns=maker.columns)
            replies = runner.run(conversation.ask(values))
        except QuestionError as mistake:
            print(mistake, file=sys.stderr, flush=True)
            status = EXIT_MISTAKE
            continue
        width = shutil.get_terminal_size(fallback=(100, 24)).columns
        print(f"\n{text}\n")
        for line in side_by_side(replies, width=width):
            print(line)
        print(flush=True)
    return 0 if questions is None and sys.stdin.isatty() else status


def _read_questions(given: list[str] | None) -> Iterator[str]:
    """Yields the given questions, or lines from the terminal or standard input."""
    if given is not None:
        yield from given
    elif sys.stdin.isatty():
        print("type a question; Ctrl-D ends", flush=True)
        while True:
            try:
                text = input("> ")
            except EOFError:
                print()
                return
            if text.strip():
                yield text
    else:
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())


if __name__ == "__main__":
    sys.exit(main())
