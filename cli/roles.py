"""`baton gateway`, `baton prefill` and `baton decode`: one process of a service, in this process."""

import os
import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from cli.models import CONFIGURATION, TOKENIZER, check_files, choose_served_name, fetch_tokenizer, locate
from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig
from runtime.hardware import wait_without_spinning
from runtime.lifecycle import follow_supervisor

# The heavy imports stand in the functions, so that other commands and --help need not wait for torch or the web server.


def prefill(config: Annotated[PrefillConfig, Parameter(name="*")] = PrefillConfig()) -> int:  # noqa: B008  frozen
    """Start one prefill worker: it computes the KV of prompts and offers it to decode workers."""
    follow_supervisor(config.ready_fd)
    wait_without_spinning()
    from prefill_worker.main import run

    return run(locate(config))


def decode(config: Annotated[DecodeConfig, Parameter(name="*")] = DecodeConfig()) -> int:  # noqa: B008  frozen
    """Start one decode worker: it reads the KV of prompts and generates all tokens."""
    follow_supervisor(config.ready_fd)
    wait_without_spinning()
    from decode_worker.main import run

    return run(locate(config))


def gateway(config: Annotated[GatewayConfig, Parameter(name="*")]) -> int:
    """Start the gateway: it answers REST and gRPC and sends prompts to workers."""
    follow_supervisor(config.ready_fd)
    folder = fetch_tokenizer(config.model)
    check_files(folder, (CONFIGURATION, TOKENIZER))
    # Transformers takes torch for not installed: the gateway uses no tensors, and importing torch would double the time
    # that it takes to start, and take 190 MB. The variable keeps transformers from warning of that.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from gateway.main import run

    return run(replace(config, model=folder, served_name=config.served_name or choose_served_name(config.model)))
