"""The checks of `launch.doctor` of what a configuration needs: room, time, model, data, logins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from configs.base import is_handle
from configs.schema import Config
from launch.host_checks import Finding, Host, State
from launch.preparation import check_devices, check_start, check_targets
from launch.submit import GENERATE, has_token
from pipeline.data.load import locate_data
from pipeline.data.models import hf_folder
from pipeline.data.models.find_shape import shape_of
from pipeline.data.models.model_shape import LOADING_COPIES
from pipeline.data.models.model_source import HF, KAGGLE, has_kaggle_login, locate_model
from pipeline.plan.cost_model.hardware import device_count
from pipeline.plan.forecast import forecast
from pipeline.plan.search.fitting import PlanCase, SizedPlan, choose_placement, shortage
from pipeline.plan.topology import GIB
from pipeline.run import tracking
from pipeline.run.run_folder import RunFolder

_PROCESS_GIB, _OTHERS_GIB = 1.0, 0.6
"""Memory of a process with devices, and of all others of a run and of Ray together, as measured
with the demo. Weights go to the devices one parameter after another."""
_LOGIN = {
    HF: "accept the licence on the model's page, then hf auth login, or set HF_TOKEN",
    KAGGLE: "accept the licence on the model's page, and set KAGGLE_API_TOKEN",
}


def run_checks(host: Host, config: Config) -> Iterator[Finding]:
    """All checks that need a configuration, but for logins."""
    if config.plan.platform == "gpu":
        try:
            check_devices(config)
            yield Finding("devices", "ok", "the GPUs of the plan are there")
        except ValueError as error:
            yield Finding("devices", "fault", str(error), "choose a machine with more GPUs")
    yield from _room(host, config)
    yield _model(config)
    yield from _data(config)


def logins(config: Config | None) -> Iterator[Finding]:
    """Ray's token, and logins to W&B and to the hubs, as far as the configuration uses them."""
    from huggingface_hub import get_token

    yield _ray_token()
    yield _wandb(config)
    path = "" if config is None else config.model.path
    hubs = ((HF, "Hugging Face", get_token() is not None), (KAGGLE, "Kaggle", has_kaggle_login()))
    for prefix, hub, has_login in hubs:
        if config is not None and not path.startswith(prefix):
            continue
        if has_login:
            yield Finding(hub, "ok", "there is a login")
        else:
            shown = "no login; models with a licence to accept need one"
            yield Finding(hub, "note", shown, _LOGIN[prefix])


def clock(config: Config | None) -> Finding:
    """The clock against the end of the budget."""
    now = f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    if config is None or config.budget.until_s is None or config.budget.until_s > time.time():
        return Finding("clock", "ok", now)
    shown = f"it is {now}, and budget.until = {config.budget.until} has passed"
    return Finding("clock", "fault", shown, "set a later budget.until")


def _room(host: Host, config: Config) -> Iterator[Finding]:
    """The plan, and the memory and disk that it needs."""
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
    memory, needed = host.memory_bytes / GIB, _memory_gib(case, chosen)
    shown = f"{memory:.1f} GiB available, {needed:.1f} needed (estimated)"
    if memory < needed:
        remedy = "end other programs, raise the container's limit, or use smaller sizes in [plan]"
        yield Finding("memory", "fault", shown, remedy)
    else:
        yield Finding("memory", "ok", shown)
    yield _disk(host, RunFolder.of(config).path, sum(planned.disk_gib.values()))
    if is_handle(config.model.path) and not (cache := _hub_cache(config.model.path)).exists():
        yield _disk(host, cache, planned.download_gib)


def _memory_gib(case: PlanCase, chosen: SizedPlan) -> float:
    """GiB of host memory that a run needs."""
    config = chosen.config
    processes = config.plan.num_samplers + int(config.plan.placement == "split")
    needed = processes * _PROCESS_GIB + _OTHERS_GIB
    if config.plan.platform == "cpu":  # its devices have the host's memory
        needed += chosen.peak_bytes * device_count(config) / GIB
    if config.plan.embeddings_in_host:
        copies = device_count(config) + LOADING_COPIES * processes
        needed += copies * case.shape.host_bytes(config.model.dtype) / GIB
    return needed


def _disk(host: Host, path: Path, needed: float) -> Finding:
    """The free space at a folder against the GiB that it needs besides the files in it."""
    files = (one for one in path.rglob("*") if one.is_file() and not one.is_symlink())
    needed = max(0.0, needed - sum(one.stat().st_size for one in files) / GIB)
    free = host.free_bytes(path) / GIB
    shown = f"{free:.1f} GiB free at {path}; at most {needed:.2f} more needed"
    if free >= needed:
        return Finding("disk", "ok", shown)
    remedy = "make space, or set run.dir or HF_HOME to a folder on a larger disk"
    return Finding("disk", "fault", shown, remedy)


def _hub_cache(handle: str) -> Path:
    if handle.startswith(KAGGLE):
        from kagglehub.config import get_cache_folder

        return Path(get_cache_folder()) / "models" / handle.removeprefix(KAGGLE)
    from huggingface_hub.constants import HF_HUB_CACHE

    name = handle.removeprefix(HF).partition("@")[0]
    return Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _model(config: Config) -> Finding:
    """The model is here, or its hub allows a download, and the settings of the adapter suit it.

    Also the adapter to start from, and the tensors of a flax checkpoint.
    """
    path, remedy = config.model.path, "set model.path to a folder with the model's files"
    try:
        folder = locate_model(config.model)
    except (FileNotFoundError, ValueError) as error:
        if is_handle(path):
            hub = HF if path.startswith(HF) else KAGGLE
            remedy = f"connect to the network (Kaggle: Settings, Internet), or {_LOGIN[hub]}"
        return Finding("model", "fault", str(error), remedy)
    try:
        if folder is not None:
            hf_folder.check_folder(folder)
            check_targets(config, folder)
        check_start(config, folder)
    except (FileNotFoundError, ValueError) as error:
        if str(error).startswith("lora."):
            remedy = "correct the settings of [lora]"
        return Finding("model", "fault", str(error), remedy)
    where = "not here: a run downloads it first" if folder is None else f"in {folder}"
    return Finding("model", "ok", f"{path}, {where}" if is_handle(path) else where)


def _data(config: Config) -> Iterator[Finding]:
    """The datasets are here, or their hub has them."""
    try:
        yield Finding("data", "ok", "; ".join(locate_data(config)))
    except ValueError as error:
        remedy = "set the path of a file or dataset that exists, or connect to the network"
        for line in str(error).splitlines():
            yield Finding("data", "fault", line, remedy)


def _wandb(config: Config | None) -> Finding:
    remedy = "wandb login, or --wandb.mode offline"
    if config is None:
        mode, why = "offline", "no login; runs are logged offline"
        if tracking.is_logged_in():
            mode, why = "online", "there is a login"
    else:
        try:
            mode, why = tracking.choose_mode(config)
        except ValueError as error:
            return Finding("W&B", "fault", str(error), remedy)
    if mode == "offline" and (config is None or config.wandb.mode == "auto"):
        return Finding("W&B", "note", why.partition(";")[0], remedy)
    return Finding("W&B", "ok", why)


def _ray_token() -> Finding:
    """The token of clusters that `ray start` makes; the private one of a run has its own."""
    if has_token():
        return Finding("Ray token", "ok", "there is one: ray start asks for it")
    shown = "none: everybody who can reach a cluster of ray start can run programs there"
    return Finding("Ray token", "note", shown, f"once, before ray start: .venv/bin/{GENERATE}")
