"""Inputs of captured steps: many tensors at fixed addresses, filled by one copy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.staging import find_begins


class StaticBlock:
    """Tensors at fixed addresses, filled together in one copy: inputs of a captured step. One caller at a time."""

    def __init__(self, padding: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        """padding: name |-> the tensor's default content."""
        begins = find_begins(padding.values())
        self._padding = dict(padding)
        self._begins = dict(zip(padding, begins, strict=False))
        self._template = np.zeros(begins[-1], np.uint8)
        for name, view in self._views(self._template).items():
            view[...] = padding[name]
        self._device = device
        self._block = torch.from_numpy(self._template.copy()).to(device)

    def tensor(self, name: str) -> Tensor:
        """[shape of its padding], always the same memory; unsigned integers as signed ones."""
        array, begin = self._padding[name], self._begins[name]
        signed = np.empty(0, array.dtype.str.replace("u", "i"))
        return self._block[begin : begin + array.nbytes].view(torch.from_numpy(signed).dtype).view(array.shape)

    @contextmanager
    def fill(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Arrays of all tensors, full of padding, to write into. Leaving the block copies them to the device.

        The copy runs after everything launched before.
        """
        is_cpu = self._device.type == "cpu"
        target = self._block if is_cpu else torch.empty(len(self._template), dtype=torch.uint8, pin_memory=True)
        memory = target.numpy()
        memory[:] = self._template
        yield self._views(memory)
        if not is_cpu:
            self._block.copy_(target, non_blocking=True)

    def _views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        return {
            name: memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            for (name, array), begin in zip(self._padding.items(), self._begins.values(), strict=True)
        }
