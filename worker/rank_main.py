"""A rank of a worker other than 0: follows rank 0's steps, and serves its part of the pages or reads into it.

    python -m worker.rank_main FD

FD is one end of a socket pair. The process ends when the other end closes, or with the thread that started it.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field

import msgspec
import structlog
import torch

from engine.engine import Engine, Place
from engine.out_of_memory import end_process
from engine.ranks import join_group
from kvtransfer.checksums import compute_checksums
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.reader import PageRef, Reader, ReadError
from kvtransfer.transports import describe_rank
from protos import kv_pb2
from runtime import rpc
from runtime.config import DecodeConfig, PrefillConfig
from runtime.lifecycle import die_with_parent, is_abandoned, spare_what_is_here
from runtime.logs import setup_logging
from runtime.trust import load_trust
from worker import rank_link as link
from worker.process import RANKS_S, build_rank_engine, choose_rank_device
from worker.rank_ring import RingFollower, parse_fds
from worker.ranked_pool import RankedPool, build_pools
from worker.ranks import follow

log = structlog.get_logger()
CONFIGS: dict[str, type[PrefillConfig] | type[DecodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}


def main(fd: int) -> None:
    die_with_parent()
    sock = socket.socket(fileno=fd)
    if is_abandoned(fd):  # the parent died before die_with_parent took effect
        sys.exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is for rank 0, which drains first
        signal.signal(number, signal.SIG_IGN)
    start = link.receive_start(sock)
    config = msgspec.json.decode(start.config, type=CONFIGS[start.role])
    setup_logging(f"{start.role} rank {start.rank}", config.log_level)
    try:
        ranks = join_group(start.rendezvous, start.rank, start.size, choose_rank_device(config, start.rank), RANKS_S)
        engine = build_rank_engine(config, Place(ranks, (start.pool_fds[0], start.pool_fds[1])))
    except (ValueError, OSError, RuntimeError) as error:
        log.error("cannot start", reason=str(error))
        sys.exit(1)
    spare_what_is_here()
    ring = RingFollower(parse_fds(start.ring_fds), start.rank - 1)
    threading.Thread(target=_follow, args=(ring, engine), name="engine", daemon=True).start()
    asyncio.run(_serve(sock, start, config, engine))


def _follow(ring: RingFollower, engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.set_device(engine.device)  # new threads use GPU 0 by default
    try:
        follow(ring, engine.rows, [engine.runner, *([engine.draft_runner] if engine.draft_runner else [])])
    except Exception:
        log.exception("this rank cannot follow any more")
    finally:
        end_process()


async def _serve(
    sock: socket.socket, start: link.Start, config: PrefillConfig | DecodeConfig, engine: Engine
) -> None:  # fmt: skip
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    trust = load_trust(config)
    trust.watch_handshakes()
    pools, address = build_pools(engine, config, start.incarnation, trust), ""
    if isinstance(config, PrefillConfig):
        server = trust.build_server()
        PageServer({pool.incarnation: pool.own for pool in pools}).add_to(server)
        address = f"{config.reachable_host}:{trust.bind(server, config.host, 0)}"
        await rpc.start(server)
    packed = [describe_rank(pool.local, address).SerializeToString() for pool in pools]
    writer.write(link.encode(link.Ready(packed[0], packed[1] if len(packed) > 1 else b"")))
    readers = _Readers(pools)
    try:
        while True:
            call = await link.receive(reader)
            assert isinstance(call, link.Call)
            readers.begin(call, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(0)  # rank 0 is gone or has closed: nothing here needs saving


@dataclass(slots=True)
class _Readers:
    """The readers that rank 0 has opened here."""

    pools: list[RankedPool]  # of pages and of slots
    opened: dict[int, Reader] = field(default_factory=dict)
    _going_on: set[asyncio.Task[None]] = field(default_factory=set)

    def begin(self, call: link.Call, writer: asyncio.StreamWriter) -> None:
        """Start a call and send its answer later. Calls run in parallel."""
        task = asyncio.create_task(self._answer(call, writer))
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)

    async def _answer(self, call: link.Call, writer: asyncio.StreamWriter) -> None:
        done = link.Done(call.call)
        try:
            await self._do(call, done)
        except ReadError as error:
            done.reason, done.detail = error.reason, error.detail
        except Exception as error:
            log.exception("a call of rank 0 failed")
            done.reason, done.detail = "transport", str(error) or type(error).__name__
        if not isinstance(call, link.Checksum) and (reader := self.opened.get(call.reader)) is not None:
            done.is_gone = bool(done.reason) and reader.is_gone()
        writer.write(link.encode(done))

    async def _do(self, call: link.Call, done: link.Done) -> None:
        match call:
            case link.Open():
                peer = kv_pb2.Peer.FromString(call.peer)
                self.opened[call.reader] = await self.pools[call.is_states].open(call.transport, peer)
            case link.Read():
                sources = [PageRef(*pair) for pair in zip(call.pages, call.generations, strict=True)]
                await self.opened[call.reader].read(sources, call.into)
            case link.Probe():
                await self.opened[call.reader].probe(call.num_pages)
            case link.Close():
                if (reader := self.opened.pop(call.reader, None)) is not None:
                    await reader.close()
            case link.Checksum():
                done.checksums = await asyncio.to_thread(
                    compute_checksums, self.pools[call.is_states].own, call.pages, call.begin, call.num_bytes
                )


if __name__ == "__main__":
    main(int(sys.argv[1]))
