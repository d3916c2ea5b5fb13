"""NIXL's agent, the part of it that reads need, with UCX below it. The only file that knows NIXL's names.

Knows memory and transfers, not pages or peers' promises. NIXL is imported when the first agent is made.
"""

import importlib
import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from kvtransfer.ucx_log import TABLES, UcxLog

PACKAGE = "nixl_cu13"
PROGRESS_S = 0.01  # UCX wakes its thread by itself, but misses some: then this long
NOT_INSTALLED = "NIXL is not installed: pip install 'baton[nixl]'"


class NixlError(Exception):
    """A call of NIXL failed; the message has its words and UCX's last ones."""


def find_obstacle() -> str | None:
    """Why this process cannot use NIXL, without importing it."""
    return None if find_spec(PACKAGE) else NOT_INSTALLED


@cache
def _load() -> tuple[Any, UcxLog]:
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # its errors are raised as well
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")  # crashes are Python's to report
    log = UcxLog()  # before UCX is loaded
    return importlib.import_module(f"{PACKAGE}._bindings"), log


class Agent:
    """One agent: what it registers, those it is connected to, and its transfers. Calls of it are one at a time.

    When `close` has returned nothing writes to registered memory any more, transfers in progress included: UCX's worker
    is gone, and with it sockets, queue pairs and registrations. Nothing less ensures that. NIXL "releases" a transfer
    that goes on, and a peer that is removed still sends (seen over TCP: a stopped one's bytes come when it goes on).
    """

    def __init__(self, name: str, answers_alone: bool, is_local: bool) -> None:
        """`answers_alone`: by a thread of its own, for peers that read from here over TCP. Raises NixlError.

        `is_local`: UCX listens on loopback only. Whom it accepts, it lets read and write this process' memory.
        """
        self.name = name
        try:
            self._nixl, self._log = _load()
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = answers_alone
            config.pthrDelay = round(PROGRESS_S * 1e6)  # its default of 0 takes a whole core
            config.useListenThread = False
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
            self._agent: Any = self._nixl.nixlAgent(name, config)
        except Exception as error:  # its errors have no class in common
            raise NixlError(f"NIXL cannot be started: {error}") from error
        devices = ",NET_DEVICES=lo" if is_local else ""
        self._call("createBackend", "UCX", {"engine_config": f"PROTO_INFO={TABLES}{devices}"})

    def register(self, address: int, num_bytes: int, device_index: int) -> None:
        """Make memory known to UCX. On a GPU unless `device_index` is -1."""
        regions = np.array([[address, num_bytes, max(device_index, 0)]], np.uint64)
        self._call("registerMem", self._nixl.nixlRegDList(self._kind(device_index), regions))

    def metadata(self) -> bytes:
        """How others reach it, and keys to what is registered."""
        return bytes(self._call("getLocalMD"))

    def connect(self, metadata: bytes) -> str:
        """The name of the agent that has this metadata."""
        return bytes(self._call("loadRemoteMD", metadata)).decode(errors="replace")

    def prepare(
        self, peer: str | None, address: int, count: int, stride: int, num_bytes: int, device_index: int
    ) -> int:  # fmt: skip
        """A handle for `count` pieces of `num_bytes` that begin `stride` bytes apart; of our memory if `peer` is None.

        All must be registered.
        """
        pieces = np.empty((count, 3), np.uint64)
        pieces[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
        pieces[:, 1:] = num_bytes, max(device_index, 0)
        listed = self._nixl.nixlXferDList(self._kind(device_index), pieces)
        whose = () if peer is None else (peer,)
        return int(self._call("prepXferDlist", *whose, listed))

    def begin_read(self, remote: int, pieces: Sequence[int], local: int) -> "Transfer":
        """Read these pieces of `remote` into the first ones of `local`; both are handles of `prepare`."""
        there, here = np.array(pieces, np.int32), np.arange(len(pieces), dtype=np.int32)
        handle = self._call("makeXferReq", self._nixl.NIXL_READ, local, here, remote, there)
        return Transfer(self, handle)

    def is_in_progress(self, ask: str, handle: int) -> bool:
        """Whether a transfer goes on, by the call `ask`. False: all is there."""
        status = self._call(ask, handle)
        if status not in (self._nixl.NIXL_IN_PROG, self._nixl.NIXL_SUCCESS):
            raise NixlError(f"NIXL: {status}")
        return bool(status == self._nixl.NIXL_IN_PROG)

    def release(self, handle: int) -> None:
        """Forget a transfer that is over."""
        self._call("releaseXferReq", handle)

    def read_log(self) -> list[str]:
        """What UCX has logged since the last call, for any agent of the process."""
        return self._log.read()

    def close(self) -> None:
        """End it, whatever goes on. Idempotent. Handles of it may not be used any more."""
        self._agent = None

    def _kind(self, device_index: int) -> Any:
        return self._nixl.DRAM_SEG if device_index == -1 else self._nixl.VRAM_SEG

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call it by name: an error keeps the variables of this function, and must not keep the agent."""
        try:
            return getattr(self._agent, name)(*arguments)
        except Exception as error:  # its errors have no class in common
            raise NixlError(f"NIXL: {error}{self._last_words()}") from error

    def _last_words(self) -> str:
        words = [line for line in self._log.read() if line and not line.startswith(("|", "+"))]
        return f" ({words[-1]})" if words else ""


class Transfer:
    """A read under way. Its target may be written to until `is_done`, or until the agent is closed."""

    def __init__(self, agent: Agent, handle: int) -> None:
        self._agent = agent
        self._handle = handle
        self._is_done = self._look("postXferReq")

    def is_done(self) -> bool:
        """Whether all of it is there. Makes progress. Raises NixlError when it failed."""
        self._is_done = self._is_done or self._look("getXferStatus")
        return self._is_done

    def _look(self, ask: str) -> bool:
        if self._agent.is_in_progress(ask, self._handle):
            return False
        self._agent.release(self._handle)
        return True
