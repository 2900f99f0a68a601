"""Evaluates base and tuned policy in one run, by the protocol of the configuration.

    python -m launch.evaluate RUN_DIR[@STEP|@best|@last] [--json FILE]
    python -m launch.evaluate CONFIG.toml [--json FILE]

This process never imports JAX, which would take the devices from the samplers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.cli import parse
from configs.load import AS_TRAINED, config_to_json, read_saved_config
from configs.resume import diff_configs
from configs.schema import Config
from launch.exits import Failure, exit_status
from launch.flags import add_json, command_flags, json_file
from launch.versions import MEANING, METAVAR, read_policy

if TYPE_CHECKING:
    from actors.groups import SamplerActors
    from actors.handles import ScorerHandle
    from pipeline.data.splits import LoadedSplit
    from pipeline.data.text.tokenizer import Tokenizer
    from pipeline.evaluate.measurement import Measured
    from pipeline.plan.sizes import Sizes

DESCRIPTION = """\
Evaluate the base and the tuned policy on the test split and on eval.sets, in one run and on the
same prompts, by the protocol of the run. With CONFIG.toml the base alone, or the adapter of
lora.start as the tuned policy.
Exit status: 0 done, 1 it failed, 2 a mistake in the request, 130 / 143 after Ctrl-C / SIGTERM."""

_BAR_EVERY_S, _LINE_EVERY_S = 0.1, 60.0
"""Intervals of progress on a terminal, and in a file."""


@dataclass(frozen=True)
class Prepared:
    """A validated request, checked as far as possible without devices.

    `config.lora.start` is the adapter to evaluate, which also gives the LoRA's layout; None: only
    the base is evaluated. `result` is the file of the result; None: it is only shown. `notes` are
    differences between the settings of training and of this evaluation.
    """

    config: Config
    sizes: Sizes
    tokenizer: Tokenizer
    tests: Mapping[str, LoadedSplit]
    result: Path | None
    notes: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: run(prepare(argv)))


def prepare(argv: Sequence[str] | None) -> Prepared:
    """Reads the arguments, checks everything and prints which prompts were found.

    Raises:
        FileNotFoundError: if model, tokenizer, data or adapter are missing.
        ValueError: with the mistakes in them, in words for the user.
    """
    flags = command_flags()
    add_json(flags, default="a file in the run folder's evaluations/, if there is a run")
    command = parse(
        argv,
        prog="python -m launch.evaluate",
        description=DESCRIPTION,
        flags=flags,
        argument=f"{METAVAR}|CONFIG.toml",
        meaning=f"{MEANING}; or a configuration, for its base",
    )
    config, version = read_policy(command.path, (*AS_TRAINED, *command.overrides))
    run, adapter = None, config.lora.start
    if version is not None:
        run, adapter = version.run, str(version.adapter)
    result = json_file(command.flags)
    # Imported late: `--help` and mistakes in the configuration need none of it.
    from launch.preparation import open_model_files
    from launch.reward_columns import check_columns
    from pipeline.data.load import load_tests, setting_name
    from pipeline.data.splits import EVAL_SET_PREFIX, report_lines
    from pipeline.data.text.prompts import PromptMaker
    from pipeline.evaluate.metric import check_references, with_metric
    from pipeline.plan.search.fitting import first_sizes
    from pipeline.run.run_folder import RunFolder
    from rewards.processes.host import check

    if result is None and run is not None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        result = run / "evaluations" / f"{stamp}.json"
    tokenizer = open_model_files(config)
    sizes = first_sizes(config, RunFolder.of(config).plan)
    splits = load_tests(config, PromptMaker(config.prompt, tokenizer))
    saved = None if run is None else RunFolder(run).saved_config
    config = with_metric(config, splits, saved=saved)
    check_references(config, {setting_name(name): split for name, split in splits.items()})
    if config.uses_rewards:
        check_columns(check(config.rewards), splits.items())
    tests = {name.removeprefix(EVAL_SET_PREFIX): split for name, split in splits.items()}
    for name, split in tests.items():
        for line in report_lines(f"{name}: {len(split.prompts)} prompts", split):
            print(line, flush=True)
    notes = () if run is None else _notes(config, run)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"start": adapter})})
    return Prepared(config, sizes, tokenizer, tests, result, notes)


def _notes(config: Config, folder: Path) -> tuple[str, ...]:
    """Differences between the settings of training and of this evaluation."""
    trained = read_saved_config(folder / "config.json")
    changes = diff_configs(trained, json.loads(config_to_json(config)))
    rewards = ("rewards.functions.", "rollout.overlong") if config.uses_rewards else ()
    return tuple(
        f"{key} is {now!r}; the run was trained with {then!r}"
        for key, then, now in changes
        if key.startswith(("prompt.", "model.", *rewards))
    )


def run(prepared: Prepared) -> int:
    """Evaluates, shows and writes the result; returns the exit status."""
    from actors.groups import SamplerActors, spawn_scorer
    from launch.cluster import with_actors
    from pipeline.protocols import OutOfMemory

    config = prepared.config

    async def work(actors: SamplerActors) -> tuple[Measured, Measured | None]:
        scorer = spawn_scorer(config) if config.uses_rewards else None
        try:
            return await _measure(actors, prepared, scorer)
        finally:
            if scorer is not None:
                scorer.kill()

    try:
        base, tuned = with_actors(
            lambda: SamplerActors.spawn(config), work, config=config, learner=False
        )
    except OutOfMemory as error:
        raise Failure(f"{error}; reduce --plan.slots") from None
    _report(prepared, base, tuned)
    return 0


async def _measure(
    actors: SamplerActors, prepared: Prepared, scorer: ScorerHandle | None
) -> tuple[Measured, Measured | None]:
    """Returns the measurements of the base and of the tuned policy, if there is one.

    Raises:
        ValueError: if rewards, devices, weights, tokenizer or adapter do not match the request.
    """
    from tqdm import tqdm

    from pipeline.evaluate.measurement import measure, open_adapter

    config, adapter = prepared.config, prepared.config.lora.start
    try:
        if scorer is not None:
            await scorer.start()
        await actors.start(prepared.sizes)
        # Before the base is evaluated for minutes.
        opened = await open_adapter(actors.samplers, adapter)
    except (ValueError, FileNotFoundError) as mistake:
        raise ValueError(str(mistake).removeprefix("lora.start: ")) from mistake
    print(f"evaluating the base{f' and {opened.what}' if adapter else ''}", flush=True)
    prompts = {name: split.prompts for name, split in prepared.tests.items()}
    total = (1 if adapter is None else 2) * config.eval.samples * sum(map(len, prompts.values()))

    async def measure_policy(path: str | None) -> Measured:
        return await measure(
            actors.samplers,
            prompts,
            config=config,
            tokenizer=prepared.tokenizer,
            path=path,
            advance=progress.update,
            scorer=scorer,
        )

    every_s = _BAR_EVERY_S if sys.stderr.isatty() else _LINE_EVERY_S
    with tqdm(total=total, unit="answer", mininterval=every_s) as progress:
        base = await measure_policy(None)
        return base, None if adapter is None else await measure_policy(adapter)


def _report(prepared: Prepared, base: Measured, tuned: Measured | None) -> None:
    """Prints the result and writes it and each answer, if there is a file for it."""
    from pipeline.evaluate.comparison import answer_rows, document, lines
    from pipeline.evaluate.protocol import data_facts, protocol
    from pipeline.run.record_files import write_atomically

    data = prepared.config.data
    sources = {"test": data.test} | {source.name: source for source in prepared.config.eval.sets}
    result = document(
        protocol=protocol(prepared.config),
        data={name: data_facts(sources[name], split) for name, split in prepared.tests.items()},
        base=base,
        tuned=tuned,
        notes=prepared.notes,
    )
    print()
    for line in lines(result):
        print(line)
    if prepared.result is None:
        print("\n--json FILE writes this result and each answer")
        return
    answers = prepared.result.with_suffix(".answers.jsonl")
    prepared.result.parent.mkdir(exist_ok=True)
    rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in answer_rows(base, tuned))
    write_atomically(answers, "".join(rows).encode())
    text = json.dumps({**result, "answers": answers.name}, indent=2, ensure_ascii=False)
    write_atomically(prepared.result, f"{text}\n".encode())
    print(f"\n{prepared.result}\n{answers}")


if __name__ == "__main__":
    sys.exit(main())
