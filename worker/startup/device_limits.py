"""Asks the device and the checkpoint for what limits.py decides by, and says in the log what came of it."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from engine.compose import open_any_model, resolve_model_folder
from engine.cuda.largest_step import LargestStep
from engine.cuda.sizes import most_logits
from engine.engine import resolve_kv_dtype
from engine.fallback.config import FallbackConfig
from engine.heads.read_medusa import find_weights
from engine.models.config import ModelConfig
from engine.models.load import choose_dtype
from engine.weights.files import list_shards
from runtime.config import DecodeConfig, PrefillConfig
from runtime.config_parts import NO_DRAFT
from runtime.gpus import find_card
from runtime.hardware import available_memory_bytes, num_cores, resolve_threads
from wire.names import MTP, KvDType, Quantization
from wire.pooling import read_pooling
from worker.startup.limits import (
    CPU_CHUNK,
    CPU_PROMPTS,
    MIB,
    SHORT_PROMPT,
    SHRINKS_TO,
    ConfigT,
    GpuRoom,
    ModelShape,
    complete,
    estimate_step_bytes,
    limits_of,
    reserve_bytes,
    shape_of,
    with_context,
)
from worker.startup.pool_size import resolve_pools

log = structlog.get_logger()


class CheckpointHeaders(NamedTuple):
    """A checkpoint, without reading its weights."""

    config: ModelConfig | FallbackConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    file_bytes: int  # of the weights of all folders
    shape: ModelShape  # with the weights of the draft model too, and KV as the settings make it


@lru_cache(maxsize=1)  # a worker needs them for its limits and again for its pool
def read_headers(
    folder: Path, draft: Path | None, dtype: str, kv_dtype: KvDType, quantization: Quantization
) -> CheckpointHeaders:
    """Raises ValueError or OSError like `build_engine`."""
    folders = [folder, *([find_weights(draft)] if draft else [])]
    file_bytes = sum(path.stat().st_size for one in folders for path in list_shards(one))
    model, checkpoint = open_any_model(folder)
    embedding = f"{model.prefix}embed_tokens.weight" if isinstance(model, ModelConfig) else ""
    chosen = choose_dtype(checkpoint, dtype, embedding)
    kept = resolve_kv_dtype(kv_dtype, chosen)
    shape = shape_of(model, int(file_bytes * SHRINKS_TO[quantization]))
    return CheckpointHeaders(model, chosen, kept, file_bytes, replace(shape, kv_item_bytes=kept.itemsize))


def read_shape(config: PrefillConfig | DecodeConfig) -> ModelShape:
    """The shape of a stage of a worker's located model, with the context limit of the settings."""
    draft = None if config.draft_model in (NO_DRAFT, MTP) else resolve_model_folder(config.draft_model)
    folder = resolve_model_folder(config.model)
    headers = read_headers(folder, draft, config.dtype, config.kv_dtype, config.quantization)
    return with_context(headers.shape.of_stage(config.pp), config)


def complete_here(config: ConfigT, device: torch.device) -> ConfigT:
    """The settings with limits for `device`, that of rank 0. Raises ValueError or OSError like `build_engine`."""
    if device.type != "cuda":
        return complete(_widen(config), None, None)
    facts = torch.cuda.get_device_properties(device)
    shape = read_shape(config)
    completed = complete(config, shape, find_card(facts.name, facts.total_memory), facts.total_memory)
    limits = limits_of(completed, shape.vocab_size, most_logits(facts.total_memory))
    log.info(
        "limits", device=facts.name, max_running=limits.max_running, chunk_tokens=limits.chunk_tokens,
        graph_rows=limits.graph_rows,
    )  # fmt: skip
    return completed


def _widen(config: ConfigT) -> ConfigT:
    """Where texts are computed whole, each thread computes its own, and while a step runs others come for the next."""
    if not isinstance(config, PrefillConfig):
        return config
    path = resolve_model_folder(config.model) / "config.json"
    pooling = read_pooling(path.parent) if path.is_file() else None
    if pooling is None or not pooling.is_whole:
        return config
    chunk = config.chunk_tokens or CPU_CHUNK * resolve_threads(config.threads, num_cores())
    running = config.max_running or max(CPU_PROMPTS, 2 * chunk // SHORT_PROMPT)
    return replace(config, chunk_tokens=chunk, max_running=running)


def largest_step_of(config: PrefillConfig | DecodeConfig) -> LargestStep:
    """The largest step that completed settings allow."""
    if isinstance(config, PrefillConfig):
        return LargestStep(config.chunk_tokens, config.max_running, "--chunk-tokens")
    return LargestStep(config.local_prefill_chunk_tokens, config.max_running, "--local-prefill-chunk-tokens")


def size_pool_here(
    config: PrefillConfig | DecodeConfig,
    context_tokens: int,
    page_bytes: int,
    num_ranks: int,
    gpu_memory: tuple[int, int, int] | None,
    mapped_bytes: int,
    slot_bytes: int = 0,
) -> tuple[int, int]:
    """engine/engine.py: SizePool, after `config`. Of completed settings."""
    room = None
    if gpu_memory is not None:
        total_bytes, taken_bytes, step_bytes = gpu_memory
        shape = read_shape(config)
        limits = limits_of(config, shape.vocab_size, most_logits(total_bytes))
        room = GpuRoom(total_bytes, taken_bytes, reserve_bytes(shape, limits, config.tp, step_bytes))
        log.info(
            "memory of the GPU", total_mib=total_bytes // MIB, weights_and_rows_mib=taken_bytes // MIB,
            largest_step_mib=step_bytes // MIB, step_estimated_mib=estimate_step_bytes(shape, limits, config.tp) // MIB,
            computing_mib=room.reserve_bytes // MIB,
        )  # fmt: skip
    # mapped weights count as free, but are needed
    host_bytes = config.num_hosts * max(0, available_memory_bytes() - mapped_bytes)
    return resolve_pools(config, context_tokens, page_bytes, num_ranks, room, host_bytes, slot_bytes)
