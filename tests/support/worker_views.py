"""Workers as the router sees them, for tests of its choices."""

from dataclasses import replace
from typing import Any

from gateway.router.worker_keys import WorkerKeys
from gateway.router.worker_view import WorkerView

DECODE = WorkerView(
    role="decode",
    address="d:1",
    incarnation="D1",
    layout=b"layout",
    is_alive=True,
    trouble="",
    max_running=4,
    num_mine=0,
    is_full=False,
    free_pages=10,
    num_pages=100,
    page_tokens=16,
    weights="w",
    empty_pages=3,
)
PREFILL = replace(DECODE, role="prefill", address="p:1", incarnation="P1", keys=WorkerKeys())
DECODE_2 = replace(DECODE, address="d:2", incarnation="D2", empty_pages=2, keys=WorkerKeys())
PREFILL_2 = replace(PREFILL, address="p:2", incarnation="P2", empty_pages=2, keys=WorkerKeys())
ALL = [PREFILL, PREFILL_2, DECODE, DECODE_2]


def forget_keys() -> None:
    """As tests share these views, and a view leads to what is known of the worker's keys."""
    for view in ALL:
        view.keys.reset()


FULL: dict[str, Any] = {"num_mine": 4}
