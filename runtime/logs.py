"""Structured logs: one line an event, JSON when nobody watches. Knows formats, nothing of what is logged."""

import logging
import sys

import structlog


def setup_logging(role: str, level: str) -> None:
    """Send structlog's events to stderr, each with `role` and whatever is bound to the context (request_id)."""
    watched = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if watched else structlog.processors.JSONRenderer()
    )

    def add_role(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("role", role)
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            add_role,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
