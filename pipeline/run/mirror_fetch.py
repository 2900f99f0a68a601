"""Fetches the run of a host that has no run folder: from its mirror, or from a copy of a folder.

The files go to a folder beside the run folder first, which is renamed when it is complete and
verified. A fetch that was interrupted continues.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from configs.base import absolute_url, mirror_problem
from configs.schema import Config
from pipeline.contracts.cache_folder import cache_folder
from pipeline.contracts.record_files import DamagedFileError
from pipeline.run.mirror import PROGRAMS, NoAnswerError, answer, check_continues, mirror_url
from pipeline.run.mirror_copier import machine_of
from pipeline.run.mirror_lease import Holder, Lease
from pipeline.run.mirror_process import short
from pipeline.run.mirror_store import Manifest, Store, Stored, check_protocol, is_local
from pipeline.run.run_folder import RunFolder

FETCHED = "fetched"
"""Journal event: the run came from elsewhere."""
_SETTINGS = ("config.json", "journal.jsonl")
"""Files with the settings of a run."""


def adopted(source: str | None) -> str | None:
    """What `--adopt` names, as `fetch_run` takes it.

    Raises:
        ValueError: if it is not a path or a URL without a password.
    """
    if source is None:
        return None
    problem = mirror_problem(source)
    if problem is not None:
        raise ValueError(f"--adopt: {problem}")
    return absolute_url(source)


def check_adopt(config: Config, source: str | None, *, accept: Collection[str]) -> None:
    """Checks what `--adopt` names without fetching it, and without keys: a job may have others.

    Args:
        config: of the run.
        source: what `--adopt` names.
        accept: see `RunFolder.check`.

    Raises:
        ValueError: if it cannot be adopted.
    """
    url, folder = adopted(source), RunFolder.of(config)
    if url is None:
        return
    check_protocol(url)
    if not (is_local(url) or folder.holds_run):
        return
    with _failures_of(url), TemporaryDirectory() as fresh:
        found = _found_to_adopt(folder, url)
        if found is not None:
            _fetch_settings(config, *found, Path(fresh), accept)


def fetch_run(
    config: Config,
    *,
    adopt: str | None,
    accept: Collection[str] = (),
    say: Callable[[str], None],
) -> None:
    """Fetches the run if this host has none.

    Args:
        config: of the run.
        adopt: a run folder, or the mirror of a run, that is read instead of the mirror.
        accept: see `RunFolder.check`.
        say: shows a line.

    Raises:
        ValueError: if the run cannot be fetched, has other settings, runs elsewhere, or went on
            elsewhere.
    """
    folder, url = RunFolder.of(config), mirror_url(config)
    with _failures_of(adopt or url):
        found = None
        if adopt is not None:
            found = _found_to_adopt(folder, adopt)
        elif url is not None:
            found = _found_in_mirror(folder, url, say)
        if found is not None:
            _fetch(config, folder, *found, accept, say)


@contextmanager
def _failures_of(place: str | None) -> Iterator[None]:
    """Names the place in errors of any library of a store, or of the disk."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001
        raise ValueError(
            f"the run could not be fetched from {place}: {short(error)}; the same command continues"
        ) from None


def _found_in_mirror(
    folder: RunFolder, url: str, say: Callable[[str], None]
) -> tuple[Store, Manifest] | None:
    """The mirror's newest state; None if it is empty, or this host has the run."""
    store = Store(url)
    if folder.holds_run:
        with suppress(NoAnswerError, DamagedFileError):  # reported when the run starts
            answer(url, lambda: check_continues(url, folder.path))
        return None
    store.check_folder(folder.path)
    try:
        manifest = answer(url, Store(url, asks_first=True).newest)
        if manifest is not None:
            Lease(store, Holder.here()).await_free(say)
    except NoAnswerError as error:
        raise ValueError(
            f"run.mirror: {error}; whether it has a run to resume is unknown. Give the command "
            "again when it answers, or remove run.mirror"
        ) from None
    return None if manifest is None else (store, manifest)


