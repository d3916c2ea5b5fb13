"""Figures of the machine and the model for MBU and MFU: reads checkpoint headers, and measures peaks with torch.

    python -m bench.load.machine --threads 2

Measuring runs in its own process, so that the load generator does not import torch.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.load.ceilings import Ceilings, ModelSize, read_size
from engine.cpu import cpu_math
from engine.cpu.build import BuildError
from engine.weights.files import read_safetensors
from runtime.child import with_our_packages
from runtime.settings import ConfigError

READ_BYTES = 1 << 30  # far more than caches hold
MATRIX = 2048  # rows and columns
ROUNDS = 7


def read_model_size(folder: Path) -> ModelSize:
    """The size of a checkpoint folder's model. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        files = map(read_safetensors, sorted(folder.glob("*.safetensors")))
        tensors = {name: (math.prod(one.shape), one.num_bytes) for file in files for name, one in file.items()}
        return read_size(config, tensors)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"checkpoint={str(folder)!r} cannot be read ({type(error).__name__}: {error})") from error


def find_ceilings(peak_gbs: float, peak_tflops: float) -> Ceilings:
    """The given peaks; those that are 0 are measured here."""
    if not (peak_gbs and peak_tflops):
        command, environment = [sys.executable, "-P", "-m", "bench.load.machine"], with_our_packages(os.environ)
        measured = json.loads(subprocess.check_output(command, env=environment, text=True))
        peak_gbs, peak_tflops = peak_gbs or measured["gbs"], peak_tflops or measured["tflops"]
    return Ceilings(peak_gbs * 1e9, peak_tflops * 1e12)


def measure(threads: int) -> dict[str, float]:
    """Best of several rounds: GB/s of reading memory, and TFLOP/s of a bf16 matrix product."""
    import torch  # only here: the load generator does not need it

    if threads:
        torch.set_num_threads(threads)
    matrix = torch.ones(MATRIX, MATRIX, dtype=torch.bfloat16)
    product_s = min(_time(lambda: matrix @ matrix) for _ in range(ROUNDS))
    return {"gbs": measure_reading() / 1e9, "tflops": 2 * MATRIX**3 / product_s / 1e12}


def measure_reading() -> float:
    """Bytes a second that torch's threads read, the best of several rounds. Without a compiler torch's sum reads."""
    import torch

    with suppress(BuildError):
        return cpu_math.measure_reading(torch.get_num_threads())
    numbers = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(_time(numbers.sum) for _ in range(ROUNDS))


def _time(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0)
    print(json.dumps(measure(parser.parse_args().threads)))
