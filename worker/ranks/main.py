"""A rank of a worker other than 0: follows rank 0's steps, and serves its part of the pages or reads into it.

    python -m worker.ranks.main CALLS_FD STEPS_FD

Both are connections to rank 0. It ends when rank 0 hangs up, and with the thread that started it.
"""

import asyncio
import os
import socket
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch

from engine.compose import FullEngine
from engine.engine import Place
from engine.out_of_memory import end_process
from engine.rank_group import LOOPBACK
from engine.stages import build_follower
from kvtransfer.checksums import compute_checksums
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.reader import PageRef, Reader, ReadError
from kvtransfer.transports import describe_rank
from protos import kv_pb2
from runtime import rpc
from runtime.child import serve_parent
from runtime.config import DecodeConfig, PrefillConfig, RolesConfig
from runtime.lifecycle import spare_what_is_here
from runtime.logs import setup_logging
from runtime.trust import load_trust
from worker.adapters.loader import read_adapter
from worker.new_weights import ReadWeights
from worker.peers.other_ranks import ALONE
from worker.peers.pools import RankedPool, build_pools
from worker.ranks import calls
from worker.ranks.leader import follow
from worker.ranks.links import StepReceiver
from worker.ranks.meeting import OWN_VARIABLE, find_interface
from worker.startup.build import build_rank_engine, find_weights, join_rank

log = structlog.get_logger()
CONFIGS: dict[str, type[PrefillConfig] | type[DecodeConfig]] = {
    "prefill": PrefillConfig, "decode": DecodeConfig, "worker": RolesConfig,
}  # fmt: skip


class Rank:
    """Answers rank 0's calls."""

    def __init__(self, steps_fd: int, own: dict[str, Any]) -> None:
        """`own`: settings of this host, where it is not rank 0's."""
        self._steps_fd = steps_fd
        self._own = own
        self._pools: list[RankedPool] = []  # of pages and of slots
        self._readers: dict[int, Reader] = {}  # that rank 0 has opened here
        self._engine: FullEngine | None = None
        self._read: ReadWeights | None = None
        self._step_lock = threading.Lock()

    async def answer(self, call: calls.Call) -> calls.Ready | calls.Done:
        if isinstance(call, calls.Start):
            return await self._start(call)
        done = calls.Done()
        try:
            await self._do(call, done)
        except ReadError as error:
            done.reason, done.detail = error.reason, error.detail
        except Exception as error:
            log.exception("a call of rank 0 failed")
            done.reason, done.detail = "transport", str(error) or type(error).__name__
        reader = None
        if isinstance(call, calls.ReaderCall):
            reader = self._readers.get(call.reader)
        done.is_gone = bool(done.reason) and reader is not None and reader.is_gone()
        return done

    async def _start(self, start: calls.Start) -> calls.Ready:
        config = msgspec.convert(msgspec.json.decode(start.config) | self._own, CONFIGS[start.role])
        setup_logging(f"{start.role} rank {start.rank}", config.log_level, config.log_format)
        try:
            interface = find_interface(start.address) if start.address else LOOPBACK
            ranks = join_rank(config, start.rank, start.rendezvous, interface)
            build = partial(build_follower, ranks)
            place = Place(ranks, start.pool_fds, build_runner=build, num_hosts=config.num_hosts)
            engine = build_rank_engine(config, place)
        except (ValueError, OSError, RuntimeError) as error:
            log.error("cannot start", reason=str(error))
            end_process()
        self._engine, self._read = engine, ReadWeights(engine)
        spare_what_is_here()
        receiver = StepReceiver(socket.socket(fileno=self._steps_fd))
        threading.Thread(target=_follow, args=(receiver, engine, self._step_lock), name="engine", daemon=True).start()
        trust = load_trust(config)
        trust.watch_handshakes()
        self._pools = build_pools(engine, config, start.incarnation, trust, ALONE)
        server = self._server = trust.build_server()
        PageServer({pool.incarnation: pool.own for pool in self._pools}).add_to(server)
        address = f"{config.reachable_host}:{trust.bind(server, config.host, 0)}"
        await rpc.start(server)
        host = rpc.host_identity()
        ranks_of_pools = [describe_rank(pool.local, address, host).SerializeToString() for pool in self._pools]
        return calls.Ready(ranks_of_pools, list(find_weights(engine)))

    async def _do(self, call: calls.Call, done: calls.Done) -> None:
        match call:
            case calls.OpenReader():
                peer = kv_pb2.Peer.FromString(call.peer)
                self._readers[call.reader] = await self._pools[call.is_states].open(call.transport, peer)
            case calls.ReadPages():
                sources = [PageRef(*pair) for pair in zip(call.pages, call.generations, strict=True)]
                await self._readers[call.reader].read(sources, call.into)
            case calls.ProbePages():
                await self._readers[call.reader].probe(call.num_pages)
            case calls.CloseReader():
                if (reader := self._readers.pop(call.reader, None)) is not None:
                    await reader.close()
            case calls.ComputeChecksums():
                done.checksums = await asyncio.to_thread(
                    compute_checksums, self._pools[call.is_states].own, call.pages, call.begin, call.num_bytes
                )
            case calls.SavePages():
                await asyncio.to_thread(self._pools[call.is_states].tiers.save, call.entries)
            case calls.RestorePages():
                done.drafts = await asyncio.to_thread(self._pools[call.is_states].tiers.load, call.keys, call.into)
            case calls.LoadAdapter():
                await self._load_adapter(call)
            case calls.SetWeights():
                assert self._read is not None
                # rank 0 has collected all steps: of the last one this rank may still have to finish what it returns
                with self._step_lock if call.verb == "take" else nullcontext():
                    await asyncio.to_thread(self._read.do, call.verb, call.folder, call.weights)

    async def _load_adapter(self, call: calls.LoadAdapter) -> None:
        assert self._engine is not None and self._engine.adapters is not None
        try:
            adapter = await asyncio.to_thread(read_adapter, self._engine, Path(call.folder), call.digest)
        except (ValueError, OSError) as error:
            raise ReadError("adapter", str(error)) from error
        self._engine.adapters.hosted[call.key] = adapter


def _follow(receiver: StepReceiver, engine: FullEngine, lock: threading.Lock) -> None:
    if engine.device.type == "cuda":
        torch.cuda.set_device(engine.device)  # new threads use GPU 0 by default
    try:
        follow(receiver, engine.rows, [engine.runner, *([engine.draft_runner] if engine.draft_runner else [])], lock)
    except Exception:
        log.exception("this rank cannot follow any more")
    finally:
        end_process()


if __name__ == "__main__":
    own = msgspec.json.decode(os.environ.pop(OWN_VARIABLE, "{}"))
    asyncio.run(serve_parent(int(sys.argv[1]), calls.Call, Rank(int(sys.argv[2]), own).answer))
