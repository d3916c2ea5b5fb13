"""A worker's GPU memory at its limits, against what its plan allows. The arithmetic is worker/startup/limits.py's."""

import torch

from bench.gpu_checks.card import GIB, scale_for
from bench.gpu_checks.models import PAGE_TOKENS, load_random
from bench.roofline import SHAPES
from engine.catalogue import build_config
from engine.compose import assemble_engine
from engine.cuda.largest_step import run
from engine.cuda.sizes import most_logits
from runtime.config import DecodeConfig
from runtime.config_parts import GPU_SHARE
from runtime.gpus import find_card
from runtime.hardware import available_memory_bytes
from worker.startup.device_limits import largest_step_of
from worker.startup.limits import GpuRoom, complete, estimate_room, limits_of, reserve_bytes, shape_of
from worker.startup.pool_size import resolve_pools

TRIAL_MIB = 16  # of a pool on a CPU


def check_memory(device: torch.device) -> str:
    """High-water of a decode worker with default limits, all graphs and the largest step: within its share"""
    name, is_gpu = scale_for(device).large, device.type == "cuda"
    shape = shape_of(build_config(SHAPES[name]))
    config = complete(DecodeConfig(model=name, kv_memory_mib=TRIAL_MIB, max_running=8), None, None)
    total = 0
    if is_gpu:
        facts = torch.cuda.get_device_properties(device)
        total, card = facts.total_memory, find_card(facts.name, facts.total_memory)
        config = complete(DecodeConfig(model=name), shape, card, total)
    limits, largest, seen = limits_of(config, shape.vocab_size, most_logits(total)), largest_step_of(config), [0]

    def size(
        context: int, page_bytes: int, num_ranks: int, memory: tuple[int, int, int] | None, mapped_bytes: int,
        slot_bytes: int,
    ) -> tuple[int, int]:  # fmt: skip
        room = None
        if memory is not None:
            seen[0] = memory[2]
            room = GpuRoom(memory[0], memory[1], reserve_bytes(shape, limits, 1, memory[2]))
        host_bytes = available_memory_bytes() - mapped_bytes
        return resolve_pools(config, context, page_bytes, num_ranks, room, host_bytes, slot_bytes)

    loaded = load_random(name, device)
    engine = assemble_engine(loaded, None, PAGE_TOKENS, limits.num_rows, size, largest_step=largest)
    engine.warm_up(limits.graph_rows, limits.max_drafts, limits.piece_tokens)
    run(largest, engine.runner, engine.rows)
    found = f"{name}, {limits.max_running} sessions, {limits.chunk_tokens} prompt tokens, {engine.num_pages} pages"
    if not is_gpu:
        return f"{found}: the largest step ran"
    free = torch.cuda.mem_get_info(device)[0]
    used, planned = total - free, GPU_SHARE * total
    estimated = estimate_room(shape, limits, total, 1).left_bytes(GPU_SHARE) // engine.pool.page_bytes
    found += (
        f" ({estimated} estimated): {used / GIB:.2f} GiB used, {planned / GIB:.2f} planned; the largest step took "
        f"{seen[0] / GIB:.2f}, reserve {reserve_bytes(shape, limits, 1, seen[0]) / GIB:.2f}"
    )
    assert used <= planned, found
    return found
