"""A real worker whose engine can be held in mid-step while everything else goes on.

python -m tests.faults.held_worker FILE prefill|decode FLAGS     # each step waits while FILE exists
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from cli.main import main
from runtime.hardware import wait_without_spinning

POLL_S = 0.01

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


def holdable(compute: Callable[ParamsT, ResultT], file: Path) -> Callable[ParamsT, ResultT]:
    """`compute`, after waiting while `file` exists."""

    def compute_unless_held(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        while file.exists():
            time.sleep(POLL_S)
        return compute(*args, **kwargs)

    return compute_unless_held


def run() -> None:
    file = Path(sys.argv.pop(1))
    wait_without_spinning()
    from engine.runner import Runner  # deferred: it imports torch

    Runner._run = holdable(Runner._run, file)  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    run()
