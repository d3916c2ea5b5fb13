"""A model that runs by transformers' own code, over Baton's pages: all but attention. Same interface as `Decoder`."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.batch import Batch
from engine.fallback.config import FallbackConfig
from engine.fallback.hooks import SERVE, build_cache, find_cache_name, load_states, store_states
from engine.layers.linear import NO_ADDITIONS, Embedding, WidenedLinear
from engine.ops.base import Ops
from engine.ranks import ONE_RANK, Ranks
from engine.staging import find_starts, join_ranges, upload


class FallbackModel:
    """Holds weights only: the caller's pool holds all state of sequences. One step at a time."""

    is_capturable = False  # transformers' code may read values on the host

    def __init__(self, model: Any, config: FallbackConfig, ops: Ops) -> None:
        """model: a PreTrainedModel with its weights on their device; this object takes it over."""
        self.config = config
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.ops = ops
        self.ranks: Ranks = ONE_RANK
        self.mapped_bytes = 0
        self.additions = NO_ADDITIONS
        self.why_unshared: str | None = None
        if self.device.type == "cpu":
            self.why_unshared = f"{config.family} runs by transformers' code, which shares no weights"
        self._model = model.eval().requires_grad_(False)
        self._chooses_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_name = find_cache_name(model)
        self._text_config = model.config.get_text_config(decoder=True)
        self._attention: AttentionBackend | None = None  # of the running step
        self._tapped: Tensor | None = None  # Batch.taps of the running step
        self.taps: tuple[int, ...] = ()
        model.set_attn_implementation(SERVE)
        for layer, name in enumerate(config.attention_modules):
            model.get_submodule(name).baton_attend = partial(self._attend, layer)

    @property
    def embedding(self) -> Embedding:
        """For a draft head, like the next."""
        return Embedding(self._model.get_input_embeddings().weight)

    @property
    def lm_head(self) -> WidenedLinear:
        return WidenedLinear(self._model.get_output_embeddings().weight)

    def tap(self, layers: Sequence[int]) -> None:
        """See `Decoder.tap`. ValueError if transformers' code has no list of layers."""
        self.taps = tuple(layers)
        for place, index in enumerate(layers):
            if index == self.config.depth:
                self._model.base_model.register_forward_hook(
                    lambda _module, _args, output, place=place: self._write_tap(place, output.last_hidden_state)
                )
            else:
                find_layers(self._model, self.config)[index].register_forward_pre_hook(
                    lambda _module, args, given, place=place: self._write_tap(
                        place, args[0] if args else given["hidden_states"]
                    ),
                    with_kwargs=True,
                )

    def new_taps(self, num_tokens: int) -> Tensor:
        """See `Decoder.new_taps`."""
        return torch.empty(num_tokens, len(self.taps) * self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _write_tap(self, place: int, rows: Tensor) -> None:
        """rows: [B, T, H]"""
        if self._tapped is not None:
            size = self.config.hidden_size
            self._tapped[:, place * size : (place + 1) * size].copy_(rows.flatten(0, 1))

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Tensor, attention: AttentionBackend) -> Tensor:
        """See `Decoder.forward`, but returns the logits themselves: [S, V] float32, owned by the caller."""
        if batch.states is None:
            attention.plan(pool, batch)
            return self.run_planned(batch, attention)
        logits = torch.empty(len(batch.logits_rows), self.config.vocab_size, device=self.device)
        for which in _divide(batch):
            part, rows, outputs = _select(batch, which)
            if batch.taps is not None:
                part = replace(part, taps=self.new_taps(len(rows)))
            attention.plan(pool, part)
            logits.index_copy_(0, outputs, self._run_with_states(part, attention))
            if batch.taps is not None and part.taps is not None:
                batch.taps.index_copy_(0, rows, part.taps)
        return logits

    def run_planned(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """`forward` after the plan, of a model without states."""
        return self._run(batch, attention, batch.token_ids[None], batch.positions[None])

    def _run_with_states(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """`forward` of a part that `_divide` made, after the plan."""
        states, kept = batch.states, self.config.kept_states
        assert states is not None
        is_stacked, first = len(batch.query_lens_host) > 1, int(batch.seq_lens_host[0] - batch.query_lens_host[0])
        cache = build_cache(self._text_config, first)
        if first:
            load_states(cache, kept, states, self.dtype)
        shape = (-1, 1) if is_stacked else (1, -1)
        logits = self._run(
            batch, attention, batch.token_ids.view(shape), batch.positions.view(shape), **{self._cache_name: cache}
        )
        store_states(cache, kept, states)
        return logits

    def _run(
        self, batch: Batch, attention: AttentionBackend, token_ids: Tensor, positions: Tensor, **cache: Any
    ) -> Tensor:
        """token_ids, positions: [B, T]; they and the attention's plan are of `batch` |-> [S, V] float32"""
        if self._chooses_rows and len(token_ids) == 1:
            cache["logits_to_keep"] = batch.logits_rows
        self._attention, self._tapped = attention, batch.taps
        try:
            output = self._model(
                input_ids=token_ids, position_ids=positions, use_cache=self._cache_name in cache, **cache
            )
        finally:
            self._attention = self._tapped = None
        logits: Tensor = output.logits.flatten(0, 1)  # [S or B T, V]
        return (logits if "logits_to_keep" in cache else logits.index_select(0, batch.logits_rows)).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows from `forward` |-> the same: the class of the model has applied its head, scaling and softcap."""
        return hidden

    own_logits = logits

    @torch.inference_mode()
    def compute_alone(self, token_ids: Tensor) -> Tensor:
        """The truth: [T] ids of one sequence |-> [T, V] float32 by transformers alone, with its eager attention."""
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(SERVE)
        return logits.float()

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """See `fallback_hooks.Attend`. Copies the heads: a backend may overwrite them, layers may share them."""
        assert self._attention is not None
        config = self.config
        head_dim, window = config.attention_shapes[layer].head_dim, config.windows[layer]
        return attend(self._attention, layer, head_dim, window, self.dtype, query, key, value, options)


def find_layers(model: Any, config: FallbackConfig) -> Any:
    """The list of a model's layers. ValueError if its layers are not in one."""
    path = config.attention_modules[0].rpartition(".")[0].rpartition(".")[0]
    layers = model.get_submodule(path)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) < config.depth:
        raise ValueError(f"the layers of {config.family} are not in one list")
    return layers


def attend(
    attention: AttentionBackend, layer: int, head_dim: int, window: int | None, dtype: torch.dtype, query: Tensor,
    key: Tensor, value: Tensor, options: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    """Attention over pages, for what transformers passes: |-> [B, T, Hq, D]. head_dim: of the pages."""
    num_rotated = query.shape[1] + key.shape[1]
    flat = [heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value)]  # [B T, H, D] each
    joined = torch.cat([_widen(heads, head_dim) for heads in flat], 1).to(dtype)  # [B T, Hq + 2 Hkv, D]
    heads = QKV(joined[:, :num_rotated], joined[:, num_rotated:])
    sinks: Tensor | None = options.get("s_aux")
    if sinks is not None:
        sinks = sinks.flatten().float()  # [Hq]
    attended = attention.attend(layer, heads, window, sinks)[..., : value.shape[-1]].to(query.dtype)  # [B T, Hq, D]
    return attended.unflatten(0, (len(query), -1))  # type: ignore[no-any-return, no-untyped-call]


def _divide(batch: Batch) -> list[list[int]]:
    """Forwards that transformers' code can do: all sequences with one new token and a state, and each other one."""
    is_plain = (batch.query_lens_host == 1) & (batch.seq_lens_host > 1)
    stacked, others = np.flatnonzero(is_plain).tolist(), np.flatnonzero(~is_plain).tolist()
    return [*([stacked] if stacked else []), *([one] for one in others)]


def _select(batch: Batch, which: Sequence[int]) -> tuple[Batch, Tensor, Tensor]:
    """The step of some of the batch's sequences alone; which of the T rows, and of the S rows of logits, are theirs.

    Waits for the device.
    """
    chosen, all_counts = np.array(which, np.int64), batch.query_lens_host.astype(np.int64)
    counts = all_counts[chosen]
    rows = join_ranges(find_starts(all_counts)[chosen].astype(np.int64), counts)[1]  # [t]
    logits_rows = batch.logits_rows.cpu().numpy()
    outputs = np.flatnonzero(np.isin(logits_rows, rows))  # [s]
    own_outputs = np.searchsorted(rows, logits_rows[outputs])
    fields: list[NDArray[Any]] = [chosen, rows, outputs, find_starts(counts), own_outputs]
    sequences, tokens, outputs_here, cu_seqlens_q, own_rows = upload(fields, batch.token_ids.device)
    states = batch.states
    part = Batch(
        batch.token_ids[tokens], batch.places[tokens], batch.positions[tokens], cu_seqlens_q, batch.seq_lens[sequences],
        batch.page_table[sequences], batch.slot_mapping[tokens], own_rows, batch.query_lens_host[chosen],
        batch.seq_lens_host[chosen],
        states=states and states._replace(sources=states.sources[sequences], targets=states.targets[sequences]),
    )  # fmt: skip
    return part, tokens, outputs_here


def _widen(heads: Tensor, head_dim: int) -> Tensor:
    """[T, H, n] |-> [T, H, D] with zeros at the end: they change neither scores nor the first n values."""
    missing = head_dim - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads
