"""How a config says that a checkpoint's matrices are quantised; their headers say the rest. Imports no torch."""

from dataclasses import dataclass

Block = tuple[int, int]  # rows and columns that share a scale; 0: all


@dataclass(frozen=True, slots=True)
class Scheme:
    """Built by models/read_quantization.py."""

    method: str  # a key of FORMS in quantised_forms.py
    bits: tuple[int, ...] = ()  # of GPTQ's codes, one value; of packed ones
    zero_offset: int = 0  # added to GPTQ's stored zeros
    blocks: tuple[Block, ...] = ()  # of FP8 and compressed-tensors
    needed: tuple[str, ...] = ()  # suffixes of tensors that other checkpoints of the method may lack
