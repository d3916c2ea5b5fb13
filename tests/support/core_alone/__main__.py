"""Runs a process of a service without satellites. The settings are JSON.

    python -m tests.support.core_alone prefill|decode SETTINGS --ready-fd=FD
    python -m tests.support.core_alone gateway SETTINGS

A gateway here is the router, which asks one request of its workers and prints the answer's tokens.
"""

import asyncio
import json
import sys
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.router.admission import Admission
from gateway.router.engine_client import TokenizedRequest
from gateway.router.fleet import Fleet
from gateway.router.placer import Placer
from gateway.router.router import Router
from wire.sampling import SamplingParams

PATIENCE_S = 120.0  # with a loaded machine


async def ask(prefill: str, decode: str, prompt: list[int], max_tokens: int) -> list[int]:
    """By hand-off: no prompt is computed by the decode worker."""
    fleet = Fleet([prefill], [decode], 1.0, PATIENCE_S, 0)
    placer = Placer(no_prefill="fail")
    router = Router(fleet, Admission(1), PATIENCE_S, PATIENCE_S, CollectorRegistry(), False, placer)
    fleet.start()
    try:
        assert await fleet.changes.until(lambda: all(view.is_alive for view in fleet.views()), PATIENCE_S)
        greedy = SamplingParams(temperature=0.0)
        wanted = TokenizedRequest("core", tuple(prompt), max_tokens, greedy, frozenset())
        tokens: list[int] = []
        with router.admit(1) as admitted:
            async with aclosing(router.generate(wanted, admitted)) as parts:
                async for part in parts:
                    tokens += part.token_ids
        return tokens
    finally:
        await fleet.close()


def main(role: str, settings: dict[str, Any]) -> int:
    """Returns the exit code."""
    if role == "gateway":
        print(json.dumps(asyncio.run(ask(**settings))))
        return 0
    from runtime.config import DecodeConfig, PrefillConfig  # each process imports what it is

    if role == "prefill":
        import prefill_worker.main

        return prefill_worker.main.run(PrefillConfig(**settings))
    import decode_worker.main

    return decode_worker.main.run(DecodeConfig(**settings))


if __name__ == "__main__":
    _, name, values, *events = sys.argv
    ready = {"ready_fd": int(events[0].partition("=")[2])} if events else {}
    sys.exit(main(name, json.loads(values) | ready))
