"""`baton decode`: one decode worker in this process."""

from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from cli.models import locate_draft, locate_model
from runtime.config import DecodeConfig
from runtime.config_parts import NO_DRAFT
from runtime.hardware import wait_without_spinning
from runtime.lifecycle import follow_supervisor


def decode(config: Annotated[DecodeConfig, Parameter(name="*")] = DecodeConfig()) -> int:  # noqa: B008  frozen
    """Start one decode worker: it reads the KV of prompts and is the source of all tokens."""
    follow_supervisor(config.ready_fd)
    wait_without_spinning()
    from decode_worker.main import run  # here, so that other commands and --help do not wait for torch

    folder, draft = locate_model(config.model), locate_draft(config.model, config.draft_model)
    return run(replace(config, model=folder, draft_model=draft or NO_DRAFT))
