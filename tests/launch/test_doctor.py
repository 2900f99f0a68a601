"""`launch.doctor` on imitated hosts: files below a folder, and the variables of this process."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.utils import canonicalize_name
from safetensors.numpy import load_file, save_file

from configs.load import load_config
from configs.schema import Config
from launch import doctor, preparation, train
from launch.host_checks import Finding, Host
from pipeline.run.run_folder import RunFolder
from tests.launch.small_run import everything_below

PROJECT = Path(__file__).parents[2]
GIB = 2**30
ME, OTHER = 60_001, 60_002
"""User ids that have no name."""


def versions() -> dict[str, str]:
    """What an installation for TPUs has: this one's packages, and the pinned libtpu."""
    pins = (PROJECT / "requirements-tpu.txt").read_text(encoding="utf-8")
    (libtpu,) = re.findall("^libtpu==(\\S+)", pins, re.MULTILINE)
    here = {canonicalize_name(one.name): one.version for one in metadata.distributions()}
    return here | {"libtpu": libtpu, "gemma-grpo": "0.1.0"}


@dataclass
class Imitation:
    """A host that can be changed: at first a v5e-8 host on which everything is as it should be.

    `given` replaces attributes of the `Host`, `settings` are those of the run.
    """

    root: Path
    settings: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    given: dict[str, Any] = field(default_factory=dict)

    def write(self, path: str, text: str = "") -> None:
        """Writes a file of the host; all belong to the user of the test."""
        file = self.root / path.removeprefix("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    def process(self, pid: int, name: str, *opened: str) -> None:
        """Starts a process that has files open."""
        self.write(f"/proc/{pid}/comm", f"{name}\n")
        for number, path in enumerate(("/dev/null", *opened)):
            link = self.root / f"proc/{pid}/fd/{number}"
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path)

    def chips(self, count: int) -> None:
        """Gives it other chips."""
        for path in (self.root / "dev").glob("accel*"):
            path.unlink()
        for number in range(count):
            self.write(f"/dev/accel{number}")

    def host(self) -> Host:
        good: dict[str, Any] = {
            "root": self.root,
            "uid": ME,
            "version": versions().get,
            "ray_chips": 8,
            "memory_bytes": 100 * GIB,
            "free_bytes": lambda _: 500 * GIB,
        }
        return Host(**good | self.given)


