"""Quantised safetensors checkpoints: each matrix under its plain name, its values exactly those of its format.

Weights only: scales of activations and of the KV cache are left out.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.formats.quantised_forms import DTYPES, FORMS, Coded, CodeLayout, Form, Headers
from engine.formats.scheme import Scheme
from engine.models.config import ModelConfig
from engine.models.table import build_table
from engine.weights.checkpoint import FLOATS, Checkpoint

LEFT_OUT = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".activation_scale", ".q_scale",
    ".k_scale", ".k_zero_point", ".v_scale", ".v_zero_point", ".kv_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One tensor of the model and its tensors in the files."""

    form: Form
    layout: CodeLayout
    parts: dict[str, str]  # suffix |-> name


class QuantisedCheckpoint(Checkpoint):
    """The tensors of another checkpoint, quantised ones under the names of their matrices."""

    dtypes = (*FLOATS, *DTYPES)

    def __init__(self, stored: Checkpoint, scheme: Scheme, wanted: Collection[str]) -> None:
        """wanted: the names that the model has. ValueError names a tensor that is missing or does not fit its matrix.

        Some tools add biases of zeros to all matrices; those that are not wanted are left out.
        """
        self._stored = stored
        self._scheme = scheme
        self._matrices: dict[str, _Matrix] = {}  # name |-> matrix
        self.entries = {name: entry for name, entry in stored.entries.items() if not name.endswith(LEFT_OUT)}
        for name, entry in stored.entries.items():
            for form in FORMS[scheme.method]:
                if name.endswith(form.main) and (not form.dtypes or entry.dtype in form.dtypes):
                    self._add(name.removesuffix(form.main), form)
        for name in self._matrices:
            bias = f"{name.removesuffix('.weight')}.bias"
            entry = self.entries.get(bias, self.entries[name])
            if entry.dtype in list(FLOATS) and bias not in wanted and not stored.tensor(bias).any():
                del self.entries[bias]

    def _add(self, base: str, form: Form) -> None:
        stored = self._stored.entries
        suffixes = [suffix for suffix in (form.main, *form.others, form.order) if suffix and base + suffix in stored]
        entries = {suffix: stored[base + suffix] for suffix in suffixes}
        headers = Headers(base, entries, self._stored.tensor)
        for suffix in {*form.others, form.order}.intersection(self._scheme.needed):
            headers.find(suffix)
        layout = form.describe(headers, self._scheme)
        for suffix in suffixes:
            self.entries.pop(base + suffix, None)
        name = base + form.plain
        if name in self.entries:
            raise ValueError(f"{name} is there twice: once as {base}{form.main}")
        num_bytes = sum(entry.num_bytes for entry in entries.values())
        self.entries[name] = replace(entries[form.main], dtype=layout.dtype, shape=layout.shape, num_bytes=num_bytes)
        self._matrices[name] = _Matrix(form, layout, {suffix: base + suffix for suffix in suffixes})

    def tensor(self, name: str, *, is_kept: bool = False) -> Tensor:
        if name not in self._matrices:
            return self._stored.tensor(name, is_kept=is_kept)
        if count := self._matrices[name].layout.num_stacked:
            return torch.stack([self._read(name, index).dense().T for index in range(count)])
        return self._read(name).dense()

    def coded(self, name: str, index: int | None = None) -> Coded | None:
        is_one = name in self._matrices and (index is None) == (not self._matrices[name].layout.num_stacked)
        return self._read(name, index) if is_one else None

    def _read(self, name: str, index: int | None = None) -> Coded:
        """index: of a stacked matrix."""
        matrix = self._matrices[name]
        form, layout = matrix.form, matrix.layout
        parts = {suffix: self._stored.tensor(part) for suffix, part in matrix.parts.items()}
        if index is not None:
            parts = {suffix: part[index] for suffix, part in parts.items()}
        codes, scale, zeros = form.decode(parts, layout, self._scheme)
        zeros = zeros.reshape(layout.table) if isinstance(zeros, Tensor) else zeros
        order = parts.get(form.order)
        if order is not None:
            if not 0 <= int(order.min()) <= int(order.max()) < layout.table[1]:
                raise ValueError(f"{matrix.parts[form.order]} has values beyond 0 to {layout.table[1] - 1}")
            if torch.equal(order, torch.arange(layout.depth, dtype=order.dtype) // layout.block[1]):
                order = None
        return Coded(layout, codes, scale.reshape(layout.table), zeros, order)


def decode(config: ModelConfig, scheme: Scheme, stored: Checkpoint) -> Checkpoint:
    """The checkpoint of a model whose matrices are quantised."""
    return QuantisedCheckpoint(stored, scheme, {tensor.name for tensor in build_table(config).stored()})
