"""Layers with a state: what mixes rows in the place of attention, and how it is read from a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.hybrids.config import DeltaNetConfig
from engine.hybrids.ops import RecurrentOps
from engine.hybrids.recurrent import DeltaNet, DeltaStates, GatedConv
from engine.layers.mixer import Mixer, StateRows
from engine.models.assemble import LayerBuilder


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetMixer:
    """See `Mixer`."""

    layer: DeltaNet
    ops: RecurrentOps

    def __call__(self, rows: Tensor, at: StateRows, states: Sequence[Tensor]) -> Tensor:
        return self.ops.delta_net(rows, self.layer, at, DeltaStates(*states))


@dataclass(frozen=True, slots=True, eq=False)
class GatedConvMixer:
    """See `Mixer`."""

    layer: GatedConv
    ops: RecurrentOps

    def __call__(self, rows: Tensor, at: StateRows, states: Sequence[Tensor]) -> Tensor:
        return self.ops.gated_conv(rows, self.layer, at, *states)


def build_mixer(builder: LayerBuilder) -> Mixer:
    """This rank's part of a layer of `ModelConfig.recurrent`."""
    reader, own = builder.format.reader, builder.config.recurrent
    ops = builder.format.ops.find(RecurrentOps)
    conv = torch.cat(reader.weights(builder.table.products["conv"])).to(reader.device, torch.float32)
    if not isinstance(own, DeltaNetConfig):
        return GatedConvMixer(GatedConv(conv, builder.vector("conv_bias", torch.float32)), ops)
    layer = DeltaNet(
        own.num_key_heads,
        own.num_value_heads,
        own.key_dim,
        own.value_dim,
        conv,
        decay_rate=-builder.wide("log_decay").exp(),
        dt_bias=builder.wide("dt_bias"),
        norm=builder.wide("state_norm"),
        eps=builder.config.rms_eps,
    )
    return DeltaNetMixer(layer, ops)
