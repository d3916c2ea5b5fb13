"""Sampling from fields at fixed addresses, by torch: the twin of the kernels, in graphs that are captured on a CPU."""

from torch import Tensor

from engine.cuda.fields import SamplingTensors
from engine.ops.base import Ops
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import PARAMS


def read_fields(fields: SamplingTensors) -> SamplingBatch:
    """On the CPU: a batch that shares the fields' memory."""
    arrays = {name: tensor.numpy() for name, tensor in fields._asdict().items()}
    begin, end = arrays["bias_starts"][[0, -1]]
    arrays["params"] = arrays["params"].view(PARAMS)[:, 0]
    arrays |= {name: arrays[name][begin:end] for name in ("bias_ids", "bias_values")}
    arrays["bias_starts"] = arrays["bias_starts"] - begin
    return SamplingBatch(**arrays | {"counts": fields.counts, "extra_starts": None, "extra_ids": None})


class FieldOps(Ops):
    """Sampling in a captured step."""

    def sample_into(self, out: Tensor, logits: Tensor, fields: SamplingTensors) -> None:
        """`sample` into `out`, [S] int64, with fields on the logits' device. Does not modify `logits`."""
        out.copy_(self.sample(logits.clone(), read_fields(fields)))
