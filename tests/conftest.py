"""Runs before any test module imports torch: tests share cores with the workers they start, and Triton interprets.

Property tests use the same examples everywhere, however slow the machine. Each coroutine test has its own event loop.
"""

import asyncio
import inspect
import os
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("BATON_CHECK_STEPS", "1")  # before anything imports the engine; services get it, too

from runtime.hardware import wait_without_spinning
from tests.support.interpreter import interpret_kernels

wait_without_spinning()
interpret_kernels()
structlog.configure([structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()])  # plain tracebacks
settings.register_profile("baton", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", settings.get_profile("baton"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "baton"))
DEMO = "tests/services/demo/"
LONGEST = {"services", "simulator", "worker"}  # folders
PATIENCE_S = 60.0  # for a coroutine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that test processes end together."""
    items.sort(key=lambda item: not LONGEST & set(item.path.parts))


class Files(LoadScopeScheduling):  # type: ignore[misc]  # untyped
    """Schedules whole files to processes; all files of the shared demo service go to the same process."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        return DEMO if path.startswith(DEMO) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), PATIENCE_S))
    return True
