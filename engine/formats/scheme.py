"""How a config says that a checkpoint's matrices are quantised; the files' headers say the rest. Imports no torch.

Only what is said of weights counts: settings of activations and of the KV cache are ignored, and so are the names of
modules that stay plain, since a weight that is stored plain is plain.
"""

from dataclasses import dataclass
from typing import Any

from engine.json_values import Json, collection, flag, integer

Block = tuple[int, int]  # rows and columns that share a scale; 0: all
GEMM, GPTQ, V2 = ("gemm", "GEMM"), "gptq", "gptq_v2"
COMPRESSED = (
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision", "dense",
)  # fmt: skip
RULES: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8",)},
    "compressed-tensors": {"format": COMPRESSED, "transform_config": ({},)},
    "awq": {"bits": (4,), "version": GEMM, "format": GEMM, "checkpoint_format": GEMM},
    GPTQ: {"bits": (4, 8), "format": (GPTQ, V2), "checkpoint_format": (GPTQ, V2), "is_marlin_format": (False,)},
    "mxfp4": {},
}  # quant_method |-> key |-> supported values, if it is there
SPARSITY_RULES = {"format": ("dense",)}
GROUP_RULES = {"format": COMPRESSED}
CODES = {"int 4": 4, "int 8": 8, "float 8": 8}  # of compressed-tensors |-> bits


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint is quantised, by `read_scheme`."""

    method: str  # a key of FORMS in quantised_forms.py
    bits: tuple[int, ...] = ()  # of GPTQ's codes, one value; of packed ones
    zero_offset: int = 0  # added to GPTQ's stored zeros
    blocks: tuple[Block, ...] = ()  # of FP8 and compressed-tensors
    needed: tuple[str, ...] = ()  # suffixes of tensors that other checkpoints of the method may lack


def read_scheme(given: Json) -> Scheme:
    """given: `ModelConfig.quantization`. ValueError names what is not supported and what is."""
    method = str(given.get("quant_method"))
    _check({"quant_method": method}, {"quant_method": tuple(RULES)})
    _check(given, RULES[method])
    if method == "compressed-tensors":
        return _read_compressed(given)
    if method == GPTQ:
        offset = 0 if (given.get("checkpoint_format") or given.get("format")) == V2 else 1  # the first stores zero - 1
        needed = (".g_idx",) if flag(given, "desc_act") else ()
        return Scheme(method, (int(given.get("bits") or 4),), offset, needed=needed)
    block = _read_block(given, "weight_block_size")
    return Scheme(method, blocks=((0, 0), (1, 0)) if block is None else (block,))


def read_weight_bytes(given: Json) -> float:
    """Bytes of a weight that a file has quantised, with its part of a group's scale. given: as for `read_scheme`."""
    scheme = read_scheme(given)
    bits = max(scheme.bits, default=4 if scheme.method in ("awq", "mxfp4") else 8)
    return (bits + (0.25 if bits == 4 else 0)) / 8


def _check(given: Json, rules: dict[str, tuple[Any, ...]], where: str = "quantization_config") -> None:
    for key, supported in rules.items():
        if (value := given.get(key)) is not None and value not in supported:
            names = ", ".join(map(str, supported))
            raise ValueError(f"{key} {value!r} in {where} is not supported; supported: {names}")


def _read_block(given: Json, key: str) -> Block | None:
    match given.get(key):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case value:
            raise ValueError(f"{key} in quantization_config must be two positive integers, not {value!r}")


def _read_compressed(given: Json) -> Scheme:
    _check(collection(given, "sparsity_config", dict), SPARSITY_RULES, "sparsity_config")
    bits, blocks, has_zeros = set(), [], []
    for name, group in collection(given, "config_groups", dict).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ValueError(f"{name} in quantization_config has no weights; activations alone are not quantised here")
        _check(group, GROUP_RULES, name)
        codes = f"{weights.get('type', 'int')} {weights.get('num_bits', 8)}"
        _check({"weights": codes}, {"weights": tuple(CODES)}, name)
        bits.add(CODES[codes])
        blocks.append(_read_strategy(weights, name))
        has_zeros.append(not flag(weights, "symmetric", True))
    needed = (".weight_zero_point",) if has_zeros and all(has_zeros) else ()
    return Scheme("compressed-tensors", tuple(bits), blocks=tuple(blocks), needed=needed)


def _read_strategy(weights: Json, name: str) -> Block:
    """Without a strategy the size of a group decides."""
    size = integer(weights, "group_size", least=-1) if weights.get("group_size") is not None else 0
    strategy = weights.get("strategy") or ("group" if size > 0 else "channel" if size else "tensor")
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, max(size, 0))}
    blocks["block"] = _read_block(weights, "block_structure") or (128, 128)
    _check({"strategy": strategy}, {"strategy": tuple(blocks)}, name)
    return blocks[strategy]
