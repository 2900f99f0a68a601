"""Options, devices and results of `make test-accelerator`.

It starts pytest with `--confcutdir tests/accelerator`: the settings of the other tests, which are
for virtual CPU devices, do not apply.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from configs.machine import nvidia_gpus

if TYPE_CHECKING:
    import jax

    from tests.accelerator.compare import Difference
    from tests.accelerator.forms import Forms

Report = Callable[[str, Mapping[str, Any]], None]
"""Records what a test found: a sentence and its figures by name."""
HALF_HOSTS = "test_half_hosts.py"
"""Tests that start processes which need the chips: they run before this process takes them."""
_QUICK_COMPILE = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=1"
"""Without XLA's search for the fastest kernels, which takes minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("accelerator")
    group.addoption("--cpu", action="store_true", help="use eight virtual CPU devices")
    group.addoption("--json", metavar="FILE", help="write the results to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the devices before JAX starts. JAX also needs the CPU, to compare."""
    if config.getoption("cpu", default=False):
        os.environ["JAX_PLATFORMS"] = "cpu"
        count = "--xla_force_host_platform_device_count=8"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    elif nvidia_gpus().platform == "gpu":
        os.environ.setdefault("XLA_FLAGS", _QUICK_COMPILE)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != HALF_HOSTS)


@pytest.fixture(scope="session")
def virtual(request: pytest.FixtureRequest) -> bool:
    """Whether the devices are virtual CPU devices, as the user has asked."""
    return bool(request.config.getoption("cpu", default=False))


@pytest.fixture(scope="session")
def chips(*, virtual: bool) -> list[jax.Device]:
    """All devices of this process; the first use starts JAX."""
    import jax

    found = jax.devices()
    if found[0].platform == "cpu" and not virtual:
        pytest.exit(
            "JAX finds no accelerator: give `make test-accelerator` on a host that has one, after "
            "`make install-tpu` or `make install-cuda13`; ARGS=--cpu uses virtual CPU devices",
            returncode=1,
        )
    return found


@pytest.fixture(scope="session")
def forms(chips: list[jax.Device]) -> Forms:
    """The program forms on all devices, compared with one CPU device."""
    import jax

    from tests.accelerator.forms import Forms

    # Not the first one: operations that run on JAX's default device by mistake are then found.
    return Forms(chips, jax.devices("cpu")[-1])


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """Records what the test found, for the summary and for `--json`."""

    def record(finding: str, figures: Mapping[str, Any]) -> None:
        record_property("finding", finding)
        finite = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        record_property("figures", finite)

    return record


@pytest.fixture
def check(report: Report) -> Callable[[Difference], None]:
    """Records a difference from the CPU, which must be within its bounds."""

    def small(found: Difference) -> None:
        report(str(found), vars(found))
        assert found.is_small, str(found)

    return small


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Writes `--json` after each test, so that a machine's time limit loses none."""
    if (file := item.config.getoption("json", default=None)) is not None:
        results = _results(item.config.pluginmanager.get_plugin("terminalreporter"))
        text = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
        Path(file).write_text(text, encoding="utf-8")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Shows what each test found."""
    for one in _results(terminalreporter):
        if "finding" in one:
            terminalreporter.write_line(f"{one['check']}: {one['finding']}")


def _results(terminalreporter: Any) -> list[dict[str, Any]]:
    """What the tests so far found."""
    results = []
    for state in ("passed", "failed", "error", "skipped"):
        for one in terminalreporter.stats.get(state, ()):
            found = dict(getattr(one, "user_properties", ()))
            name = one.nodeid.rpartition("::")[2].removeprefix("test_")
            seconds = round(getattr(one, "duration", 0.0), 1)
            results.append({"check": name, "state": state, "seconds": seconds, **found})
    return results
