"""Adjusts logits on a GPU, out of place: penalties, bias and masks as in engine/sampling/sample.py.

Knows the fields of a batch as tensors of fixed presence; nothing of sampling. Rows without an adjustment are not
written: `open_row` reads them from the logits, through `bound`.
"""

import triton
import triton.language as tl

from engine.sampling.fields import MOST, PARAMS, SEEN_BIT

_MOST = tl.constexpr(MOST)
_LEAST = tl.constexpr(1 / MOST)
_NUM_MASK = tl.constexpr(SEEN_BIT - 1)
_LARGEST = tl.constexpr(3.4028234663852886e38)  # float32's
_ROW_BITS = tl.constexpr(8 * PARAMS.itemsize)
INFINITY = tl.constexpr(float("inf"))
BLOCK = tl.constexpr(2048)  # tokens; 63 programs for a row of 128,000, and 8 tokens per thread (256 threads)
GROUP = tl.constexpr(256)  # tokens per maximum: the k-th largest maximum is a lower bound of the k-th largest value


@triton.jit
def load_param(column, row):
    """A row's value of one of the ParamColumns."""
    return tl.load(column + row * (_ROW_BITS // column.dtype.element_ty.primitive_bitwidth))


@triton.jit
def has_penalties(fields, row):
    is_repetition = load_param(fields.params.repetition_penalty, row) != 1
    is_frequency = load_param(fields.params.frequency_penalty, row) != 0
    return is_repetition | is_frequency | (load_param(fields.params.presence_penalty, row) != 0)


@triton.jit
def is_adjusted(fields, row):
    """Whether `adjust` writes the row."""
    has_bias = tl.load(fields.bias_starts + row + 1) > tl.load(fields.bias_starts + row)
    return has_penalties(fields, row) | has_bias | (tl.load(fields.mask_line + row) >= 0)


@triton.jit
def bound(values, lowest):
    """[n] -> [n]: NaN and values below `lowest` become `lowest`, values above the largest float become that."""
    values = tl.where(values > lowest, values, lowest)
    return tl.where(values < _LARGEST, values, _LARGEST)


@triton.jit
def open_row(logits, adjusted, fields, row, vocabulary):
    """The row's values, and `lowest` for `bound`: -inf for adjusted rows, where it marks an excluded token."""
    is_own = is_adjusted(fields, row)
    begin = row.to(tl.int64) * vocabulary
    return tl.where(is_own, adjusted + begin, logits + begin), tl.where(is_own, -INFINITY, -_LARGEST)


@triton.jit
def _penalise(values, fields, row, ids, vocabulary):
    """[n] logits -> [n]. The product of frequency and count is exact in float64."""
    line = tl.load(fields.counts_line + row)
    num_counts = tl.where(line >= 0, vocabulary, 0)
    counts = tl.load(fields.counts + line.to(tl.int64) * vocabulary + ids, mask=ids < num_counts, other=0)
    for at in range(tl.load(fields.extra_starts + row), tl.load(fields.extra_starts + row + 1)):
        counts += (ids == tl.load(fields.extra_ids + at)).to(tl.int32)
    num_answer = counts & _NUM_MASK
    penalty = tl.minimum(tl.maximum(load_param(fields.params.repetition_penalty, row), _LEAST), _MOST)
    penalised = tl.where(values > 0, tl.div_rn(values, penalty), values * penalty)
    values = tl.where(counts > 0, penalised, values)
    frequency = load_param(fields.params.frequency_penalty, row).to(tl.float64)
    loss = frequency * num_answer + load_param(fields.params.presence_penalty, row)
    return tl.where(num_answer > 0, (values.to(tl.float64) - loss).to(tl.float32), values)


@triton.jit
def adjust(logits, adjusted, fields, maxima, vocabulary):
    """One block of a row: [S, V] logits -> [S, V] adjusted, and the maximum of each GROUP of tokens.

    Does not modify the logits. Grid: (S, blocks). maxima: [S, blocks * BLOCK / GROUP].
    """
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocabulary
    at = row.to(tl.int64) * vocabulary + ids
    values = tl.load(logits + at, mask=is_token, other=0.0)
    if has_penalties(fields, row):
        values = _penalise(values, fields, row, ids, vocabulary)
    for place in range(tl.load(fields.bias_starts + row), tl.load(fields.bias_starts + row + 1)):
        biased = values + tl.load(fields.bias_values + place)
        values = tl.where(ids == tl.load(fields.bias_ids + place), biased, values)
    values = bound(values, -_LARGEST)
    line = tl.load(fields.mask_line + row)
    if line >= 0:
        num_words = (vocabulary + 31) // 32
        words = tl.load(fields.masks + line.to(tl.int64) * num_words + ids // 32, mask=is_token, other=0)
        values = tl.where((words >> (ids % 32)) & 1 != 0, values, -INFINITY)
    if is_adjusted(fields, row):
        tl.store(adjusted + at, values, mask=is_token)
    values = tl.where(is_token, values, -INFINITY)
    groups = tl.max(tl.reshape(values, [BLOCK // GROUP, GROUP]), 1)
    num_groups = tl.num_programs(1) * (BLOCK // GROUP)
    tl.store(maxima + row * num_groups + block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), groups)
