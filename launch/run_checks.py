"""The checks of `launch.doctor` of what a configuration needs: room, time, model, data, logins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from configs.base import is_handle
from configs.schema import Config
from launch.host import Host, existing_parent
from launch.host_checks import Finding, State
from launch.preparation import check_devices, check_start, check_targets
from pipeline.compute.program_cache import MOST_BYTES as PROGRAMS_BYTES
from pipeline.data.load import locate_data
from pipeline.data.models import hf_folder
from pipeline.data.models.find_shape import shape_of
from pipeline.data.models.model_shape import LOADING_COPIES
from pipeline.data.models.model_source import HF, KAGGLE, has_kaggle_login, locate_model
from pipeline.plan.cost_model.hardware import device_count
from pipeline.plan.forecast import Forecast, forecast
from pipeline.plan.search.fitting import PlanCase, choose_placement, shortage
from pipeline.plan.topology import GIB
from pipeline.run import tracking
from pipeline.run.cache_folder import cache_folder
from pipeline.run.mirror import check_mirror
from pipeline.run.run_folder import RunFolder

_PROCESS_GIB, _OTHERS_GIB = 1.0, 0.6
"""Memory of a process with devices, and of all others of a run and of Ray together, as measured
with the demo. Weights go to the devices one parameter after another."""
_NETWORK = "connect to the network (Kaggle: Settings, Internet) without HF_HUB_OFFLINE"
_ADVICE = {
    "model": f"{_NETWORK}, or set model.path to a folder with the model's files",
    HF: "accept the licence on the model's page, then hf auth login, or set HF_TOKEN",
    KAGGLE: "accept the licence on the model's page, and set KAGGLE_API_TOKEN",
    "folder": "set model.path to a folder with the model's files",
    "data": "set the path of a file or dataset that exists; python -m launch.data shows the rows",
}


def clock(host: Host, config: Config | None) -> Iterator[Finding]:
    """The clock against the end of the budget."""
    shown = f"{datetime.fromtimestamp(host.now_s).astimezone():%Y-%m-%d %H:%M %Z}"
    until_s = None if config is None else config.budget.until_s
    if config is not None and until_s is not None and until_s <= host.now_s:
        yield Finding(
            "clock",
            "fault",
            f"it is {shown}, and budget.until = {config.budget.until} has passed",
            "set a later budget.until",
        )
    else:
        yield Finding("clock", "ok", shown)


# --- room


def room(host: Host, config: Config | None) -> Iterator[Finding]:
    """The plan, and the memory and disk that it needs."""
    memory = host.memory_bytes() / GIB
    if config is None:
        yield Finding("memory", "ok", f"{memory:.1f} GiB available")
        return
    state: State = "note"
    try:
        shape_of(config)  # a missing model has its own finding; one on the hub may be unknown
        state = "note" if config.plan.platform == "gpu" else "fault"
        case = PlanCase.of(config)
        chosen = choose_placement(case).chosen
        planned = forecast(case, chosen)
    except (ValueError, FileNotFoundError) as error:
        remedy = "python -m launch.plan estimates memory and disk once this is known"
        yield Finding("plan", state, str(error), remedy)
        return
    if chosen.fits:
        yield Finding("plan", "ok", f"{chosen.name}, by estimates")
    else:
        remedy = "see what would make it fit: python -m launch.plan"
        yield Finding("plan", "fault", f"does not fit: {shortage(case, chosen)}", remedy)
    config = chosen.config
    processes = config.plan.num_samplers + int(config.plan.placement == "split")
    needed = processes * _PROCESS_GIB + _OTHERS_GIB
    if config.plan.platform == "cpu":  # its devices have the host's memory
        needed += chosen.peak_bytes * device_count(config) / GIB
    if config.plan.embeddings_in_host:
        copies = device_count(config) + LOADING_COPIES * processes
        needed += copies * case.shape.host_bytes(config.model.dtype) / GIB
    shown = f"{memory:.1f} GiB available, {needed:.1f} needed (estimated)"
    if memory < needed:
        remedy = "end other programs, raise the container's limit, or use smaller sizes in [plan]"
        yield Finding("memory", "fault", shown, remedy)
    else:
        yield Finding("memory", "ok", shown)
    yield from _disk(host, config, planned)


def _disk(host: Host, config: Config, planned: Forecast) -> Iterator[Finding]:
    """The free space of each file system against what a run writes there, as `launch.plan` says."""
    programs = cache_folder("xla")
    places = {RunFolder.of(config).path: planned.disk_gib}
    places[programs] = {"compiled programs": PROGRAMS_BYTES / GIB}
    if is_handle(config.model.path):
        places[_hub_cache(config.model.path)] = {"weights": planned.download_gib}
    left = {path: max(0.0, sum(gib.values()) - _size_gib(path)) for path, gib in places.items()}
    disks: dict[int, list[Path]] = defaultdict(list)
    for path in places:
        disks[existing_parent(path).stat().st_dev].append(path)
    for paths in disks.values():
        free, at_most = host.free_bytes(paths[0]) / GIB, sum(left[path] for path in paths)
        needed = sum(left[path] for path in paths if path != programs)
        parts = [f"{name} {gib:.2f}" for path in paths for name, gib in places[path].items()]
        shown = f"{free:.1f} GiB free at {paths[0]}; at most {at_most:.2f} more needed"
        shown += f": {', '.join(parts)}"
        if free >= at_most:
            yield Finding("disk", "ok", shown)
        else:
            state: State = "note" if free >= needed else "fault"
            remedy = "make space, or set run.dir, GEMMA_GRPO_CACHE or HF_HOME on a larger disk"
            yield Finding("disk", state, shown, remedy)


def _size_gib(folder: Path) -> float:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / GIB


def _hub_cache(handle: str) -> Path:
    if handle.startswith(KAGGLE):
        from kagglehub.config import get_cache_folder

        return Path(get_cache_folder()) / "models" / handle.removeprefix(KAGGLE)
    from huggingface_hub.constants import HF_HUB_CACHE

    name = handle.removeprefix(HF).partition("@")[0]
    return Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def folders(host: Host, config: Config | None) -> Iterator[Finding]:  # noqa: ARG001
    """The run folder and its mirror can be written."""
    if config is None:
        return
    folder = RunFolder.of(config)
    try:
        folder.check_writable()
        if config.run.mirror is not None:
            check_mirror(config.run.mirror, folder.path)
    except (ValueError, FileNotFoundError) as error:
        yield Finding("run folder", "fault", str(error), "set run.dir to a folder of this user")
    else:
        yield Finding("run folder", "ok", f"{folder.path} can be written")


# --- what the run reads


def model(host: Host, config: Config | None) -> Iterator[Finding]:  # noqa: ARG001
    """The model is here, or its hub allows a download."""
    if config is None:
        return
    path = config.model.path
    try:
        found = locate_model(config.model)
        if found is not None:
            hf_folder.check_folder(found)
    except FileNotFoundError as error:
        remedy = _ADVICE["model" if is_handle(path) else "folder"]
        yield Finding("model", "fault", str(error), remedy)
    except ValueError as error:
        hub = next((prefix for prefix in (HF, KAGGLE) if path.startswith(prefix)), "folder")
        hub = "model" if hub != "folder" and _has_free_licence(path) else hub
        remedy = _ADVICE[hub]
        yield Finding("model", "fault", str(error), remedy)
    else:
        where = f"in {found}"
        if found is None:
            where = "not here: a run downloads it first"
        yield Finding("model", "ok", f"{path}, {where}" if is_handle(path) else where)


def adapter(host: Host, config: Config | None) -> Iterator[Finding]:  # noqa: ARG001
    """The settings of the adapter suit the model and the adapter to start from."""
    if config is None:
        return
    try:
        check_start(config)
        found = locate_model(config.model)
        if found is not None:
            check_targets(config, found)
    except (FileNotFoundError, ValueError) as error:
        if str(error).startswith("lora."):  # other mistakes are reported by `model`
            yield Finding("adapter", "fault", str(error), "correct the settings of [lora]")


def data(host: Host, config: Config | None) -> Iterator[Finding]:  # noqa: ARG001
    """The datasets are here, or their hub has them."""
    if config is None:
        return
    try:
        places = locate_data(config)
    except ValueError as error:
        for line in str(error).splitlines():
            what, _, remedy = line.partition("; connect to ")
            advice = f"connect to {remedy}" if remedy else _ADVICE["data"]
            yield Finding("data", "fault", what, advice)
    else:
        yield Finding("data", "ok", "; ".join(places))


def logins(host: Host, config: Config | None) -> Iterator[Finding]:  # noqa: ARG001
    """Logins to W&B and the hubs, as far as the configuration uses them."""
    yield _wandb(config)
    path = "" if config is None else config.model.path
    if config is None or path.startswith(HF):
        from huggingface_hub import get_token

        how, needed = "hf auth login, or set HF_TOKEN", not _has_free_licence(path)
        yield _login("Hugging Face", how, known=bool(get_token()), needed=needed)
    if config is None or path.startswith(KAGGLE):
        token = "set KAGGLE_API_TOKEN, from the settings of your account"
        yield _login("Kaggle", token, known=has_kaggle_login())


def _has_free_licence(path: str) -> bool:
    """Whether nobody has to accept a licence: Gemma 4 is under Apache-2.0."""
    return "gemma-4" in path.lower()


def _login(hub: str, how: str, *, known: bool, needed: bool = True) -> Finding:
    if known:
        return Finding(hub, "ok", "there is a login")
    if not needed:
        return Finding(hub, "ok", "no login; this model needs none")
    return Finding(hub, "note", "no login; Gemma is only given to users who have one", how)


def _wandb(config: Config | None) -> Finding:
    if config is None:
        if tracking.is_logged_in():
            return Finding("W&B", "ok", "there is a login")
        return Finding("W&B", "note", "no login; runs are logged offline", "wandb login")
    try:
        mode, why = tracking.choose_mode(config)
    except ValueError as error:
        return Finding("W&B", "fault", str(error), "wandb login, or --wandb.mode offline")
    if mode == "offline" and config.wandb.mode == "auto":
        return Finding(
            "W&B", "note", why.partition(";")[0], "wandb login, or --wandb.mode disabled"
        )
    return Finding("W&B", "ok", why)


def devices(host: Host, config: Config | None) -> Iterator[Finding]:  # noqa: ARG001
    """GPUs, as Ray counts them."""
    if config is None or config.plan.platform != "gpu":
        return
    try:
        check_devices(config)
    except ValueError as error:
        yield Finding("devices", "fault", str(error), "choose a machine with more GPUs")
    else:
        yield Finding("devices", "ok", "the GPUs of the plan are there")
