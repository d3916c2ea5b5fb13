"""A rank that follows another process: builds its shard of two models and does what it is told, until the ring is gone.

python -m tests.rank_follower MODEL DRAFT RENDEZVOUS_FILE RANK SIZE FD...
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.attention.choose import choose_attention
from engine.kvcache.pool import Pool, PoolShape
from engine.model.decoder import Decoder
from engine.model.weights import load_model
from engine.ranks import GroupRanks
from engine.rows import Rows
from engine.runner import Runner
from runtime.lifecycle import die_with_parent
from worker.rank_ring import RingError, RingFollower, parse_fds
from worker.ranks import follow

CPU = torch.device("cpu")
PAGE_TOKENS, NUM_PAGES, NUM_ROWS, CONTEXT = 8, 300, 24, 256
MEET_S = 60


def meet(rendezvous: str, rank: int, size: int) -> GroupRanks:
    dist.init_process_group("gloo", f"file://{rendezvous}", timedelta(seconds=MEET_S), world_size=size, rank=rank)
    assert dist.group.WORLD is not None
    return GroupRanks(dist.group.WORLD)


def build_parts(
    folders: tuple[Path, Path], ranks: GroupRanks, build_rows: Callable[..., Rows], build_runner: Callable[..., Runner]
) -> tuple[Rows, Pool, list[Runner]]:
    """Rows, pages and a runner for a model and its draft model, as this rank has them."""
    decoders = [load_model(folder, "float32", CPU, ranks=ranks) for folder in folders]
    rows = build_rows(NUM_ROWS, CONTEXT, PAGE_TOKENS, decoders[0].config.vocab_size, CPU)
    pool = Pool(shape_of(decoders[0]), CPU, shape_of(decoders[1]))
    runners = []
    for number, (decoder, pages) in enumerate(zip(decoders, (pool.tensor, pool.draft_tensor), strict=True)):
        shape: Any = decoder.config.attention_shape
        backend = choose_attention(shape, decoder.config.windows, CPU, torch.float32).backend
        runners.append(build_runner(number, decoder, backend, pages, rows))
    return rows, pool, runners


def shape_of(decoder: Decoder) -> PoolShape:
    config = decoder.config
    return PoolShape(NUM_PAGES, config.num_layers, config.num_kv_heads, PAGE_TOKENS, config.head_dim, torch.float32)


def main(model: str, draft: str, rendezvous: str, rank: str, size: str, *fds: str) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    ring = RingFollower(parse_fds(list(map(int, fds))), int(rank) - 1)
    ranks = meet(rendezvous, int(rank), int(size))
    rows, _pool, runners = build_parts((Path(model), Path(draft)), ranks, Rows, lambda _number, *parts: Runner(*parts))
    with suppress(RingError):
        follow(ring, rows, runners)


if __name__ == "__main__":
    main(*sys.argv[1:])
