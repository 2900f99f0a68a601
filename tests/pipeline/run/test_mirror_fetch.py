"""A host without the run folder fetches the run."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from configs.load import config_to_json
from configs.schema import Config
from pipeline.contracts.cache_folder import cache_folder
from pipeline.run.mirror import Mirror
from pipeline.run.mirror_copier import machine_of
from pipeline.run.mirror_fetch import adopted, fetch_run
from pipeline.run.mirror_lease import Holder, Lease
from pipeline.run.mirror_store import FIRST_ATTEMPTS, Store
from pipeline.run.run_folder import RunFolder
from tests.fakes import make_config
from tests.pipeline.run.gcs_server import gcs_server
from tests.pipeline.run.mirror_parts import content, make_copier, make_run, write
from tests.pipeline.run.s3_server import BUCKET, s3_server

NAME = "run"


class Hosts:
    """A run on one host that is in a mirror, and the request of another host."""

    def __init__(self, folder: Path) -> None:
        self.mirror = folder / "mirror"
        self.mirror.mkdir()
        self.store = Store(str(self.mirror / NAME))
        self.run = make_run(folder / "here" / NAME, steps=2)
        self.config = self.request(folder / "there")
        write(self.run.path, {"config.json": config_to_json(self.request(folder / "here"))})
        self.target = RunFolder.of(self.config)
        self.said: list[str] = []

    def request(self, folder: Path) -> Config:
        return make_config(folder, run={"dir": str(folder), "mirror": str(self.mirror)})

    def copy(self) -> None:
        make_copier(self.run, self.store).copy()

    def fetch(self, adopt: str | None = None) -> None:
        fetch_run(self.config, adopt=adopt, say=self.said.append)

    @property
    def fetched(self) -> dict[str, bytes]:
        return content(self.target.path)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_the_run_of_another_host_is_fetched(hosts: Hosts):
    hosts.copy()
    hosts.fetch()
    before, after = content(hosts.run.path), hosts.fetched
    assert after.keys() == before.keys()
    assert {path for path in after if after[path] != before[path]} == {"journal.jsonl"}
    (entry,) = hosts.target.events("fetched")
    assert (entry["source"], entry["checkpoint"]) == (str(hosts.mirror / NAME), 2)
    (line,) = hosts.said
    assert line.startswith(
        f"fetching {len(before)} files, 0.0 MiB, from {hosts.mirror}/{NAME} (of "
    )
    assert line.endswith(", checkpoint 2)")
    # Again: this host's folder continues the mirror.
    hosts.fetch()
    assert hosts.said == [line]
    assert hosts.fetched == after


def test_without_a_run_in_the_mirror_nothing_happens(hosts: Hosts):
    hosts.fetch()
    assert (hosts.target.path.exists(), hosts.said) == (False, [])


def test_an_interrupted_fetch_continues(hosts: Hosts, monkeypatch: pytest.MonkeyPatch):
    hosts.copy()
    got, get = list[str](), Store.get

    def cut(store: Store, path: str, *rest: object) -> None:
        if len(got) == 3:
            raise KeyboardInterrupt
        got.append(path)
        get(store, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "get", cut)
    with pytest.raises(KeyboardInterrupt):
        hosts.fetch()
    assert not hosts.target.path.exists()
    monkeypatch.setattr(Store, "get", get)
    partial = hosts.target.path.with_name(f".{NAME}.fetched")
    write(partial, {"rollouts/step_000099.jsonl": "of an earlier state", ".lock": "torn"})
    hosts.fetch()
    assert hosts.fetched.keys() == content(hosts.run.path).keys()
    assert not partial.exists()


def test_of_a_run_with_other_settings_only_the_settings_are_fetched(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
):
    hosts.copy()
    hosts.config = make_config(
        hosts.target.path.parent,
        run={"dir": str(hosts.target.path.parent), "mirror": str(hosts.mirror), "seed": 7},
    )
    got, get = list[str](), Store.get

    def recorded(store: Store, path: str, *rest: object) -> None:
        got.append(path)
        get(store, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "get", recorded)
    with pytest.raises(ValueError, match=f"{hosts.mirror}/{NAME} contains a run with other"):
        hosts.fetch()
    assert set(got) <= {"config.json", "journal.jsonl"}
    assert list(hosts.target.path.parent.iterdir()) == []


def test_what_a_process_left_that_never_began_is_replaced(hosts: Hosts):
    hosts.copy()
    write(hosts.target.path, {".lock": "", "status.json": "{}"})
    hosts.fetch()
    assert hosts.target.holds_run


def test_other_files_are_never_replaced(hosts: Hosts):
    hosts.copy()
    write(hosts.target.path, {"mine": ""})
    with pytest.raises(ValueError, match="is not empty and not a run"):
        hosts.fetch()


def test_a_damaged_file_is_not_used(hosts: Hosts):
    hosts.copy()
    for file in (hosts.mirror / NAME / "files").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match="of the run, is damaged"):
        hosts.fetch()
    assert not hosts.target.path.exists()


def test_a_file_that_is_gone_is_reported(hosts: Hosts):
    hosts.copy()
    shutil.rmtree(hosts.mirror / NAME / "files")
    with pytest.raises(ValueError, match=r"could not be fetched from .*; the same command"):
        hosts.fetch()


def test_a_run_that_runs_elsewhere_is_not_fetched(hosts: Hosts, monkeypatch: pytest.MonkeyPatch):
    hosts.copy()
    theirs = Lease(hosts.store, Holder("theirs", "far", "", 7, 0.0))
    theirs.renew()
    monkeypatch.setattr("pipeline.run.mirror_lease._LOOK_EVERY_S", 0.0)
    reads, read = list[int](), Store.read_lease

    def read_and_renew(store: Store) -> object:
        if reads:
            theirs._since = "renewed"
            theirs._write()
        reads.append(1)
        return read(store)

    monkeypatch.setattr(Store, "read_lease", read_and_renew)
    with pytest.raises(ValueError, match="is written by process 7 on host far"):
        hosts.fetch()
    assert not hosts.target.path.exists()


def test_an_unmounted_disk_is_no_empty_mirror(hosts: Hosts):
    hosts.mirror.rmdir()
    with pytest.raises(ValueError, match=r"there is no folder .*/mirror; create or mount it"):
        hosts.fetch()


def test_a_store_that_is_gone_is_no_empty_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with s3_server(monkeypatch) as server:
        run = {"dir": str(tmp_path), "mirror": f"s3://{BUCKET}/runs"}
        config, said = make_config(tmp_path, run=run), list[str]()
        store = Store(f"s3://{BUCKET}/runs/{NAME}")
        here = make_run(tmp_path / "here" / NAME)
        write(here.path, {"config.json": config_to_json(config)})
        make_copier(here, store).copy()
        server.stop()
        what = r"s3://bucket/runs/run cannot be read or written: .*whether it has a run to resume"
        with pytest.raises(ValueError, match=what):
            fetch_run(config, adopt=None, say=said.append)
        server.start()
        fetch_run(config, adopt=None, say=said.append)
        assert len(said) == 1
        # With the run on this host the store is not needed.
        server.stop()
        fetch_run(config, adopt=None, say=said.append)
        server.start()


@contextmanager
def refusing_server(status: int, code: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers each request with an error; yields its URL and the requests."""
    requests = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            text = json.dumps({"error": {"code": status, "message": "no access"}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.send_header("X-Error-Code", code)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Makes stores of s3://, gs:// and hf:// talk to a server, without keys of this user."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/no-credentials")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for protocol in ("s3", "gs", "hf"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()


PLACES = {"s3": "s3://bucket/runs", "gs": "gs://bucket/runs", "hf": "hf://buckets/ann/runs"}


@pytest.mark.parametrize("protocol", PLACES)
@pytest.mark.parametrize("status", [401, 403])
def test_a_store_that_the_keys_do_not_open_is_refused_in_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    status: int,
):
    """At once: it is not tried again, and no traceback is printed."""
    url = PLACES[protocol]
    config = make_config(tmp_path, run={"dir": str(tmp_path), "mirror": url})
    with refusing_server(status, "") as (endpoint, requests):
        use(monkeypatch, endpoint)
        what = rf"^run\.mirror: {url}/run cannot be read or written: .*({status}|Forbidden)"
        with pytest.raises(ValueError, match=what):
            fetch_run(config, adopt=None, say=print)
        with pytest.raises(ValueError, match=rf"^--adopt: {url}/a cannot be read or written: "):
            fetch_run(config, adopt=f"{url}/a", say=print)
    assert len([path for path in requests if "bucket" in path]) == 2
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def check_refusal_without_bucket(mirror: str, folder: Path) -> None:
    """Checks the sentences for a mirror whose bucket does not exist."""
    config = make_config(folder, run={"dir": str(folder), "mirror": mirror})
    with pytest.raises(ValueError, match=f"^--adopt: {mirror}/a is neither a run folder nor the"):
        fetch_run(config, adopt=f"{mirror}/a", say=print)
    with pytest.raises(ValueError, match=rf"^run\.mirror: {mirror}/run .* bucket does not exist"):
        Mirror.of(config).acquire(folder / "run", print)


@pytest.mark.parametrize("url", ["s3", "gs"], indirect=True)
def test_a_bucket_that_does_not_exist_is_refused_in_a_sentence(tmp_path: Path, url: str):
    check_refusal_without_bucket(url.replace(f"//{BUCKET}/", "//absent/"), tmp_path)


def test_a_bucket_that_the_hub_does_not_have_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with refusing_server(404, "RepoNotFound") as (endpoint, _):
        use(monkeypatch, endpoint)
        check_refusal_without_bucket(PLACES["hf"], tmp_path)


def test_a_hub_that_is_gone_is_no_empty_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with refusing_server(500, "") as (endpoint, _):
        pass
    use(monkeypatch, endpoint)
    config = make_config(tmp_path, run={"dir": str(tmp_path), "mirror": PLACES["hf"]})
    what = r"^run\.mirror: hf://buckets/ann/runs/run cannot be read or written: .*refused.*unknown"
    with pytest.raises(ValueError, match=what):
        fetch_run(config, adopt=None, say=print)


def test_a_start_tries_a_google_store_that_is_gone_a_few_times_a_copy_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with gcs_server(monkeypatch, BUCKET, credentials=tmp_path / "no-credentials"):
        pass
    pauses = list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=pause))
    mirror = f"gs://{BUCKET}/runs"
    config = make_config(tmp_path, run={"dir": str(tmp_path), "mirror": mirror})
    what = f"^run.mirror: {mirror}/run cannot be read or written: .*Connect call failed"
    for start in (
        lambda: fetch_run(config, adopt=None, say=print),
        lambda: Mirror.of(config).acquire(RunFolder.of(config).path, print),
    ):
        with pytest.raises(ValueError, match=what):
            start()
        assert len(pauses) == FIRST_ATTEMPTS - 1
        assert sum(pauses) <= 5
        pauses.clear()
    with pytest.raises(OSError, match="Connect call failed"):
        Store(f"{mirror}/run").newest()
    assert len(pauses) == 5
    assert sum(pauses) >= 31


