"""In which order KV lies in a pool's pages. Pure; the only file that knows it: others name the axes.

A page is contiguous, and so is any range of its heads: a rank of another tensor-parallel degree reads its heads in one
run. A change of the order is a new protocol version (kvtransfer/layout.py).
"""

PAGES, KV_HEADS, LAYERS, KEY_VALUE, TOKENS, HEAD_DIM = range(6)  # the axes of a pool, the outermost first


def pool_sizes(
    *, num_pages: int, num_kv_heads: int, num_layers: int, page_tokens: int, head_dim: int
) -> tuple[int, ...]:
    """Sizes of a pool's axes, in their order; keys are 0 and values 1 on the axis KEY_VALUE."""
    sizes = {
        PAGES: num_pages,
        KV_HEADS: num_kv_heads,
        LAYERS: num_layers,
        KEY_VALUE: 2,
        TOKENS: page_tokens,
        HEAD_DIM: head_dim,
    }
    return tuple(sizes[axis] for axis in sorted(sizes))
