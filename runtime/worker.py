"""The frame of a worker process: configuration to exit code, with every failure to start told in one line.

Knows nothing of what a worker does: that is passed in.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

import structlog
import uvloop

from runtime.config import DecodeConfig, PrefillConfig
from runtime.hardware import available_memory_bytes, resolve_context, resolve_num_pages
from runtime.lifecycle import ReadyReporter
from runtime.logs import setup_logging

log = structlog.get_logger()

EngineT = TypeVar("EngineT")
ConfigT = TypeVar("ConfigT", PrefillConfig, DecodeConfig)


def run_worker(
    role: str,
    config: ConfigT,
    build: Callable[[ConfigT, ReadyReporter], EngineT],
    serve: Callable[[ConfigT, EngineT, ReadyReporter], Coroutine[None, None, None]],
) -> int:
    """Build the engine, then serve until stopped. Returns 0 after a signal, 1 when it could not start."""
    setup_logging(role, config.log_level)
    reporter = ReadyReporter(config.ready_fd, role)
    try:
        engine = build(config, reporter)
        uvloop.run(serve(config, engine, reporter))
    except (ValueError, OSError) as error:
        log.error("cannot start", reason=str(error))
        return 1
    return 0


def size_pool(
    config: PrefillConfig | DecodeConfig, model_context_tokens: int, page_bytes: int, gpu_free_bytes: int | None
) -> int:
    """Pages of this worker's pool. Raises ConfigError when not even one context fits."""
    return resolve_num_pages(
        config,
        context_tokens=resolve_context(config.max_context_tokens, model_context_tokens),
        page_bytes=page_bytes,
        available_bytes=available_memory_bytes() if gpu_free_bytes is None else gpu_free_bytes,
    )


def announce(
    reporter: ReadyReporter, address: str, metrics_address: str, incarnation: str, detail: Mapping[str, str], slow: bool
) -> None:
    """Tell the log and the supervisor that this worker serves; `slow`: its attention is a fallback."""
    if slow:
        log.warning("slow attention", reason=detail["attention_reason"])
    log.info("ready", address=address, metrics=metrics_address, incarnation=incarnation, **detail)
    reporter.ready(address, metrics_address, incarnation, detail)