def test_a_run_is_fetched_from_each_kind_of_store(tmp_path: Path, url: str):
    config = make_config(tmp_path, run={"dir": str(tmp_path), "mirror": url.removesuffix("/run")})
    here, said = make_run(tmp_path / "here" / NAME, steps=2), list[str]()
    write(here.path, {"config.json": config_to_json(config)})
    make_copier(here, Store(url)).copy()
    before = content(here.path)
    for adopt in (None, url):
        fetch_run(config, adopt=adopt, say=said.append)
        run = RunFolder.of(config)
        (entry,) = run.events("fetched")
        assert entry["checkpoint"] == 2
        after = content(run.path)
        assert {path for path in before if after[path] != before[path]} == {"journal.jsonl"}
        shutil.rmtree(run.path)
    assert len(said) == 2


def test_a_protocol_without_its_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = make_config(tmp_path, run={"mirror": "adl://store/runs"})
    with pytest.raises(ValueError, match=r"adl:// needs a library that is not installed \(.*\)"):
        fetch_run(config, adopt=None, say=print)


def test_an_unknown_protocol_is_named(tmp_path: Path):
    config = make_config(tmp_path, run={"mirror": "s4://store/runs"})
    with pytest.raises(ValueError, match=r"^s4:// is not supported by fsspec$"):
        fetch_run(config, adopt=None, say=print)


