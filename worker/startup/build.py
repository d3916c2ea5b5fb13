"""Builds the engine of one rank of a worker."""

from collections.abc import Callable
from functools import partial

import torch

from engine.adapters.slots import AdapterLimits
from engine.compose import FullEngine, build_engine, open_ranks, resolve_model_folder
from engine.engine import Place, choose_device
from engine.heads.read_medusa import is_medusa
from engine.rank_group import GroupRanks, Store, join_group
from engine.stages import StagedRanks
from runtime.config import DecodeConfig, PrefillConfig
from runtime.config_parts import NO_DRAFT
from runtime.hardware import num_cores, resolve_threads
from wire.names import MTP
from worker.startup.device_limits import largest_step_of, size_pool_here
from worker.startup.limits import limits_of
from worker.table import num_rows_for
from worker.thread import call_in_thread

RANKS_S = 1800.0  # for all ranks to load their parts, and for any exchange; a step's age shows if one hangs


def choose_rank_device(config: PrefillConfig | DecodeConfig, rank: int) -> torch.device:
    """Raises ValueError if there is no such device."""
    return choose_device(config.device, rank, config.num_ranks, config.num_hosts)


def join_rank(config: PrefillConfig | DecodeConfig, rank: int, rendezvous: str | Store, interface: str) -> GroupRanks:
    """See `join_group`. On several hosts no rank opens another's memory."""
    device = choose_rank_device(config, rank)
    open_group = open_ranks(device) if config.num_hosts == 1 else GroupRanks
    open_group = partial(StagedRanks, config.pp) if config.pp > 1 else open_group
    return join_group(rendezvous, rank, config.num_ranks, device, RANKS_S, open_group, interface)


def find_weights(engine: FullEngine) -> tuple[str, str]:
    """The fingerprints of what it computes and drafts by, the same on all ranks."""
    return engine.weights, engine.draft_weights


def build_rank_engine(
    config: PrefillConfig | DecodeConfig,
    place: Place,
    on_progress: Callable[..., None] = lambda done, total, what="": None,
) -> FullEngine:
    """Build the engine of a worker's rank; all ranks do so in parallel."""
    if choose_rank_device(config, place.ranks.rank).type == "cuda":
        return _build_here(config, place, on_progress)
    # OpenMP keeps helper threads per computing thread, and puts them to sleep at once when they outnumber the cores.
    # So only the engine's thread may have helpers while it runs.
    return call_in_thread(partial(_build_here, config, place, on_progress))


def _find_draft(config: PrefillConfig | DecodeConfig) -> str:
    """Empty for none, and where prompts alone are computed for heads without KV: there is nothing to hand over."""
    if config.draft_model == NO_DRAFT:
        return ""
    is_prefill = isinstance(config, PrefillConfig) and config.draft_model != MTP
    return "" if is_prefill and is_medusa(resolve_model_folder(config.draft_model)) else config.draft_model


def _build_here(config: PrefillConfig | DecodeConfig, place: Place, on_progress: Callable[..., None]) -> FullEngine:
    engine = build_engine(
        config.model,
        _find_draft(config),
        config.dtype,
        config.device,
        max(1, resolve_threads(config.threads, num_cores()) // config.ranks_here),
        config.page_tokens,
        num_rows_for(config.max_running),
        partial(size_pool_here, config),
        on_progress,
        config.max_context_tokens,
        config.quantization,
        config.kv_dtype,
        place,
        largest_step_of(config),
        AdapterLimits(config.max_loras, config.max_lora_rank),
        config.vision,
    )
    limits = limits_of(config, engine.config.vocab_size, engine.rows.max_logits)
    report = partial(on_progress, what="graphs")
    engine.warm_up(limits.graph_rows, limits.max_drafts, limits.piece_tokens, report)
    return engine
