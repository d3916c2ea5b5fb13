"""Attention backends for a model: one, or one for each shape of layers."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from engine.attention.base import AttentionBackend
from engine.attention.layered import LayeredAttention, as_is
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend and the reason for it, one line for the log. A fallback deserves a warning."""

    backend: AttentionBackend
    reason: str
    is_fallback: bool  # this device has a faster backend, which cannot be used here


ChooseAttention = Callable[[AttentionShape, Collection[int | None]], AttentionChoice]
"""(shape of layers, their windows) |-> a backend"""


def choose_for_layers(
    choose: ChooseAttention, shapes: Sequence[AttentionShape], windows: Sequence[int | None], page_tokens: int,
    pad_head: Callable[[int], int] = as_is,
) -> AttentionChoice:  # fmt: skip
    """For a model with these shapes and windows of layers. pad_head: see `Device`."""
    choices = []
    for shape in dict.fromkeys(shapes):
        choices.append(choose(shape, [window for one, window in zip(shapes, windows, strict=True) if one == shape]))
    if len(choices) == 1:
        return choices[0]
    worst = max(choices, key=lambda choice: choice.is_fallback)
    backends = [choice.backend for choice in choices]
    return replace(worst, backend=LayeredAttention(shapes, backends, page_tokens, pad_head))


def reference_attention(
    shapes: Sequence[AttentionShape], page_tokens: int, pad_head: Callable[[int], int] = as_is
) -> AttentionBackend:
    """torch_sdpa for layers of these shapes."""
    backends = [TorchSdpaAttention(shape) for shape in dict.fromkeys(shapes)]
    return backends[0] if len(backends) == 1 else LayeredAttention(shapes, backends, page_tokens, pad_head)
