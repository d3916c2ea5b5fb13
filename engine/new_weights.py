"""Other weights for a loaded model, in its place: a second set is read whole, then the decoder goes on with it.

A CPU's decoder gets the new layers, mostly mappings of files. A GPU's steps are captured with the addresses of weights,
and its memory does not hold two sets: there the second waits in main memory, and is copied into the first.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.ops.base import Ops
from engine.ranks import Ranks

WEIGHTS = ("embedding", "_layers", "_final_norm", "lm_head", "_token_inputs")  # of a decoder
PRODUCTS = ("linear", "gated", "stack", "embed")  # that a format builds
PLAIN = (bool, int, float, str, bytes, Enum, torch.dtype, torch.device, type(None))


class HostFormat:
    """A device's format whose products wait in main memory: one at a time is on the device."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name)
        return self._waiting(found) if name in PRODUCTS else found

    @staticmethod
    def _waiting(build: Callable[..., Any]) -> Callable[..., Any]:
        def build_here(*args: Any, **options: Any) -> Any:
            built = build(*args, **options)
            for tensor, _ in find_pairs(built, built):
                tensor.data = tensor.data.cpu()
            return built

        return build_here


def find_pairs(old: object, new: object, path: str = "") -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of a model's part, and those in the same places of another. ValueError: more than values differ."""
    if isinstance(old, Ops | Ranks):
        return
    if type(old) is not type(new):
        raise ValueError(f"{path} is {type(old).__name__}, and would be {type(new).__name__}")
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            here, there = (f"{one.dtype} {list(one.shape)}" for one in (old, new))
            raise ValueError(f"{path} is {here}, and would be {there}")
        yield old, new
    elif isinstance(old, PLAIN):
        if old != new:
            raise ValueError(f"{path} is {old!r}, and would be {new!r}")
    elif isinstance(old, list | tuple):
        for index, (here, there) in enumerate(zip(old, new, strict=True)):  # type: ignore[call-overload]
            yield from find_pairs(here, there, f"{path}[{index}]")
    else:
        for name in _find_fields(old):
            yield from find_pairs(getattr(old, name), getattr(new, name), f"{path}.{name}")


def _find_fields(one: object) -> list[str]:
    if not type(one).__module__.startswith("engine."):
        return []  # a function, or a library's
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [name for name in (*slots, *getattr(one, "__dict__", ())) if not name.startswith("__")]


def find_copies(old: Decoder, new: Decoder) -> list[tuple[Tensor, Tensor]]:
    """What `take_copies` copies: every weight. ValueError says which one does not fit."""
    return [pair for name in WEIGHTS for pair in find_pairs(getattr(old, name), getattr(new, name), name.strip("_"))]


@torch.inference_mode()
def take_copies(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the new values into the old tensors. No step runs."""
    devices = {old.device for old, _ in copies if old.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    for old, new in copies:
        old.copy_(new)
    for device in devices:
        torch.cuda.synchronize(device)


def take_layers(old: Decoder, new: Decoder) -> None:
    """The old decoder computes with the new one's weights from its next step on."""
    vars(old).update(vars(new))
