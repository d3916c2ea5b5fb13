"""Workers as the router sees them, for tests of its choices."""

from dataclasses import replace
from typing import Any

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
)
PREFILL = replace(DECODE, role="prefill", address="p:1", incarnation="P1")
DECODE_2 = replace(DECODE, address="d:2", incarnation="D2")
PREFILL_2 = replace(PREFILL, address="p:2", incarnation="P2")
FULL: dict[str, Any] = {"num_mine": 4}
