"""`baton prefill`: one prefill worker in this process."""

from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from cli.models import locate_draft, locate_model
from runtime.config import PrefillConfig
from runtime.config_parts import NO_DRAFT
from runtime.hardware import wait_without_spinning
from runtime.lifecycle import follow_supervisor


def prefill(config: Annotated[PrefillConfig, Parameter(name="*")] = PrefillConfig()) -> int:  # noqa: B008  frozen
    """Start one prefill worker: it computes the KV of prompts and offers it to decode workers."""
    follow_supervisor(config.ready_fd)
    wait_without_spinning()
    from prefill_worker.main import run  # here, so that other commands and --help do not wait for torch

    folder, draft = locate_model(config.model), locate_draft(config.model, config.draft_model)
    return run(replace(config, model=folder, draft_model=draft or NO_DRAFT))