@pytest.fixture
def good(tmp_path: Path, request_path: Path, monkeypatch: pytest.MonkeyPatch) -> Imitation:
    for name in [*os.environ]:
        if name.startswith(("TPU_", "RAY_", "WANDB", "KAGGLE", "HF_TOKEN")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GEMMA_GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    found = Imitation(tmp_path / "host")
    found.chips(8)
    found.process(1, "systemd")
    found.settings |= {
        "plan.platform": "tpu",
        "plan.placement": "colocated",
        "plan.learner_devices": "8",
        "plan.slots": "8",
        "plan.micro_batch_tokens": "544",
    }
    return found


def configured(imitated: Imitation) -> Config:
    return load_config("small.toml", list(imitated.settings.items()))


def examined(imitated: Imitation) -> list[Finding]:
    usable = os.access

    def access(path: str | Path, mode: int) -> bool:  # root may use all files
        return str(path) not in imitated.closed and usable(path, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", access)
        return list(doctor.examine(imitated.host(), configured(imitated)))


def test_a_good_host_can_run(good: Imitation):
    found = examined(good)
    assert [one for one in found if one.state != "ok"] == []
    shown = {one.check: one.finding for one in found}
    assert shown["chips"].startswith("8 chips, /dev/accel0 to /dev/accel7, readable and writable")
    assert "make test-accelerator" in shown["chips"]
    assert shown["Ray's count"] == "Ray counts 8 chips"
    assert shown["packages"].startswith("Python 3.")


def closed(host: Imitation) -> None:
    host.closed |= {f"{host.root}/dev/accel{number}" for number in (2, 5)}
    host.given["uid"] = OTHER


def locked(host: Imitation) -> None:
    host.write("/tmp/libtpu_lockfile")
    host.given["uid"] = OTHER


def settings(**values: str) -> Callable[[Imitation], None]:
    return lambda host: host.settings.update(
        {key.replace("__", "."): value for key, value in values.items()}
    )


def given(**attributes: Any) -> Callable[[Imitation], None]:
    return lambda host: host.given.update(attributes)


def installed(**others: str | None) -> Callable[[Imitation], None]:
    return given(version=(versions() | others).get)


def kaggle_without_login(host: Imitation) -> None:
    os.environ.pop("HF_HUB_OFFLINE", None)
    host.settings["model.path"] = "kaggle://google/gemma-3/flax/gemma3-1b-it"


GPUS = settings(plan__platform="gpu", plan__learner_devices="64", plan__slots="64")
OVER = settings(budget__steps="none", budget__until="2020-01-01T10:00Z")
NO_CHIPS = "neither /dev/accel* nor /dev/vfio/N exists"
HOSTS: list[tuple[Callable[[Imitation], None], str, str, str]] = [
    (installed(jax="0.9.2"), "packages", "jax 0.9.2, needed: ", "launch/bootstrap.sh --tpu"),
    (installed(libtpu="0.0.30"), "packages", "libtpu 0.0.30, needed: ==0.0.", "--tpu"),
    (lambda host: host.chips(0), "chips", NO_CHIPS, "docker run --privilege"),
    (lambda host: host.chips(4), "chips", "4 chips, /dev/accel0 to /dev/accel3; the plan", "fewer"),
    (closed, "chips", f"{OTHER} may not read and write /dev/accel2,", "chmod a+rw /dev/accel2"),
    (
        lambda host: host.process(4242, "python3", "/dev/accel3"),
        *("holders", f"in use by pid 4242 (python3, user id {os.getuid()})", "kill 4242"),
    ),
    (locked, "holders", "libtpu cannot lock it", "sudo rm /tmp/libtpu_lockfile"),
    (given(ray_chips=0), "Ray's count", "0 chips; there are 8 device files", "chips = 8"),
    (settings(run__tpu_chips="4"), "Ray's count", "run.tpu_chips = 4 replaces that", "chips = 8"),
    (GPUS, "devices", "needs 64 GPU, and this machine has", "choose a machine with more"),
    (given(memory_bytes=GIB // 2), "memory", "0.5 GiB available, 1.6 needed", "limit"),
    (given(free_bytes=lambda _: 0), "disk", "0.0 GiB free at ", "set run.dir"),
    (settings(plan__hbm_gib="0.001"), "plan", "does not fit: ", "python -m launch.plan"),
    (OVER, "clock", "budget.until = 2020-01-01T10:00Z has passed", "a later budget.until"),
    (settings(wandb__mode="online"), "W&B", "this machine has no W&B login", "wandb login"),
    (settings(model__path="modell"), "model", "model.path: no folder ", "set model.path to a f"),
    (settings(lora__targets="x"), "model", "'x' matches no whole module path", "of [lora]"),
    (kaggle_without_login, "model", "needs an API token from ", "set KAGGLE_API_TOKEN"),
    (lambda _: Path("test.jsonl").unlink(), "data", "data.test.path: no file ", "set the path"),
]
"""Changes of a host that make a run impossible, with the check, the cause and the remedy."""


@pytest.mark.parametrize(("change", "check", "cause", "remedy"), HOSTS)
def test_a_host_with_a_defect_is_told_its_cause_and_remedy(
    good: Imitation,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Imitation], None],
    check: str,
    cause: str,
    remedy: str,
):
    monkeypatch.setenv("HOME", str(good.root))  # of Kaggle's token
    monkeypatch.setattr(os, "environ", os.environ.copy())
    change(good)
    found = examined(good)
    told = [
        (one.finding, one.remedy) for one in found if (one.check, one.state) == (check, "fault")
    ]
    assert any(cause in finding and remedy in advice for finding, advice in told), told
    assert not doctor.can_run(found)
    assert all(one.remedy for one in found if one.state != "ok")


def test_what_does_not_prevent_a_run_is_a_note(good: Imitation, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(good.root / "none"))
    (note,) = [one for one in examined(good) if one.state != "ok"]
    assert (note.check, note.state) == ("Ray token", "note")
    assert "ray get-auth-token --generate" in note.remedy
    # The chips of a cluster are not expected here.
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    good.chips(0)
    found = examined(good)
    assert doctor.can_run(found)
    assert {one.check: one.state for one in found}["chips"] == "note"
    # Without a configuration nothing is needed.
    found = list(doctor.examine(good.host(), None))
    assert doctor.can_run(found)
    states = {one.check: one.state for one in found}
    assert states["chips"] == states["W&B"] == "note"
    good.chips(8)
    good.given["ray_chips"] = 1
    states = {one.check: one.state for one in doctor.examine(good.host(), None)}
    assert states["Ray's count"] == "note"
    assert not {"plan", "disk", "model", "data"} & states.keys()


def test_another_jax_than_the_installed_one_is_a_fault(
    good: Imitation, monkeypatch: pytest.MonkeyPatch
):
    other = SimpleNamespace(origin="/here/jax/__init__.py")
    monkeypatch.setattr("launch.host_checks.find_spec", lambda _: other)
    (found,) = [one for one in examined(good) if one.check == "packages"]
    assert (found.state, "jax is imported from /here/jax" in found.finding) == ("fault", True)


def test_files_that_a_run_has_written_need_no_more_disk(good: Imitation):
    good.given["free_bytes"] = lambda _: 0
    assert {one.check: one.state for one in examined(good)}["disk"] == "fault"
    run = RunFolder.of(configured(good)).path
    run.mkdir(parents=True)
    with (run / "large").open("wb") as file:
        file.truncate(GIB)  # sparse
    assert {one.check: one.state for one in examined(good)}["disk"] == "ok"


def test_the_command_writes_what_it_shows(
    request_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without a network, and with a model of the hub that is not in the cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(request_path.parent / "hub"))
    hub = "--model.path=hf://owner/tiny", "--model.tokenizer=model"
    assert doctor.main([str(request_path), *hub, "--json", "found.json"]) == 1
    shown = capsys.readouterr().out
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert not found["can_run"]
    for one in found["checks"]:
        assert one.keys() == {"check", "state", "finding", "remedy"}
        assert one["check"] in shown
    (model,) = (one for one in found["checks"] if one["check"] == "model")
    assert "hf://owner/tiny is not completely in the cache" in model["finding"]
    assert model["remedy"].startswith("connect to the network")
    assert "fault(s)" in shown.splitlines()[-1]


# --- damaged models: the dry run and the doctor name what is damaged

WEIGHTS, NORM = "model.safetensors", "model.norm.weight"


def cut_short(model: Path) -> None:
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:500])


def without_norm(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    del tensors[NORM]
    save_file(tensors, model / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "flags", "told"),
    [
        (cut_short, (), f"{WEIGHTS} is damaged: "),
        (lambda model: (model / WEIGHTS).unlink(), (), f"lacks {WEIGHTS}"),
        (without_norm, (), f"missing: {NORM} (8,)"),
        (lambda _: None, ("--lora.targets=x",), "'x' matches no whole module path"),
    ],
)
def test_dry_run_and_doctor_name_what_is_damaged(
    request_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    flags: tuple[str, ...],
    told: str,
):
    monkeypatch.setattr(preparation, "check", lambda _: [])  # no reward processes
    damage(request_path.parent / "model")
    before = everything_below(request_path.parent)
    for main, more, status in ((train.main, ["--dry-run"], 2), (doctor.main, [], 1)):
        assert main([str(request_path), *flags, *more]) == status
        shown = capsys.readouterr()
        assert told in " ".join((shown.err + shown.out).split())
    assert everything_below(request_path.parent) == before