# --- programs


@pytest.mark.parametrize(("platform", "is_there"), [("cpu", True), ("tpu", False)])
def test_programs_for_this_machine_are_fetched(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, is_there: bool
):
    monkeypatch.setenv("GEMMA_GRPO_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "programs", {"jit_f-cache": "code"})
    copier = make_copier(
        hosts.run, hosts.store, programs=tmp_path / "programs", machine=machine_of(platform)
    )
    copier.copy()
    copier.copy_programs()
    copier.copy()
    hosts.fetch()
    assert (cache_folder("xla") / "jit_f-cache").exists() is is_there


# --- adopting


def test_a_run_folder_is_adopted_and_only_read(hosts: Hosts, tmp_path: Path):
    hosts.config = make_config(tmp_path / "there", run={"dir": str(tmp_path / "there")})
    before = content(hosts.run.path)
    write(hosts.run.path, {"wandb/x": "", "checkpoints/9.orbax-checkpoint-tmp-1/x": ""})
    hosts.fetch(adopt=str(hosts.run.path))
    assert hosts.fetched.keys() == before.keys()
    assert content(hosts.run.path) == before
    # The same command again resumes.
    hosts.fetch(adopt=str(hosts.run.path))
    (entry,) = hosts.target.events("fetched")
    assert entry["source"] == str(hosts.run.path)


def test_a_mirror_is_adopted(hosts: Hosts, tmp_path: Path):
    hosts.copy()
    hosts.config = make_config(tmp_path / "there", run={"dir": str(tmp_path / "there")})
    before = {path: path.stat() for path in hosts.mirror.rglob("*")}
    hosts.fetch(adopt=f"file://{hosts.mirror}/{NAME}")
    assert hosts.target.holds_run
    assert before == {path: path.stat() for path in hosts.mirror.rglob("*")}


def test_what_is_no_run_is_not_adopted(hosts: Hosts, tmp_path: Path):
    for place in (tmp_path / "nothing", hosts.mirror):
        with pytest.raises(ValueError, match="is neither a run folder nor the mirror of a run"):
            hosts.fetch(adopt=str(place))


def test_a_run_is_not_replaced_by_an_adopted_one(hosts: Hosts):
    make_run(hosts.target.path)
    with pytest.raises(ValueError, match="holds a run; remove --adopt to continue it"):
        hosts.fetch(adopt=str(hosts.run.path))


def test_a_run_in_progress_is_not_adopted(hosts: Hosts):
    with hosts.run.held(), pytest.raises(ValueError, match="another process is using"):
        hosts.fetch(adopt=str(hosts.run.path))


def test_the_argument_is_a_path_or_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GEMMA_GRPO_HOME", str(tmp_path))
    assert adopted(None) is None
    assert adopted("runs/a/") == str(tmp_path / "runs" / "a")
    assert adopted("s3://bucket/runs/a/") == "s3://bucket/runs/a"
    with pytest.raises(ValueError, match="--adopt: contains a user's key or password"):
        adopted("s3://key:secret@bucket/a")
