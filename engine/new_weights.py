"""Other weights for a loaded model on a GPU, whose captured steps know the addresses of weights, and whose memory does
not hold two sets: the second waits in main memory, and is then copied into the first."""

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
VALUES = (Tensor, bool, int, float, str, Enum, torch.dtype, torch.device, type(None))


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
            for _, value in find_values(built):
                if isinstance(value, Tensor):
                    value.data = value.data.cpu()
            return built

        return build_here


def find_values(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of each value in a part of a model."""
    if isinstance(part, VALUES):
        yield path, part
    elif isinstance(part, list | tuple):
        for index, one in enumerate(part):
            yield from find_values(one, f"{path}[{index}]")
    elif type(part).__module__.startswith("engine.") and not isinstance(part, Ops | Ranks):
        slots = (name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ()))
        for name in (*slots, *getattr(part, "__dict__", ())):
            yield from find_values(getattr(part, name), f"{path}.{name}")


def find_copies(old: Decoder, new: Decoder) -> list[tuple[Tensor, Tensor]]:
    """The pairs that `take_copies` copies: all weights. ValueError names what differs in more than its elements."""
    here, there = (
        dict(value for name in WEIGHTS for value in find_values(getattr(one, name), name)) for one in (old, new)
    )
    for path in here | there:
        facts = [
            (one.shape, one.dtype) if isinstance(one, Tensor) else one for one in (here.get(path), there.get(path))
        ]
        if facts[0] != facts[1]:
            raise ValueError(f"{path} is {facts[0]} here, and would be {facts[1]}")
    return [(one, there[path]) for path, one in here.items() if isinstance(one, Tensor)]


@torch.inference_mode()
def take_copies(copies: list[tuple[Tensor, Tensor]]) -> None:
    """No step is being launched."""
    device = copies[0][0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for old, new in copies:
        old.copy_(new)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
