"""A worker's process on a host other than the first: starts its ranks there, and ends with any of them or host 0."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from kvtransfer.page_files import host_folder, remove_unowned
from runtime.child import ChildProcess, describe_exit, open_stream, receive
from runtime.config import DecodeConfig, PrefillConfig
from runtime.ops import OpsServer, Probes
from worker.ranks.children import name_within
from worker.ranks.meeting import OWN_SETTINGS, OWN_VARIABLE, Ended, HostMessage, visit

log = structlog.get_logger()

MARGIN_S = 30.0  # for host 0 to end, beyond its drain


def run(role: str, config: PrefillConfig | DecodeConfig, ops: OpsServer) -> int:
    """Until host 0 ends; returns the exit code. Raises ValueError if host 0 does not come, or refuses this host."""
    return asyncio.run(_follow(config, visit(role, config), ops))


async def _follow(config: PrefillConfig | DecodeConfig, links: list[socket.socket], ops: OpsServer) -> int:
    control, *own = links
    ranks = _start_ranks(config, own)
    is_serving, is_asked = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # host 0 is asked, too, and drains first
        asyncio.get_running_loop().add_signal_handler(number, is_asked.set)

    def find_obstacle() -> str | None:
        return None if is_serving.is_set() else "host 0 does not serve yet"

    ops.follow(Probes(lambda: None, find_obstacle, CollectorRegistry()))
    hearing = asyncio.create_task(_hear(control, is_serving))
    ends = {rank: asyncio.create_task(process.wait()) for rank, process in ranks.items()}
    leaving = asyncio.create_task(_leave(is_asked, config.drain_s + MARGIN_S))
    await asyncio.wait([hearing, leaving, *ends.values()], return_when=asyncio.FIRST_COMPLETED)
    if not leaving.done() and (not hearing.done() or hearing.result()):  # the others show who was the first
        await asyncio.wait([hearing, *ends.values()], timeout=name_within(config))
    host = hearing.result() if hearing.done() else "host 0 has not said that it ended"
    reason = explain_end(host, {rank: end.result() for rank, end in ends.items() if end.done()})
    if reason and not is_asked.is_set():
        log.error("the worker ends", reason=reason)
    for process in ranks.values():
        process.kill()
    if config.kv_host_gib and config.ready_fd is None:
        await asyncio.gather(*(process.wait() for process in ranks.values()))
        remove_unowned(host_folder())
    return int(bool(reason) and not is_asked.is_set())


def _start_ranks(config: PrefillConfig | DecodeConfig, links: list[socket.socket]) -> dict[int, ChildProcess]:
    """Rank |-> its process, which alone has its two connections then."""
    own = msgspec.json.encode({name: getattr(config, name) for name in OWN_SETTINGS}).decode()
    ranks: dict[int, ChildProcess] = {}
    for number in range(config.ranks_here):
        calls, steps = links[2 * number : 2 * number + 2]
        with calls, steps:
            fds = calls.fileno(), steps.fileno()
            command = [sys.executable, "-P", "-m", "worker.ranks.main", *map(str, fds)]
            rank = config.host_rank * config.ranks_here + number
            ranks[rank] = ChildProcess(command, {**os.environ, OWN_VARIABLE: own}, fds)
    return ranks


async def _hear(control: socket.socket, is_serving: asyncio.Event) -> str:
    """Wait until host 0 ends; returns why it did, empty if it was asked to."""
    decoder = msgspec.msgpack.Decoder(HostMessage)
    reader, writer = await open_stream(control)
    try:
        while not isinstance(decoder.decode(await receive(reader)), Ended):
            log.info("ready")
            is_serving.set()
        return ""
    except EOFError:
        return "host 0 hung up"
    except (OSError, ValueError) as error:
        return f"host 0 does not answer: {error}"
    finally:
        writer.close()


def explain_end(host: str, codes: Mapping[int, int]) -> str:
    """Why the worker ended; empty if it was asked to. `host`: what became of host 0; codes: rank |-> exit status.

    Ranks end with host 0, but not by a signal, and host 0 with any rank. Pure.
    """
    killed = {rank: code for rank, code in codes.items() if code < 0}
    failed = killed or {rank: code for rank, code in codes.items() if code}
    ends = [f"rank {rank} ended with {describe_exit(code)}" for rank, code in failed.items()]
    return "; ".join(ends if killed or not host else [host, *ends])


async def _leave(is_asked: asyncio.Event, timeout_s: float) -> str:
    await is_asked.wait()
    await asyncio.sleep(timeout_s)
    return ""
