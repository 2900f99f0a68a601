"""An evaluation outside of training: what it needs, samplers, progress, where the result goes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from actors.handles import SamplerActors
from configs.load import config_to_json
from configs.paths import home
from configs.resume import diff_configs
from configs.schema import Config
from launch.cluster import cluster, wait_for_devices
from launch.exits import EXIT_FAILED, EXIT_MISTAKE
from launch.output_file import output_file
from launch.preparation import open_model_files
from launch.stop import Stop, Stopped, unless
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.record_files import write_atomically
from pipeline.contracts.sizes import sized
from pipeline.evaluate.comparison import answer_rows, document, lines
from pipeline.evaluate.measurement import Measured, measure, open_adapter
from pipeline.evaluate.protocol import data_facts, protocol
from pipeline.inputs.dataset.load import load_tests
from pipeline.inputs.dataset.rows import report_lines
from pipeline.inputs.dataset.splits import SETS, LoadedSplit
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.inputs.text.tokenizer import Tokenizer
from pipeline.plan.start import first_sizes
from pipeline.run.run_folder import RunFolder

_TOLD = 10
"""Progress is told so many times where there is no terminal."""


@dataclass(frozen=True)
class Prepared:
    """A request that nothing is wrong with, as far as can be told without devices.

    Attributes:
        config: the protocol, and the plan of the samplers.
        tokenizer: the model's.
        tests: the test split and the evaluation sets, by name.
        adapter: where it is; None: only the base is measured.
        result: file of the result; None: it is only shown.
        notes: what should be known beside the numbers.
    """

    config: Config
    tokenizer: Tokenizer
    tests: Mapping[str, LoadedSplit]
    adapter: str | None
    result: Path | None
    notes: tuple[str, ...]


def prepare(
    config: Config, *, checkpoint: str | None, base_only: bool, json_file: str | None
) -> Prepared:
    """Checks everything and says which prompts were found.

    Raises:
        FileNotFoundError: if model, tokenizer, data or adapter are not there.
        ValueError: what is wrong with them, in words for the user.
    """
    folder = RunFolder.of(config).path
    is_run = (folder / "config.json").is_file()
    adapter = _adapter(folder, is_run=is_run, checkpoint=checkpoint, base_only=base_only)
    result = _result(folder, is_run=is_run, json_file=json_file)
    tokenizer = open_model_files(config)
    config = sized(config, first_sizes(config, RunFolder.of(config).plan))
    splits = load_tests(config, PromptMaker(config.prompt, tokenizer))
    tests = {name.removeprefix(SETS): split for name, split in splits.items()}
    for name, split in tests.items():
        for line in report_lines(
            f"{name}: {len(split.prompts)} prompts",
            malformed=split.malformed,
            too_long=len(split.too_long),
            overlaps=split.overlaps,
            duplicates=split.duplicates,
        ):
            print(line, flush=True)
    notes = _notes(config, folder) if is_run and adapter == str(folder) else ()
    # The adapter also says how LoRA is laid out; where training began is of no interest here.
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"start": adapter})})
    return Prepared(config, tokenizer, tests, adapter, result, notes)


def run(prepared: Prepared) -> int:
    """Measures, shows and writes; returns the exit status."""
    return asyncio.run(_run(prepared))


async def _run(prepared: Prepared) -> int:
    config = prepared.config
    stop = Stop(notice="stopping: nothing is written")
    stop.listen()
    try:
        with cluster(config.plan, learner=False):
            stop.listen()
            crew = SamplerActors.spawn(config)
            try:
                await unless(stop, _start(crew, prepared))
                base, tuned = await unless(stop, _measure(crew, prepared))
            finally:
                crew.kill()
    except Stopped:
        return stop.exit_status
    except Refused as refused:
        print(refused, file=sys.stderr)
        return EXIT_MISTAKE
    except OutOfMemory as error:
        print(f"{error}; fewer slots need less: --plan.slots", file=sys.stderr)
        return EXIT_FAILED
    _tell(prepared, base, tuned)
    return 0


class Refused(Exception):  # noqa: N818  # not ours: the user's
    """The samplers found something wrong with the request."""


async def _start(crew: SamplerActors, prepared: Prepared) -> None:
    """Starts the samplers and looks at the adapter, before minutes go into the base.

    Raises:
        Refused: if devices, weights, tokenizer or adapter are not what the request says.
    """
    try:
        await wait_for_devices(crew.devices, prepared.config.plan, learner=False)
        print("devices are here; loading weights and compiling", flush=True)
        await crew.start()
        opened = await open_adapter(crew.samplers, prepared.adapter)
    except (ValueError, FileNotFoundError) as mistake:
        raise Refused(str(mistake).removeprefix("lora.start: ")) from mistake
    print(f"measuring the base{f' and {opened.what}' if prepared.adapter else ''}", flush=True)


async def _measure(crew: SamplerActors, prepared: Prepared) -> tuple[Measured, Measured | None]:
    config = prepared.config
    prompts = {name: split.prompts for name, split in prepared.tests.items()}
    policies = 1 if prepared.adapter is None else 2
    total = policies * config.eval.samples * sum(map(len, prompts.values()))

    async def one(path: str | None, progress: Progress) -> Measured:
        return await measure(
            crew.samplers,
            prompts,
            config=config,
            tokenizer=prepared.tokenizer,
            path=path,
            advance=progress.advance,
        )

    with Progress(total) as progress:
        base = await one(None, progress)
        tuned = None if prepared.adapter is None else await one(prepared.adapter, progress)
    return base, tuned


def _tell(prepared: Prepared, base: Measured, tuned: Measured | None) -> None:
    data = prepared.config.data
    sources = {"test": data.test} | {source.name: source for source in prepared.config.eval.sets}
    found = document(
        protocol=protocol(prepared.config),
        data={name: data_facts(sources[name], split) for name, split in prepared.tests.items()},
        base=base,
        tuned=tuned,
        notes=prepared.notes,
    )
    print()
    for line in lines(found):
        print(line)
    if prepared.result is None:
        print("\n--json FILE keeps this and each answer")
        return
    answers = prepared.result.with_suffix(".answers.jsonl")
    prepared.result.parent.mkdir(exist_ok=True)
    rows = (json.dumps(row, ensure_ascii=False) + "\n" for row in answer_rows(base, tuned))
    write_atomically(answers, "".join(rows).encode())
    text = json.dumps({**found, "answers": answers.name}, indent=2, ensure_ascii=False)
    write_atomically(prepared.result, f"{text}\n".encode())
    print(f"\n{prepared.result}\n{answers}")


class Progress:
    """Answers so far: a bar on a terminal, some plain lines elsewhere.

    Args:
        total: answers to come.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._bar = tqdm(total=total, unit="answer") if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int) -> None:
        """So many more are there."""
        before, self._done = self._done, self._done + count
        if self._bar is not None:
            self._bar.update(count)
        elif before * _TOLD // self._total != self._done * _TOLD // self._total:
            print(f"answers: {self._done} of {self._total}", flush=True)


def _adapter(folder: Path, *, is_run: bool, checkpoint: str | None, base_only: bool) -> str | None:
    if base_only:
        if checkpoint is not None:
            raise ValueError("command line: --base-only measures no --checkpoint; remove one")
        return None
    if checkpoint is not None:
        path = home() / Path(checkpoint).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"command line: --checkpoint: no folder {path}")
        return str(path)
    if not is_run:
        raise FileNotFoundError(
            f"no run in {folder}; --checkpoint names an adapter, --base-only measures the base"
        )
    return str(folder)


def _result(folder: Path, *, is_run: bool, json_file: str | None) -> Path | None:
    if json_file is not None:
        return output_file("--json", json_file)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return folder / "evaluations" / f"{stamp}.json" if is_run else None


def _notes(config: Config, folder: Path) -> tuple[str, ...]:
    """Where the run was trained otherwise than it is measured."""
    trained: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changes = diff_configs(trained, json.loads(config_to_json(config)))
    return tuple(
        f"{key} is {now!r}; the run was trained with {then!r}"
        for key, then, now in changes
        if key.startswith(("prompt.", "model."))
    )
