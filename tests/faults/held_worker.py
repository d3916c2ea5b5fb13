"""A real worker whose engine can be held in mid-step, or slowed down, while everything else goes on.

python -m tests.faults.held_worker FILE prefill|decode FLAGS

Each forward waits while FILE exists; if FILE contains a number, only that many seconds for each of its tokens.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.main import main
from runtime.hardware import wait_without_spinning

POLL_S = 0.01


def holdable(compute: Callable[[Any, Any], Any], file: Path) -> Callable[[Any, Any], Any]:
    """Runner._run, after waiting for `file`."""

    def compute_unless_held(runner: Any, step: Any) -> Any:
        began = time.monotonic()
        while file.exists():
            token_s = float(file.read_text() or "inf")
            left_s = began + token_s * len(step.layout.positions) - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(left_s, POLL_S))
        return compute(runner, step)

    return compute_unless_held


def run() -> None:
    file = Path(sys.argv.pop(1))
    wait_without_spinning()
    from engine.runner import Runner  # deferred: it imports torch

    Runner._run = holdable(Runner._run, file)  # type: ignore[assignment, method-assign]
    main()


if __name__ == "__main__":
    run()
