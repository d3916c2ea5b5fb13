"""Tiles of experts' weights in few bits, widened as they are loaded. Forms and twin: formats/stacks.py."""

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
BLOCK = tl.constexpr(128)  # columns of an e4m3 block
E2M1_SIGN = tl.constexpr(8)


@triton.jit
def load_weights(
    codes, scale, second, rows, columns, is_inside, depth, width, FORM: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """[OUTPUTS, COLUMNS] in DTYPE. rows: [OUTPUTS] of all experts, int64; columns: [COLUMNS]; width: of tables."""
    places = rows[:, None] * depth + columns[None, :]
    if FORM == "plain":
        tile = tl.load(codes + places, mask=is_inside, other=0.0)
    elif FORM == "e4m3":
        blocks = rows[:, None] * width + tl.minimum(columns // BLOCK, width - 1)[None, :]
        factor = tl.load(scale + blocks, mask=is_inside, other=0.0)
        tile = (tl.load(codes + places, mask=is_inside, other=0.0).to(tl.float32) * factor).to(DTYPE)
    else:
        groups = rows[:, None] * width + (columns // GROUP)[None, :]
        if FORM == "groups8" or FORM == "minimums8":
            code = tl.load(codes + places, mask=is_inside, other=0).to(tl.int32)
        else:  # the bytes of a group's 16 columns serve its other 16, too
            places = rows[:, None] * (depth // 2) + (columns // GROUP * 16 + columns % 16)[None, :]
            code = tl.load(codes + places, mask=is_inside, other=0).to(tl.int32)
            code = (code >> (columns % GROUP // 16 * 4)[None, :]) & 15
        if FORM == "mxfp4":
            exponent, odd = (code >> 1) & 3, code & 1
            value = tl.where(exponent == 0, odd, (2 + odd) << (tl.maximum(exponent, 1) - 1))
            value = tl.where(code >= E2M1_SIGN, -value, value).to(tl.float32)
            power = tl.load(scale + groups, mask=is_inside, other=0).to(tl.int32) << 23
            tile = (value * power.to(tl.float32, bitcast=True)).to(DTYPE)
        else:
            factor = tl.load(scale + groups, mask=is_inside, other=0.0).to(tl.float32)
            if second is None:
                minimum = factor * -(128.0 if FORM == "groups8" else 8.0)
            else:
                minimum = tl.load(second + groups, mask=is_inside, other=0.0).to(tl.float32)
                if FORM == "groups8" or FORM == "groups4":
                    minimum = factor * -minimum
            tile = (code.to(tl.float32) * factor + minimum).to(DTYPE)
    return tile
