"""What every test gets: poisoned fresh memory, fixed hypothesis runs, the golden count."""

import math
import sys
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from tests import golden_data

hypothesis.settings.register_profile("moonlet", deadline=None, derandomize=True)
hypothesis.settings.load_profile("moonlet")

_WORKER_KEY = "moonlet_golden_vectors"
_from_workers: list[int] = []


# ---- fresh memory -------------------------------------------------------------------------------


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an allocating function: floats start as NaN, integers as their largest value."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        # who watches torch's operators shall not see the poison
        with torch.no_grad(), _disable_current_modes():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(math.nan)
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return wrapped


@pytest.fixture(autouse=True)
def _poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element nobody wrote shows up as NaN instead of as whatever the allocator left."""
    torch = sys.modules.get("torch")
    if torch is not None:
        # training switches this on for its thread; no test may inherit it
        torch.set_flush_denormal(False)
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


# ---- golden vectors -----------------------------------------------------------------------------


def _uses_golden_data(module: ModuleType | None) -> bool:
    if module is None:
        return False
    return any(
        value is golden_data or getattr(value, "__module__", None) == golden_data.__name__
        for value in vars(module).values()
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _uses_golden_data(getattr(item, "module", None)):
            item.add_marker("golden")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where golden vectors must be there, a skipped golden test is a failure."""
    report = yield
    strict = golden_data.is_strict() and item.get_closest_marker("golden") is not None
    if strict and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"a golden test may not be skipped here: {report.longrepr}"
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the count of a worker that has ended (called where pytest-xdist distributes)."""
    _from_workers.append(getattr(node, "workeroutput", {}).get(_WORKER_KEY, 0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Print the golden line below everything else; a worker hands its count to the main process."""
    worker_output = getattr(session.config, "workeroutput", None)
    if worker_output is not None:
        worker_output[_WORKER_KEY] = golden_data.counted()
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if worker_output is None and reporter is not None and not session.config.option.collectonly:
        kind = "full" if golden_data.is_full() else "subset"
        reporter.write_line(f"golden: {kind}, {golden_data.counted() + sum(_from_workers)} vectors")
