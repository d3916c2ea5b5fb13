"""A rank of a worker other than 0: follows rank 0's steps, and serves its part of the pages or reads into it.

    python -m worker.rank_main FD

It ends when rank 0 hangs up, and with the thread that started it.
"""

import asyncio
import os
import sys
import threading

import msgspec
import structlog
import torch

from engine.engine import Engine, Place
from engine.kv.pool import Pool
from engine.out_of_memory import end_process
from engine.ranks import join_group
from kvtransfer.checksums import compute_checksums
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.opener import Opener
from kvtransfer.reader import PageRef, Reader, ReadError
from protos import kv_pb2
from runtime import rpc
from runtime.child import ParentLink
from runtime.config import DecodeConfig, PrefillConfig
from runtime.lifecycle import spare_what_is_here
from runtime.logs import setup_logging
from runtime.trust import load_trust
from worker.process import build_opener, build_rank_engine, choose_rank_device, name_pools, open_rank
from worker.rank_children import (
    RANKS_S,
    Call,
    CloseReader,
    ComputeChecksums,
    Done,
    OpenReader,
    ProbePages,
    ReadPages,
    Ready,
    Start,
)
from worker.rank_ring import RingFollower
from worker.ranks import follow

log = structlog.get_logger()
CONFIGS: dict[str, type[PrefillConfig] | type[DecodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}


def main(fd: int) -> None:
    link: ParentLink[Call] = ParentLink(fd, Call)
    _number, start = link.receive()
    assert isinstance(start, Start)
    config = msgspec.json.decode(start.config, type=CONFIGS[start.role])
    setup_logging(f"{start.role} rank {start.rank}", config.log_level)
    try:
        ranks = join_group(start.rendezvous, start.rank, start.size, choose_rank_device(config, start.rank), RANKS_S)
        engine = build_rank_engine(config, Place(ranks, start.pool_fds))
    except (ValueError, OSError, RuntimeError) as error:
        log.error("cannot start", reason=str(error))
        sys.exit(1)
    spare_what_is_here()
    ring = RingFollower(start.ring_fds, start.rank - 1)
    threading.Thread(target=_follow, args=(ring, engine), name="engine", daemon=True).start()
    asyncio.run(_serve(link, start, config, engine))


def _follow(ring: RingFollower, engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.set_device(engine.device)  # new threads use GPU 0 by default
    try:
        follow(ring, engine.rows, [engine.runner, *([engine.draft_runner] if engine.draft_runner else [])])
    except Exception:
        log.exception("this rank cannot follow any more")
    finally:
        end_process()


async def _serve(link: ParentLink[Call], start: Start, config: PrefillConfig | DecodeConfig, engine: Engine) -> None:
    trust = load_trust(config)
    trust.watch_handshakes()
    stores, openers, address = name_pools(engine, start.incarnation), [], ""
    if isinstance(config, DecodeConfig):
        openers = [build_opener(f"{name}.{start.rank}", config, pool, trust) for name, pool in stores.items()]
    else:
        server = trust.build_server()
        PageServer(stores).add_to(server)
        address = f"{config.reachable_host}:{trust.bind(server, config.host, 0)}"
        await rpc.start(server)
    opened = [open_rank(address, name, config, pool) for name, pool in stores.items()]
    packed = [facts.SerializeToString() for facts, _nixl in opened]
    link.answer(0, Ready(packed[0], packed[1] if len(packed) > 1 else b""))
    await link.serve(_Readers(openers, list(stores.values())).answer)
    os._exit(0)  # rank 0 is gone or has closed: nothing here needs saving


class _Readers:
    """The readers that rank 0 has opened here."""

    def __init__(self, openers: list[Opener], pools: list[Pool]) -> None:
        """Of pages and of slots; openers on a decode worker only."""
        self._openers = openers
        self._pools = pools
        self._opened: dict[int, Reader] = {}

    async def answer(self, call: Call) -> Done:
        done = Done()
        try:
            await self._do(call, done)
        except ReadError as error:
            done.reason, done.detail = error.reason, error.detail
        except Exception as error:
            log.exception("a call of rank 0 failed")
            done.reason, done.detail = "transport", str(error) or type(error).__name__
        reader = None if isinstance(call, Start | ComputeChecksums) else self._opened.get(call.reader)
        done.is_gone = bool(done.reason) and reader is not None and reader.is_gone()
        return done

    async def _do(self, call: Call, done: Done) -> None:
        match call:
            case OpenReader():
                peer = kv_pb2.Peer.FromString(call.peer)
                self._opened[call.reader] = await self._openers[call.is_states].open(call.transport, peer)
            case ReadPages():
                sources = [PageRef(*pair) for pair in zip(call.pages, call.generations, strict=True)]
                await self._opened[call.reader].read(sources, call.into)
            case ProbePages():
                await self._opened[call.reader].probe(call.num_pages)
            case CloseReader():
                if (reader := self._opened.pop(call.reader, None)) is not None:
                    await reader.close()
            case ComputeChecksums():
                done.checksums = await asyncio.to_thread(
                    compute_checksums, self._pools[call.is_states], call.pages, call.begin, call.num_bytes
                )


if __name__ == "__main__":
    main(int(sys.argv[1]))
