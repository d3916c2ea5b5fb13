"""Products of weights in few bits: by torch on any device, the twin of the kernels."""

from torch import Tensor

from engine.formats.fp8 import Fp8Matrix
from engine.formats.groups import Groups, StoredGroups, round_to_4_bits
from engine.layer_config import Activation
from engine.ops.base import Ops, multiply_widened


class FormatOps(Ops):
    """Sums are float32."""

    def multiply_fp8(self, rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """rows: [T, K]; codes, scale: a `Fp8Matrix`, [N, K]; bias: [N] |-> [T, N] in the dtype of the rows."""
        if scale.ndim == 1:
            product = multiply_widened(rows, codes).mul_(scale)  # [T, N]
        else:
            product = multiply_widened(rows, Fp8Matrix(codes, scale).dense())
        return (product if bias is None else product.add_(bias)).to(rows.dtype)

    def multiply_gated_fp8(
        self, gate_up: Tensor, activation: Activation, codes: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`multiply_fp8` of what `gate` makes of gate_up: [T, 2 K]."""
        return self.multiply_fp8(self.gate(gate_up, activation), codes, scale, bias)

    def multiply_groups(self, rows: Tensor, weight: StoredGroups, bias: Tensor | None) -> Tensor:
        """rows: [T, K], weight: [N, K], bias: [N] |-> [T, N] in the dtype of the rows, to which weights are rounded."""
        product = multiply_widened(rows, weight.dense().to(rows.dtype))
        return (product if bias is None else product.add_(bias)).to(rows.dtype)

    def round_groups(self, rows: Tensor) -> Groups:
        """On the host: [N, K] bfloat16 or float32 |-> codes of 4 bits, see `round_to_4_bits`."""
        return round_to_4_bits(rows)
