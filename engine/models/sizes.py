"""Whether a config's numbers can be those of the weights beside it: asked before anything is built by them.

Imports no torch.
"""

from collections.abc import Mapping

from engine.models.config import ModelConfig
from engine.weights.entry import TensorEntry

CODES_A_BYTE = 4  # of weights in few bits, at most


def check_sizes(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
    """ValueError names the number. entries: of all files of the checkpoint."""
    if config.num_layers > len(entries):
        raise ValueError(
            f"num_hidden_layers is {config.num_layers}, more than the {len(entries)} tensors of the checkpoint: "
            "they do not belong together"
        )
    if config.moe is None:
        return
    num_experts = config.moe.routing.num_experts * sum(layer.is_moe for layer in config.layers)
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    if num_experts * config.hidden_size > CODES_A_BYTE * num_bytes:
        raise ValueError(
            f"{config.moe.routing.num_experts} experts a layer and hidden_size {config.hidden_size} are more than the "
            f"{num_bytes} bytes of the checkpoint's weights can hold: they do not belong together"
        )
