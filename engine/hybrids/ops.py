"""The operations of layers with a state: by torch on any device, the twin of the kernels."""

from torch import Tensor

from engine.hybrids import recurrent
from engine.hybrids.recurrent import DeltaNet, DeltaStates, GatedConv
from engine.layers.mixer import StateRows
from engine.ops.base import Ops


class RecurrentOps(Ops):
    """Sums are float32."""

    def gated_conv(self, rows: Tensor, layer: GatedConv, at: StateRows, states: Tensor) -> Tensor:
        """LFM2's short convolution: out gate * conv(gate * value). Reads the states at `sources`, writes to `targets`.

        rows: [T, 3 C], contiguous columns: gates, out gates, values |-> [T, C] in the dtype of the rows.
        states: [num_slots, N, C / N, K - 1] float32, the last gate * value of each channel, oldest first; a head's are
        contiguous.
        """
        return recurrent.gated_conv(rows, layer, at, states)

    def delta_net(self, rows: Tensor, layer: DeltaNet, at: StateRows, states: DeltaStates) -> Tensor:
        """Qwen3.5's Gated DeltaNet between its projections. Reads the states at `sources`, writes to `targets`.

        rows: [T, 2 Hk Kd + 2 Hv Vd + 2 Hv], contiguous columns: queries, keys and values before the convolution, z of
        the output's gate [Hv Vd], b [Hv] and a [Hv] |-> [T, Hv Vd] in the dtype of the rows.
        """
        return recurrent.delta_net(rows, layer, at, states)
