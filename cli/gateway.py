"""`baton gateway`: the gateway in this process."""

import os
import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from cli.models import choose_served_name, fetch_tokenizer, locate_model
from runtime.config import GatewayConfig
from runtime.lifecycle import follow_supervisor


def gateway(config: Annotated[GatewayConfig, Parameter(name="*")]) -> int:
    """Start the gateway: it answers REST and gRPC and sends prompts round the ring."""
    follow_supervisor(config.ready_fd)
    _hide_torch()
    from gateway.main import run  # here, so that other commands and --help do not wait for the web server

    folder = fetch_tokenizer(locate_model(config.model))
    return run(replace(config, model=folder, served_name=config.served_name or choose_served_name(config.model)))


def _hide_torch() -> None:
    """Have transformers believe that torch is not installed: it would import it, for nothing that a gateway uses.

    That is half of the time that a gateway takes to start, and 190 MB.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # or it says that torch is missing
