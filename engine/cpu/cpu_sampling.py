"""`sample` by the C++ kernel in cpu/cpu_sampling.cpp, on torch's number of threads. Trusts a checked batch."""

import ctypes
from functools import cache
from typing import Any

import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cpu import sampling_checks
from engine.cpu.build import BuildError, load_kernel
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import MOST
from engine.sampling.sample import sample
from wire.sampling import LEAST_TEMPERATURE

log = structlog.get_logger()
Field = NDArray[Any] | Tensor | None


class _BatonSampling(ctypes.Structure):
    """struct BatonSampling of cpu_sampling.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "tokens")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocabulary")),
        *((name, ctypes.c_float) for name in ("least_temperature", "most")),
        *((name, ctypes.c_void_p) for name in SamplingBatch._fields),
    ]


class CpuSampling:
    """Owns the loaded kernel."""

    def __init__(self, kernel: ctypes.CDLL) -> None:
        self._sample = kernel.baton_sample
        self._sample.restype = None
        self._sample.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """[S, V] float32 on the CPU -> [S] int64, or NO_TOKEN or NOT_A_NUMBER. Modifies `logits`."""
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        if not logits.shape[0]:
            return tokens
        arguments = _BatonSampling(
            logits.data_ptr(), tokens.data_ptr(), *logits.shape, LEAST_TEMPERATURE, MOST, *map(_find_address, batch)
        )
        self._sample(ctypes.addressof(arguments), torch.get_num_threads())
        return tokens


def _find_address(field: Field) -> int | None:
    if field is None:
        return None
    return field.data_ptr() if isinstance(field, Tensor) else field.ctypes.data


@cache
def load_cpu_sampling() -> CpuSampling | None:
    """The kernel, built on first use (seconds). None, with a warning in the log, if it cannot be built."""
    try:
        return CpuSampling(load_kernel("cpu_sampling"))
    except BuildError as error:
        log.warning("sampling is slow", reason=str(error))
        return None


def sample_on_cpu(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `Ops.sample`."""
    if sampling_checks.ARE_ON:
        sampling_checks.check_sampling(batch, logits)
    kernel = load_cpu_sampling()
    return sample(logits, batch, None if kernel is None else kernel.sample)
