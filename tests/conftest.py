"""Runs before any test module imports torch: tests share cores with the workers they start, and Triton interprets.

Property tests use the same examples everywhere, however slow the machine. Each coroutine test has its own event loop.
"""

import asyncio
import functools
import gc
import inspect
import os
import sys
from typing import Any

import httpx
import pytest
import structlog
from httpx._transports import default as httpx_transports
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("BATON_CHECK_STEPS", "1")  # before anything imports the engine; services get it, too

from runtime.hardware import wait_without_spinning
from runtime.lifecycle import spare_what_is_here
from tests.support.forks import fork_test_processes
from tests.support.interpreter import interpret_kernels
from tests.support.rewriting import compile_tests

sys.dont_write_bytecode = False  # a run has hundreds of processes: each module is compiled once, not in each of them
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
wait_without_spinning()
interpret_kernels()
structlog.configure([structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()])  # plain tracebacks
settings.register_profile(
    "baton", max_examples=35, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("baton"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "baton"))
DEMO = "tests/services/demo/"
LONGEST = (  # files, by the seconds of CPU that they take with the processes they start: 90 to 5
    "test_surface_service", "test_roles", "test_images", "test_answers", "test_draft_heads", "test_loop_ahead",
    "test_gpu_waits", "test_gpu_compile", "test_wheel", "test_weights", "test_grammar", "test_ring_tokens",
    "test_fleet_service", "test_many_models", "test_dialect", "test_simulate", "test_restart", "test_experts",
    "test_trees", "test_grammar_answers", "test_ranks", "test_families", "test_folders", "test_simulator",
    "test_batches_service", "test_adapters", "test_batches", "test_event_loop", "test_lending", "test_templates",
    "test_cases", "test_packed", "test_schemathesis", "test_gpu_sampling", "test_recurrent", "test_states",
    "test_fallback", "test_serve", "test_embeddings", "test_child", "test_gpu_groups", "test_flashinfer", "test_main",
    "test_gateway_packages", "test_train_head", "test_kernels", "test_speculation_equality", "test_deploy",
    "test_core", "test_worker_ports", "test_core_alone", "test_refusals", "test_kubernetes", "test_connection",
    "test_gpu_check", "test_dialects", "test_gpu_latents", "test_limits", "test_every_route", "test_fp8",
    "test_new_weights", "test_kv_files", "test_capacity", "test_demo", "test_chats", "test_extremes",
)  # fmt: skip
# Each client reads all certificates, which takes 40 ms, also where it uses none: those of a process have them once.
vars(httpx_transports)["create_ssl_context"] = functools.cache(httpx.create_ssl_context)
PATIENCE_S = 180.0  # for a coroutine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that test processes end together."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection() -> None:
    gc.disable()  # to look again and again for cycles in modules took a quarter of the time


def pytest_collection_finish() -> None:
    gc.enable()
    gc.set_threshold(10_000, 20, 20)  # tests make objects by the thousand, and Hypothesis listens to each collection
    spare_what_is_here()  # pytest's own collections at the end skip it, too


class Files(LoadScopeScheduling):  # type: ignore[misc]  # untyped
    """Schedules whole files to processes; all files of the shared demo service go to the same process."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        return DEMO if path.startswith(DEMO) else path


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    fork_test_processes()  # of a template, which imports meanwhile
    compile_tests(config)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), PATIENCE_S))
    return True
