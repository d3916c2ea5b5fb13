"""`sample` for logits on a GPU: uploads the batch, launches cuda/gpu_sampling.py, and does not wait.

Imports triton, so import it with `importlib` and only where logits are on a GPU. The caller checks the batch.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.fields import SamplingTensors, to_bytes
from engine.cuda.gpu_sampling import choose_tokens
from engine.sampling.batch import SamplingBatch
from engine.staging import upload


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[S, V] float32 -> [S] int64 on the same device, or NO_TOKEN or NOT_A_NUMBER."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    choose_tokens(logits, upload_batch(batch, logits.device), tokens)
    return tokens


def upload_batch(batch: SamplingBatch, device: torch.device) -> SamplingTensors:
    """Upload in one copy. `counts`, and extra ids that are a tensor, are not copied, unless they are cut out of others:
    where they begin at an odd place, Triton would compile the kernels anew, for seconds.
    """
    rows = len(batch.params)
    fields = batch._asdict() | {"params": to_bytes(batch.params)}
    for name, field in fields.items():
        if field is None:
            fields[name] = _build_none(name, rows)
        elif isinstance(field, Tensor) and field.storage_offset():
            fields[name] = field.clone()
    arrays: dict[str, NDArray[Any]] = {name: field for name, field in fields.items() if not isinstance(field, Tensor)}
    fields |= dict(zip(arrays, upload(list(arrays.values()), device), strict=True))
    return SamplingTensors(**fields)


def _build_none(name: str, rows: int) -> NDArray[Any]:
    """A stand-in for a field that no row has."""
    if name.endswith("_line"):
        return np.full(rows, -1, np.int32)
    if name.endswith("_starts"):
        return np.zeros(rows + 1, np.int32)
    return np.zeros(1, np.float32 if name == "bias_values" else np.int32)
