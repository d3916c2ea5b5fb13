"""The reference: gathers each sequence's pages and calls torch's SDPA, one sequence at a time.

Any device, any float dtype. Simple rather than fast; all other backends are tested against it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import FP8_LIMIT
from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.batch import Batch
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS


class TorchSdpaAttention:
    """An `AttentionBackend`. Keeps the pool and the batch of the last plan."""

    name = "torch_sdpa"
    is_capturable = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, pool: Tensor, batch: Batch) -> None:
        self._batch = batch
        # [L, 2 or 1, num_pages, Hkv, page_tokens, D], a view; without what pads heads (`Device.pad_head`)
        layers = pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)
        self._layers = layers[..., : self._shape.head_dim]

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "TorchSdpaAttention":
        return self

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        batch = self._batch
        query, key, value = heads.ready()
        all_keys = self._layers[layer, 0]  # [num_pages, Hkv, page_tokens, D]
        value_dim, page_tokens = self._shape.value_dim, all_keys.shape[2]
        all_values = all_keys[..., :value_dim] if value_dim else self._layers[layer, 1]  # [..., Dv]
        if value.shape[1]:
            pages, offsets = batch.slot_mapping // page_tokens, batch.slot_mapping % page_tokens
            all_keys[pages, :, offsets] = narrow(key, all_keys.dtype)
            if not value_dim:
                all_values[pages, :, offsets] = narrow(value, all_values.dtype)
        embedded, sees = batch.embedded, None
        if embedded is not None and (window is not None or embedded.in_all_layers):
            sees = embedded.visible_until
        output = query.new_empty(*query.shape[:2], all_values.shape[-1])
        begin = 0
        for index, (query_len, context_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
            rows = slice(begin, begin + query_len)
            pages = batch.page_table[index, : -(-context_len // page_tokens)]
            keys, values = (  # [Hkv, C, D], [Hkv, C, Dv]
                rows_of_pages.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :context_len].to(query.dtype)
                for rows_of_pages in (all_keys, all_values)
            )
            own = (None if one is None else one[rows] for one in (sees, batch.ancestors))
            output[rows] = self._attend_one(query[rows], keys, values, window, sinks, *own)
            begin += query_len
        return output

    def _attend_one(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, sinks: Tensor | None, *own: Tensor | None
    ) -> Tensor:
        """[L, Hq, D], [Hkv, C, D], [Hkv, C, Dv], two of [L] -> [L, Hq, Dv]; the queries are the last L of C positions.

        Heads that share a KV head become rows of one longer query: 13-20 % faster than `enable_gqa` on the CPU.
        """
        query_len, num_heads, dim = query.shape
        num_kv_heads, context_len, _ = keys.shape
        group = num_heads // num_kv_heads
        folded = query.view(query_len, num_kv_heads, group, dim).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, group*L, D]
        mask = visible_keys(query_len, context_len, window, query.device, *own).repeat(group, 1)  # [group*L, C]
        scale, softcap = self._shape.scale, self._shape.softcap
        if softcap or sinks is not None:
            of_rows = None if sinks is None else sinks.view(num_kv_heads, group, 1).repeat_interleave(query_len, 1)
            attended = attend_by_hand(folded, keys, values, mask, scale, softcap, of_rows)
        else:
            attended = functional.scaled_dot_product_attention(
                folded[None], keys[None], values[None], attn_mask=mask, scale=scale
            )[0]
        return attended.view(num_kv_heads, group, query_len, -1).permute(2, 0, 1, 3).reshape(query_len, num_heads, -1)


def attend_by_hand(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention that SDPA lacks, in float32: [H, R, D], two of [H, C, D], mask [R, C], sinks [H, R, 1] -> [H, R, D]."""
    scores = query.float() @ keys.float().transpose(1, 2) * scale  # [H, R, C]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks), -1)
    return (scores.softmax(-1)[..., : keys.shape[1]] @ values.float()).to(query.dtype)


def narrow(rows: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Keys or values in the dtype of the pages. fp8 values are clamped to +-448."""
    if kv_dtype is torch.float8_e4m3fn:
        rows = rows.clamp(-FP8_LIMIT, FP8_LIMIT)
    return rows.to(kv_dtype)


def visible_keys(
    query_len: int, context_len: int, window: int | None, device: torch.device, sees: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[query_len, context_len] bool: which keys each of the last `query_len` positions sees.

    sees: [query_len], `EmbeddedRows.visible_until`; ancestors: [query_len], `Batch.ancestors`.
    """
    key = torch.arange(context_len, device=device)
    position = key[context_len - query_len :, None]
    visible = key <= position
    if ancestors is not None:
        bits, new = ancestors[:, None], key - (context_len - query_len)
        visible &= (bits == 0) | (new < 0) | (bits >> new.clamp(0, 31) & 1 > 0)
    if sees is not None:
        visible |= key < sees[:, None]
    return visible if window is None else visible & (key > position - window)
