"""How many pages and slots of state a worker's pools get, and what to set if they do not fit. Pure."""

import math
from typing import NamedTuple

from engine.cuda.sizes import most_logits
from runtime.config import DecodeConfig, PrefillConfig
from runtime.config_parts import GPU_SHARE
from runtime.gpus import Card
from runtime.settings import ConfigError
from worker.startup.limits import (
    MIB,
    SLOTS_EACH,
    SLOTS_SHARE,
    GpuRoom,
    ModelShape,
    complete,
    estimate_room,
    limits_of,
    resolve_context,
    with_context,
)

USEFUL_TOKENS = 1024  # a shorter context is not advised
LEAST_SLOTS = 4


class PoolPlan(NamedTuple):
    """The settings and pools that a worker will choose at its start."""

    settings: PrefillConfig | DecodeConfig  # complete
    room: GpuRoom | None
    num_pages: int
    num_slots: int


def plan_pools(
    config: PrefillConfig | DecodeConfig,
    shape: ModelShape,
    page_bytes: int,
    card: Card | None,
    memory_bytes: int,
    host_bytes: int,
) -> PoolPlan:
    """Predicts the pools that a worker chooses at its start. Raises ConfigError.

    `page_bytes`: of a rank. `card`, `memory_bytes`: of its GPU; None and 0 on a CPU.
    """
    shape = shape.of_stage(config.pp)
    settings, room = complete(config, None if card is None else shape, card, memory_bytes), None
    if card is not None:
        own = with_context(shape, settings)
        room = estimate_room(
            own, limits_of(settings, shape.vocab_size, most_logits(memory_bytes)), memory_bytes, config.tp
        )
    slot_bytes = shape.slot_bytes_of(config.tp)
    return PoolPlan(
        settings,
        room,
        *resolve_pools(settings, shape.context_tokens, page_bytes, config.num_ranks, room, host_bytes, slot_bytes),
    )


def resolve_pools(
    config: PrefillConfig | DecodeConfig,
    model_context_tokens: int,
    page_bytes: int,
    num_ranks: int,
    room: GpuRoom | None,
    host_bytes: int,
    slot_bytes: int = 0,
) -> tuple[int, int]:
    """Pages and slots: `kv_memory_mib` if set, else `max_running` full contexts within the worker's share of memory.

    `config`: completed by limits.py. `page_bytes`, `slot_bytes`: of one rank; slots take at most half of the
    memory. `room`: of a rank's GPU; None on a CPU, where `host_bytes` are free for all ranks. Raises ConfigError if
    one sequence has not enough slots, or not even one full context fits.
    """
    if config.kv_memory_mib:
        memory_bytes = config.kv_memory_mib * MIB // num_ranks
    elif room is None:
        memory_bytes = int(host_bytes * config.kv_memory_share) // num_ranks
    else:
        memory_bytes = room.left_bytes(config.gpu_memory_share or GPU_SHARE)
    num_slots = _resolve_slots(config.max_running, slot_bytes, num_ranks, memory_bytes) if slot_bytes else 0
    states_bytes = num_slots * slot_bytes
    context_tokens = resolve_context(config.max_context_tokens, model_context_tokens)
    wanted = -(-context_tokens // config.page_tokens)
    num_pages = max(0, memory_bytes - states_bytes) // page_bytes
    if not config.kv_memory_mib:
        num_pages = min(config.max_running * wanted, num_pages)
    needed_mib = -(-num_ranks * (wanted * page_bytes + states_bytes) // MIB)
    if room is not None:
        room = room._replace(taken_bytes=room.taken_bytes + states_bytes)
        if advice := _advise_on_gpu(config, num_pages, wanted, page_bytes, needed_mib, room):
            raise ConfigError(f"{_describe_gpu(config, wanted, page_bytes, room)}: set {advice}")
    elif num_pages < wanted:
        raise ConfigError(
            f"kv_memory_mib={config.kv_memory_mib} holds {num_pages * config.page_tokens} tokens, less than one "
            f"context of {context_tokens}: set --kv-memory-mib {needed_mib} or more, or a smaller --max-context-tokens"
        )
    return num_pages, num_slots


def _resolve_slots(max_running: int, slot_bytes: int, num_ranks: int, memory_bytes: int) -> int:
    """Some for each of `max_running` sequences."""
    most_bytes = int(memory_bytes * SLOTS_SHARE)
    num_slots = min(SLOTS_EACH * max_running + 1, most_bytes // slot_bytes)
    if num_slots < LEAST_SLOTS:
        needed_mib = -(-int(LEAST_SLOTS * slot_bytes * num_ranks / SLOTS_SHARE) // MIB)
        raise ConfigError(
            f"the model's recurrent state takes {slot_bytes * num_ranks // MIB} MiB a sequence, {LEAST_SLOTS} times "
            f"for one, and {most_bytes * num_ranks // MIB} MiB are left: set --kv-memory-mib {needed_mib} or more"
        )
    return num_slots


def _advise_on_gpu(
    config: PrefillConfig | DecodeConfig, num_pages: int, wanted: int, page_bytes: int, needed_mib: int, room: GpuRoom
) -> str:
    """The setting by which `wanted` pages, or fewer, fit; empty where `num_pages` do.

    Each advice is for what remains when the one before was followed: a share, then a context, then a smaller model.
    """
    share = config.gpu_memory_share or GPU_SHARE
    left, at_most = (room.left_bytes(part) // page_bytes for part in (share, 1.0))
    if config.kv_memory_mib:
        if wanted <= num_pages <= left:
            return ""
        wanted_mib = needed_mib if num_pages < wanted else left * config.num_ranks * page_bytes // MIB
        if not wanted <= wanted_mib * MIB // (config.num_ranks * page_bytes) <= left:
            return "--kv-memory-mib 0, for what is left"
        return f"--kv-memory-mib {wanted_mib} or {'more' if num_pages < wanted else 'less'}"
    if num_pages >= wanted:
        return ""
    if left * config.page_tokens >= USEFUL_TOKENS:
        return f"--max-context-tokens {left * config.page_tokens} or less"
    few = wanted if wanted <= at_most else min(wanted, -(-USEFUL_TOKENS // config.page_tokens))
    wanted_bytes = room.taken_bytes + room.reserve_bytes + (few + 1) * page_bytes
    wanted_share = math.ceil(wanted_bytes / room.total_bytes * 100) / 100
    if share < wanted_share <= 1:
        return f"--gpu-memory-share {wanted_share:g} or more"
    return "--model to a smaller one, or give the worker more GPUs by --tp or --pp (serve: --decode-tp and so on)"


def _describe_gpu(config: PrefillConfig | DecodeConfig, wanted: int, page_bytes: int, room: GpuRoom) -> str:
    share, asked = config.gpu_memory_share or GPU_SHARE, config.kv_memory_mib
    what = f"kv_memory_mib={asked} cannot be used" if asked else "the GPU has no room for the KV of one context"
    return (
        f"{what}: {wanted * config.page_tokens} tokens take {wanted * page_bytes // MIB} MiB on each GPU, and "
        f"{room.left_bytes(share) // MIB} MiB are left of {share:.3g} x {room.total_bytes // MIB} MiB, of which "
        f"weights and rows take {room.taken_bytes // MIB} MiB and computing {room.reserve_bytes // MIB} MiB"
    )
