"""What somebody reads who follows one decode step: a worker's greedy step of the demo model, by torch alone, with the
core's own objects in the place of a role's additions, of metrics and of chunks that are learnt.

    python -m tests.support.step_reading [--json]

Files are those of which a function runs; their lines count whole. Types are those of which the step makes objects.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from engine.llm import LLM
from tests.support.decoding import build_scheduler
from wire.sampling import SamplingParams
from worker.loop import StepCounter, StepExtras, WorkerLoop
from worker.params import SequenceParams
from worker.plan import TokenBudget

ROOT = Path(__file__).parents[2]
PRODUCT = ("decode_worker", "engine", "kvtransfer", "runtime", "wire", "worker")
STEP = 8  # of the answer: all that is made once has been made


def read_step(step: Callable[[], object]) -> tuple[dict[str, int], set[str]]:
    """File |-> its lines, and names of types, of what the call runs on this thread."""
    files: set[Path] = set()
    types: set[str] = set()

    def enter(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
            files.add(path)
        if event == "call" and (code.co_name in ("__init__", "_make") or code.co_varnames[:1] == ("_cls",)):
            made = frame.f_locals[code.co_varnames[0]]  # the first argument; "_cls" is what tuples with names have
            kind = made if isinstance(made, type) else type(made)
            if kind.__module__.partition(".")[0] in PRODUCT:
                types.add(kind.__qualname__)

    sys.settrace(enter)
    try:
        step()
    finally:
        sys.settrace(None)
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}, types


def main() -> None:
    """Print the files, and the sums."""
    os.environ["CXX"] = "none"  # so that torch computes, and without oneDNN
    onednn: Any = torch.backends.mkldnn
    onednn.enabled = False
    engine = LLM(str(ROOT / "demo" / "target"), dtype="float32", device="cpu", context_tokens=256).engine
    prompt = np.arange(5, 37, dtype=np.int32)
    params = SequenceParams(
        "one", prompt.tobytes(), len(prompt) - 1, 16, gateway="g", handle=1, sampling=SamplingParams(temperature=0)
    )
    scheduler = build_scheduler(engine)
    loop = WorkerLoop(
        StepExtras(), scheduler, engine.runner, engine.rows, engine.pool, TokenBudget(64, "--chunk-tokens"),
        lambda _step, _updates: None, StepCounter(),
    )  # fmt: skip
    scheduler.admit(params, time.monotonic())
    for _ in range(STEP - 1):
        loop.step()
    files, types = read_step(loop.step)
    if "--json" in sys.argv:
        print(json.dumps([files, sorted(types)]))
        return
    for path, count in sorted(files.items()):
        print(f"{count:5} {path}")
    print(f"{sum(files.values()):5} lines in {len(files)} files; {len(types)} types: {', '.join(sorted(types))}")


if __name__ == "__main__":
    main()
