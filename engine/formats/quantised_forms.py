"""The forms of quantised matrices in safetensors files: their tensors, what the headers must say, and their bits.

Sources: https://github.com/vllm-project/compressed-tensors, https://github.com/ModelCloud/GPTQModel,
https://github.com/casper-hansen/AutoAWQ, https://huggingface.co/openai/gpt-oss-20b, DeepSeek-V3's README_WEIGHTS.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.formats.fp8 import BLOCK, E4M3, Fp8Matrix
from engine.formats.groups import GROUP, Groups, with_zeros
from engine.formats.scheme import Block, Scheme
from engine.weights.checkpoint import FormT
from engine.weights.files import TensorEntry

INTS, SCALES, FP8, INT8 = ("I32",), ("F32", "F16", "BF16", "F8_E8M0"), "F8_E4M3", "I8"
SIZES = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E8M0": 1, FP8: 1, INT8: 1, "U8": 1}  # bytes
EXACT = (torch.float16, torch.bfloat16)  # scales whose products with codes float32 holds
WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column of eight |-> its place among the nibbles of a word, from the lowest
MXFP4_ZERO = 12
MXFP4_CODES = torch.tensor([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], dtype=torch.uint8)
MXFP4_PAIRS = torch.stack((MXFP4_CODES.repeat(16), MXFP4_CODES.repeat_interleave(16)), 1).view(torch.int16)[:, 0]

Parts = Mapping[str, Tensor]  # suffix |-> tensor


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """A matrix [N, K], or several, as headers describe them."""

    dtype: str  # the format's name
    num_rows: int  # N
    depth: int  # K
    block: Block  # no zeros
    bits: int = 8
    num_stacked: int = 0  # in one tensor, which the model has transposed

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model has it."""
        return (self.num_stacked, self.depth, self.num_rows) if self.num_stacked else (self.num_rows, self.depth)

    @property
    def table(self) -> tuple[int, int]:
        """[R, G], the shape of all scales."""
        return -(-self.num_rows // self.block[0]), -(-self.depth // self.block[1])


class Coded(NamedTuple):
    """w[n, k] = (codes[n, k] - zero) * scale, with the zero and the scale of its block."""

    layout: CodeLayout
    codes: Tensor  # [N, K] uint8, or float8
    scale: Tensor  # [R, G] of a float dtype
    zeros: Tensor | int  # [R, G] uint8, or of all blocks
    order: Tensor | None = None  # [K] int32: the block of each column; None: in order

    def dense(self) -> Tensor:
        """[N, K] float32, rounded once"""
        depth, width = self.layout.depth, self.layout.block[1]
        width = 1 if self.order is not None or depth % width else width
        values = self.codes.float().unflatten(1, (-1, width))  # type: ignore[no-untyped-call]
        columns = torch.arange(0, depth, width) // self.layout.block[1] if self.order is None else self.order
        scale, zeros = (table[:, columns, None] for table in self._tables())
        found: Tensor = values.sub_(zeros).mul_(scale).flatten(1)
        return found

    def find(self, form: type[FormT]) -> FormT | None:
        """See `StoredMatrix`."""
        found = self.groups() if issubclass(form, Groups) else self.fp8() if issubclass(form, Fp8Matrix) else None
        return cast("FormT | None", found)

    def groups(self) -> Groups | None:
        """None if a block is not a whole number of groups, or if floats would round twice."""
        width, depth = self.layout.block[1], self.layout.depth
        is_exact = self.codes.dtype is torch.uint8 and self.scale.dtype in EXACT
        if not is_exact or self.order is not None or width % GROUP or depth % width:
            return None
        scale, zeros = (table.repeat_interleave(width // GROUP, 1) for table in self._tables())
        return with_zeros(self.codes.contiguous(), scale, zeros, self.layout.bits)

    def fp8(self) -> Fp8Matrix | None:
        """None if codes are not e4m3, or if blocks are narrow and not of BLOCK columns."""
        is_narrow = self.scale.shape[1] > 1
        if self.codes.dtype is not E4M3 or (is_narrow and self.layout.block[1] != BLOCK):
            return None
        scale, _zeros = self._tables()
        return Fp8Matrix(self.codes, scale if is_narrow else scale[:, 0])

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Scales and zeros, [N, G] float32."""
        rows = torch.arange(self.layout.num_rows) // self.layout.block[0]
        zeros = self.zeros if isinstance(self.zeros, Tensor) else torch.tensor(self.zeros).expand(self.scale.shape)
        return self.scale.float()[rows], zeros.float()[rows]


@dataclass(frozen=True, slots=True)
class Headers:
    """The tensors of one matrix as headers describe them. Each refusal is a ValueError that names the tensor."""

    base: str  # of the names
    entries: Mapping[str, TensorEntry]  # suffix |-> entry
    read: Callable[[str], Tensor]  # a tensor by its name

    def find(self, suffix: str) -> TensorEntry:
        if suffix not in self.entries:
            raise ValueError(f"{self.base}{suffix} is missing, and the other tensors of its matrix are there")
        return self.entries[suffix]

    def shape(self, suffix: str, dtypes: tuple[str, ...], num_dims: int | None = 2) -> tuple[int, ...]:
        """num_dims None: any."""
        entry = self.find(suffix)
        shape = entry.shape
        is_usable = entry.dtype in dtypes and num_dims in (None, len(shape))
        is_usable = is_usable and all(type(size) is int and size > 0 for size in shape)
        if not is_usable or math.prod(shape) * SIZES[entry.dtype] != entry.num_bytes:
            expected = " or ".join(dtypes) + (f" of {num_dims} dimensions" if num_dims else "")
            found = f"{entry.dtype} {list(shape)} in {entry.num_bytes} bytes"
            raise ValueError(f"{self.base}{suffix} is {found}, expected {expected}")
        return shape

    def expect(self, suffix: str, dtypes: tuple[str, ...], expected: tuple[int, ...]) -> None:
        if (found := self.shape(suffix, dtypes, None)) != expected:
            raise ValueError(f"{self.base}{suffix} has shape {list(found)}, and its matrix needs {list(expected)}")


def _block_of(headers: Headers, suffix: str, num_rows: int, depth: int, scheme: Scheme) -> Block:
    """The block of the scheme that fits the scales [R, G]."""
    shape = headers.shape(suffix, SCALES, None)
    table = (*shape, 1, 1)[: max(len(shape), 2)]
    for rows, columns in scheme.blocks:
        block = rows or num_rows, columns or depth
        if table == (-(-num_rows // block[0]), -(-depth // block[1])):
            return block
    raise ValueError(f"{headers.base}{suffix} has shape {list(shape)}, which fits no blocks of [{num_rows}, {depth}]")


def _check_order(headers: Headers, suffix: str, depth: int) -> None:
    if suffix in headers.entries:
        headers.expect(suffix, INTS, (depth,))


def _scale_of(names: Mapping[str, object]) -> str:
    return ".weight_scale_inv" if ".weight_scale_inv" in names else ".weight_scale"


def _describe_bytes(headers: Headers, scheme: Scheme) -> CodeLayout:
    num_rows, depth = headers.shape(".weight", (FP8, INT8))
    scale, zeros = _scale_of(headers.entries), ".weight_zero_point"
    block = _block_of(headers, scale, num_rows, depth, scheme)
    is_int = headers.entries[".weight"].dtype == INT8
    if is_int and zeros in headers.entries:
        headers.expect(zeros, (INT8,), headers.shape(scale, SCALES, None))
    return CodeLayout("INT8" if is_int else "FP8", num_rows, depth, block)


def _decode_bytes(parts: Parts, layout: CodeLayout, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | int]:
    codes, zeros, scale = parts[".weight"], parts.get(".weight_zero_point"), parts[_scale_of(parts)]
    if codes.dtype is not torch.int8:
        return codes, scale, 0
    return _offset(codes), scale, 128 if zeros is None else _offset(zeros)


def _describe_packed(headers: Headers, scheme: Scheme) -> CodeLayout:
    packed = headers.shape(".weight_packed", INTS)
    headers.expect(".weight_shape", ("I64", "I32"), (2,))
    num_rows, depth = headers.read(headers.base + ".weight_shape").tolist()
    fitting = [bits for bits in scheme.bits if depth > 0 and packed == (num_rows, _words(depth, bits))]
    if not fitting:
        raise ValueError(
            f"{headers.base}.weight_packed has shape {list(packed)}, which does not hold [{num_rows}, {depth}] of "
            f"{' or '.join(map(str, scheme.bits))} bits"
        )
    block = _block_of(headers, ".weight_scale", num_rows, depth, scheme)
    layout = CodeLayout(f"PACKED{fitting[0]}", num_rows, depth, block, fitting[0])
    if ".weight_zero_point" in headers.entries:
        rows, groups = layout.table
        headers.expect(".weight_zero_point", INTS, (_words(rows, layout.bits), groups))
    _check_order(headers, ".weight_g_idx", depth)
    return layout


def _decode_packed(parts: Parts, layout: CodeLayout, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | int]:
    zeros, bits = parts.get(".weight_zero_point"), layout.bits
    codes = _unpack(parts[".weight_packed"], bits)[:, : layout.depth]
    middle = 1 << bits - 1
    return codes, parts[".weight_scale"], middle if zeros is None else _unpack(zeros.T, bits)[:, : layout.table[0]].T


def _describe_columns(headers: Headers, name: str, num_rows: int, depth: int, bits: int) -> CodeLayout:
    """GPTQ and AWQ have tables [G, N]."""
    num_groups = headers.shape(".scales", SCALES)[0]
    if depth % num_groups:
        raise ValueError(f"{headers.base}.scales has {num_groups} groups, which do not divide {depth} columns")
    if num_rows * bits % WORD_BITS:
        raise ValueError(f"{headers.base}.qweight has {num_rows} rows of {bits} bits, which fill no words")
    headers.expect(".scales", SCALES, (num_groups, num_rows))
    headers.expect(".qzeros", INTS, (num_groups, _words(num_rows, bits)))
    _check_order(headers, ".g_idx", depth)
    return CodeLayout(f"{name}{bits}", num_rows, depth, (1, depth // num_groups), bits)


def _describe_gptq(headers: Headers, scheme: Scheme) -> CodeLayout:
    words, num_rows = headers.shape(".qweight", INTS)
    (bits,) = scheme.bits
    return _describe_columns(headers, "GPTQ", num_rows, words * WORD_BITS // bits, bits)


def _decode_gptq(parts: Parts, layout: CodeLayout, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | int]:
    zeros = _unpack(parts[".qzeros"], layout.bits) + scheme.zero_offset & (1 << layout.bits) - 1
    return _unpack(parts[".qweight"].T, layout.bits), parts[".scales"].T, zeros.T


def _describe_awq(headers: Headers, scheme: Scheme) -> CodeLayout:
    depth, words = headers.shape(".qweight", INTS)
    return _describe_columns(headers, "AWQ", words * WORD_BITS // 4, depth, 4)


def _decode_awq(parts: Parts, layout: CodeLayout, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | int]:
    codes, zeros = (
        _unpack(parts[suffix], 4).unflatten(1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER].flatten(1).T  # type: ignore[no-untyped-call]
        for suffix in (".qweight", ".qzeros")
    )
    return codes.contiguous(), parts[".scales"].T, zeros


def _describe_mxfp4(headers: Headers, scheme: Scheme) -> CodeLayout:
    num_stacked, num_rows, num_groups, num_bytes = shape = headers.shape("_blocks", ("U8",), 4)
    if num_bytes != GROUP // 2:
        raise ValueError(f"{headers.base}_blocks has shape {list(shape)}, expected blocks of {GROUP // 2} bytes")
    headers.expect("_scales", ("U8", "F8_E8M0"), shape[:3])
    return CodeLayout("MXFP4", num_rows, num_groups * GROUP, (1, GROUP), 8, num_stacked)


def _decode_mxfp4(parts: Parts, layout: CodeLayout, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | int]:
    """The values are multiples of half a scale, which is a power of two."""
    blocks = parts["_blocks"]
    codes = MXFP4_PAIRS.index_select(0, blocks.flatten().int()).view(torch.uint8).view(layout.num_rows, layout.depth)
    return codes, parts["_scales"].view(torch.float8_e8m0fnu).float().div_(2).bfloat16(), MXFP4_ZERO


def _words(count: int, bits: int) -> int:
    return -(-count * bits // WORD_BITS)


def _offset(codes: Tensor) -> Tensor:
    """int8 |-> uint8, 128 more."""
    return codes.view(torch.uint8) ^ 128


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[n, W] |-> [n, W * 32 / bits] uint8, those in low bits first."""
    stored = words.contiguous().view(torch.uint8)
    return stored if bits == 8 else torch.stack((stored & 15, stored >> 4), -1).flatten(1)


@dataclass(frozen=True, slots=True)
class Form:
    """Tensors have the names X + suffix; X + `plain` is the matrix's own."""

    main: str  # suffix
    others: tuple[str, ...]  # suffixes, some of them optional
    describe: Callable[[Headers, Scheme], CodeLayout]
    decode: Callable[[Parts, CodeLayout, Scheme], tuple[Tensor, Tensor, Tensor | int]]
    dtypes: tuple[str, ...] = ()  # of the main tensor; empty: its name is enough
    order: str = ""  # suffix of the tensor that gives each column's block
    plain: str = ".weight"


_BYTES = Form(
    ".weight", (".weight_scale", ".weight_scale_inv", ".weight_zero_point"), _describe_bytes, _decode_bytes,
    dtypes=(FP8, INT8),
)  # fmt: skip
_PACKED = Form(
    ".weight_packed", (".weight_scale", ".weight_zero_point", ".weight_shape"), _describe_packed, _decode_packed,
    order=".weight_g_idx",
)  # fmt: skip
_GPTQ = Form(".qweight", (".qzeros", ".scales"), _describe_gptq, _decode_gptq, order=".g_idx")
_AWQ = Form(".qweight", (".qzeros", ".scales"), _describe_awq, _decode_awq)
_MXFP4 = Form("_blocks", ("_scales",), _describe_mxfp4, _decode_mxfp4, plain="")
FORMS: dict[str, tuple[Form, ...]] = {
    "fp8": (_BYTES,), "compressed-tensors": (_BYTES, _PACKED), "gptq": (_GPTQ,), "awq": (_AWQ,), "mxfp4": (_MXFP4,),
}  # fmt: skip
DTYPES = ("FP8", "INT8", "PACKED4", "PACKED8", "GPTQ4", "GPTQ8", "AWQ4", "MXFP4")