def _found_to_adopt(folder: RunFolder, source: str) -> tuple[Store, Manifest] | None:
    """The run that `--adopt` names; None if this host has fetched it."""
    if folder.holds_run:
        if any(entry["source"] == source for entry in folder.events(FETCHED)):
            return None
        raise ValueError(
            f"--adopt: {folder.path} holds a run; remove --adopt to continue it, or choose "
            "another run.name"
        )
    if is_local(source) and RunFolder(Path(source.removeprefix("file://"))).is_locked:
        raise ValueError(f"--adopt: another process is using {source}")
    store, first = Store(source), Store(source, asks_first=True)
    try:
        manifest = answer(source, lambda: first.newest() or first.plain_run())
    except NoAnswerError as error:
        raise ValueError(f"--adopt: {error}") from None
    if manifest is None:
        raise ValueError(f"--adopt: {source} is neither a run folder nor the mirror of a run")
    return store, manifest


def _fetch(
    config: Config,
    folder: RunFolder,
    store: Store,
    manifest: Manifest,
    accept: Collection[str],
    say: Callable[[str], None],
) -> None:
    """Fetches all files, then puts them in the place of the run folder.

    The files with the settings come first: a run with other ones is not fetched.
    """
    folder.check(config)
    size = sum(stored.bytes for stored in manifest.files.values())
    say(
        f"fetching {len(manifest.files)} files, {size / 2**20:.1f} MiB, from {store.url} "
        f"({manifest.origin})"
    )
    fresh = folder.path.with_name(f".{folder.path.name}.fetched")

    def fetch(manifest: Manifest) -> None:
        try:
            _fetch_settings(config, store, manifest, fresh, accept)
        except ValueError:
            shutil.rmtree(fresh)
            raise
        _fetch_files(store, fresh, manifest.files)

    manifest = store.read_consistently(manifest, fetch)
    _remove_others(fresh, manifest.files)
    RunFolder(fresh).journal(
        FETCHED,
        source=store.url,
        host=manifest.host,
        taken=manifest.time,
        checkpoint=manifest.checkpoint,
    )
    # What a process left that was killed before its run began; `check` found nothing else.
    shutil.rmtree(folder.path, ignore_errors=True)
    fresh.rename(folder.path)
    _fetch_programs(store, manifest, machine=machine_of(config.plan.platform))


def _fetch_settings(
    config: Config, store: Store, manifest: Manifest, fresh: Path, accept: Collection[str]
) -> None:
    """Fetches the files with the settings of the run, and compares them with the request's."""
    settings = {path: manifest.files[path] for path in _SETTINGS if path in manifest.files}
    _fetch_files(store, fresh, settings, disable=True)
    RunFolder(fresh).check_settings(config, accept=accept, place=store.url)


def _fetch_files(
    store: Store, fresh: Path, files: Mapping[str, Stored], *, disable: bool | None = None
) -> None:
    size = sum(stored.bytes for stored in files.values())
    with tqdm(total=size, unit="B", unit_scale=True, disable=disable) as bar:
        for path, stored in files.items():
            store.get(path, stored, fresh / path)
            bar.update(stored.bytes)


def _fetch_programs(store: Store, manifest: Manifest, *, machine: str) -> None:
    """Fetches compiled programs for this kind of machine; without them they are compiled again."""
    if manifest.machine != machine:
        return
    cache = cache_folder(PROGRAMS)
    for name, stored in manifest.programs.items():
        if not (cache / name).exists():
            # The writer may have deleted it meanwhile, or the cache cannot be written.
            with suppress(OSError, ValueError):
                store.get(name, stored, cache / name)


def _remove_others(fresh: Path, files: Mapping[str, Stored]) -> None:
    """Removes what an interrupted fetch of an earlier state left."""
    for path in sorted(fresh.rglob("*"), reverse=True):
        if path.is_file():
            if path.relative_to(fresh).as_posix() not in files:
                path.unlink()
        else:
            with suppress(OSError):
                path.rmdir()
