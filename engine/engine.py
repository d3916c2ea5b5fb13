"""A model ready to compute, with its pool. A worker builds it once, at start."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.choose import AttentionChoice
from engine.input_batch import InputBatch
from engine.kv.pool import Pool
from engine.layers.linear import Quantization
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.ranks import ONE_RANK, Ranks
from engine.runner import Runner
from wire.kv_layout import KvPart, StatePart
from wire.names import KvDType as KvDType


class Vectors(Protocol):
    """Vectors of texts, from a model without answers (engine/pooling/): its runner computes no tokens."""

    is_whole: bool  # each text is to be one step, and its KV is of no use to another

    def take(self, row: int) -> NDArray[np.float32] | None:
        """The row's vector from the last collected step, once; None if there is none."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Owns everything large: weights, pages, rows."""

    folder: Path  # of the checkpoint
    config: ModelConfig  # as this rank computes it
    weights: str  # fingerprint
    dtype: str  # "float32", "bfloat16" or "float16"
    device: torch.device
    attention: AttentionChoice
    pool: Pool
    padding_page: int | None  # the pool's last page on a GPU: used by captured steps, never by sequences
    rows: InputBatch  # of both models
    runner: Runner
    draft_weights: str  # fingerprint of the draft model; empty without one
    draft_runner: Runner | None  # the draft model over the second part of the same pages
    quantization: Quantization = "none"  # of both models
    why_unshared: str | None = None  # see Decoder
    why_chains: str | None = "want of code"  # what keeps drafts from being trees; None: nothing
    pooled: Vectors | None = None  # None: the model answers
    states: Pool | None = None  # slots of a model whose layers keep some; on a GPU the last is like the padding page

    @property
    def has_head(self) -> bool:
        """Whether what drafts is a head, which each step of the model leads."""
        return self.draft_runner is not None and self.draft_runner.is_head

    @property
    def has_draft_kv(self) -> bool:
        """Whether pages hold KV of what drafts."""
        return self.pool.draft_tensor is not None

    @property
    def num_after(self) -> int:
        """Tokens after a page that its KV depends on: a head's at a position is of the token after that, too."""
        return int(self.has_head and self.has_draft_kv)

    @property
    def num_pages(self) -> int:
        """Pages of the pool that are available to sequences."""
        return self.pool.num_pages if self.padding_page is None else self.padding_page

    @property
    def num_slots(self) -> int:
        """Slots of state that are available to sequences."""
        return 0 if self.states is None else self.states.num_pages - (self.padding_page is not None)

    @property
    def kv_dtype(self) -> str:
        """Dtype of the pages: like `dtype`, or "float8_e4m3fn"."""
        return name_dtype(self.pool.shape.dtype)

    @property
    def steps_ahead(self) -> int:
        """How many steps to launch before the last one is collected. A CPU computes at launch; stages take turns."""
        return max(int(self.device.type == "cuda"), self.pool.num_stages - 1)

    def describe(self) -> dict[str, str]:
        """Properties that the log shows at start."""
        shape = self.pool.shape
        return {
            "device": str(self.device),
            "dtype": self.dtype,
            "quantization": self.quantization,
            "attention": self.attention.backend.name,
            "attention_reason": self.attention.reason,
            "pool": f"{shape.num_pages} pages of {shape.page_tokens} tokens, {self.pool.all_page_bytes} bytes each",
            **({"states": f"{self.num_slots} slots, {self.states.all_page_bytes} bytes each"} if self.states else {}),
            "draft_model": self.draft_weights[:12] or "none",
            "drafts": "trees" if self.why_chains is None else f"chains, for {self.why_chains}",
            **({"ranks": str(self.pool.num_ranks)} if self.pool.num_ranks > 1 else {}),
            **({"stages": str(self.pool.num_stages)} if self.pool.num_stages > 1 else {}),
        }

    def find_weaknesses(self) -> dict[str, str]:
        """Features that work worse than they could on this machine |-> why, and what to change."""
        return {}


SizePool = Callable[[int, int, int, tuple[int, int, int] | None, int, int], tuple[int, int]]
"""(model's context in tokens, bytes of a page of one rank, ranks, (all, held, needed by the largest step) bytes of the
GPU or None, bytes of weights mapped from a file, bytes of a slot of one rank) |-> pages, slots"""


@dataclass(frozen=True, slots=True)
class Place:
    """An engine's position among the ranks of its worker, and how its rows and runners are built."""

    ranks: Ranks = ONE_RANK
    # empty memory files shared by all ranks, for pages and for slots; -1 with one rank, or several hosts
    pool_fds: tuple[int, int] = (-1, -1)
    build_rows: Callable[..., InputBatch] = InputBatch
    build_runner: Callable[..., Runner] = lambda number, *parts: Runner(*parts)
    """(0: the model, 1: the draft model; Runner's arguments)"""
    build_head_runner: Callable[..., Runner] | None = None  # None: heads.runner.HeadRunner
    lends: bool = True  # peers read its pages and slots
    num_hosts: int = 1  # that have as many ranks each


ALONE = Place()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights on the device."""

    folder: Path  # of the checkpoint
    weights: str  # fingerprint
    decoder: Decoder
    kv_parts: tuple[KvPart, ...]  # over all ranks
    state_parts: tuple[StatePart, ...] = ()  # the same


def resolve_kv_dtype(kv_dtype: KvDType, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the pages: the model's, unless fp8 is requested."""
    return torch.float8_e4m3fn if kv_dtype == "fp8" else model_dtype


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_device(wanted: str, rank: int = 0, size: int = 1, num_hosts: int = 1) -> torch.device:
    """The device of a rank: "auto" is cuda if there is one; the n-th rank on a host has the n-th GPU.

    ValueError if there are fewer GPUs than ranks.
    """
    size //= num_hosts
    rank %= size
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or install torch with CUDA")
    if wanted == "cpu" or not count:
        return torch.device("cpu")
    if size == 1:
        return torch.device("cuda")
    if size > count:
        raise ValueError(f"{size} ranks need as many GPUs, and torch sees {count}: set --tp {count} or less")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
