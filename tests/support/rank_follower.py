"""A rank that follows another process: builds its shard of two models and executes commands until its link is gone.

python -m tests.support.rank_follower MODEL DRAFT RENDEZVOUS_FILE RANK SIZE POOL_FD LINK_FD
"""

import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch

from engine.engine import Place
from engine.rank_group import join_group
from runtime.child import die_with_parent
from tests.support.decode_bench import build, capture
from worker.ranks.leader import follow
from worker.ranks.links import LinkError, StepReceiver

CPU = torch.device("cpu")
MEET_S = 60


def main(model: str, draft: str, rendezvous: str, rank: str, size: str, pool_fd: str, link_fd: str) -> None:
    die_with_parent()
    receiver = StepReceiver(socket.socket(fileno=int(link_fd)))
    ranks = join_group(rendezvous, int(rank), int(size), CPU, MEET_S)
    engine = capture(build(Path(model), Path(draft), Place(ranks, (int(pool_fd), -1))))
    assert engine.draft_runner is not None
    with suppress(LinkError):
        follow(receiver, engine.rows, [engine.runner, engine.draft_runner])


if __name__ == "__main__":
    main(*sys.argv[1:])
