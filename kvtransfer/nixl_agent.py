"""The part of NIXL's agent that reads need, over UCX, and UCX's log. The only file that uses NIXL's API.

Imports NIXL when the first agent is created.
"""

import ctypes
import importlib
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

PACKAGES = ("nixl_cu13", "nixl_cu12")  # by the CUDA of torch
PROGRESS_S = 0.01  # UCX wakes its thread for events but misses some: it also looks this often
NOT_INSTALLED = "NIXL is not installed: pip install 'baton[nixl]'"
TABLES = "remote memory read*"  # what UCX logs, in the syntax of UCX_PROTO_INFO
UNKNOWN = "unknown"
_MAX_LOG_BYTES = 1 << 20  # limit of log parsed
_LANE = re.compile(r"\b([a-z][a-z0-9_]*)/\S+")


class NixlError(Exception):
    """A call of NIXL failed; the message has its text and UCX's last log line."""


def is_installed() -> bool:
    """Whether this process can use NIXL; does not import it."""
    return any(map(find_spec, PACKAGES))


class UcxLog:
    """A memory file that UCX writes its log to. Created before UCX is loaded; one per process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("baton-ucx-log", os.MFD_CLOEXEC)
        self._begin = 0  # of the unread part
        os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> list[str]:
        """The lines since the last call, without time and process."""
        ctypes.CDLL(None).fflush(None)  # UCX's lines are buffered in a libc stream
        written = os.pread(self._fd, _MAX_LOG_BYTES, self._begin)
        self._begin = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, 0)  # later writes leave a hole before them, which takes no memory
        return [line.partition("]   ")[2] for line in written.decode(errors="replace").splitlines()]


def find_link(lines: Sequence[str], agent: str) -> str:
    """The transports by which `agent` reads large pieces of peers' memory, such as "rc_mlx5" or "cma+tcp"; or UNKNOWN.

    From UCX's tables, since UCX reports it nowhere else; the last one counts: the agent's own comes before the peer's.

        | AGENT inter-node cfg#2 |                                         a title: the agent, and the direction
        | remote memory read by ucp_get*(multi) into host memory from host |
        | 0..inf | zero-copy | rc_mlx5/mlx5_0:1 |                          message sizes, protocol, transport/device
    """
    link, is_its = UNKNOWN, False
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 1 and " cfg#" in cells[0]:
            is_its = cells[0].startswith(f"{agent} ") and not cells[0].startswith(f"{agent} self ")
        elif is_its and len(cells) == 3 and cells[0].endswith("..inf"):
            link = "+".join(sorted(set(_LANE.findall(cells[2])))) or UNKNOWN
    return link


def is_fast(link: str) -> bool:
    """Whether the link is known and does not use TCP."""
    return link != UNKNOWN and "tcp" not in link.split("+")


@cache
def _load() -> tuple[Any, UcxLog]:
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are raised anyway
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")  # Python reports crashes
    log = UcxLog()  # must exist before UCX is loaded
    package = next(filter(find_spec, PACKAGES))
    return importlib.import_module(f"{package}._bindings"), log


class NixlAgent:
    """Registered memory, connections and transfers. One call at a time.

    After `close` nothing writes to registered memory any more, not even a running transfer: UCX's worker is gone, with
    its sockets, queue pairs and registrations. Nothing less guarantees this. NIXL "releases" a running transfer without
    stopping it, and a removed peer still sends (seen over TCP: a stopped peer's bytes arrive when it resumes).
    """

    def __init__(self, name: str, answers_alone: bool, is_local: bool) -> None:
        """`answers_alone`: own thread that serves peers reading from here over TCP. Raises NixlError.

        `is_local`: UCX listens on loopback only. Every connection it accepts can read and write this process's memory.
        """
        self.name = name
        self.running: list[int] = []  # handles of reads; they may write until `is_reading` says otherwise, or `close`
        try:
            self._nixl, self._log = _load()
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = answers_alone
            config.pthrDelay = round(PROGRESS_S * 1e6)  # the default of 0 uses a whole core
            config.useListenThread = False
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
            self._agent: Any = self._nixl.nixlAgent(name, config)
        except Exception as error:  # NIXL's errors have no common class
            raise NixlError(f"NIXL cannot be started: {error}") from error
        devices = ",NET_DEVICES=lo" if is_local else ""
        self._call("createBackend", "UCX", {"engine_config": f"PROTO_INFO={TABLES}{devices}"})

    def register(self, address: int, num_bytes: int, device_index: int) -> None:
        """Register memory with UCX: on a GPU, or in main memory if `device_index` is -1."""
        regions = np.array([[address, num_bytes, max(device_index, 0)]], np.uint64)
        self._call("registerMem", self._nixl.nixlRegDList(self._kind(device_index), regions))

    def metadata(self) -> bytes:
        return bytes(self._call("getLocalMD"))

    def connect(self, metadata: bytes) -> str:
        """Returns the name of the agent with this metadata."""
        return bytes(self._call("loadRemoteMD", metadata)).decode(errors="replace")

    def prepare(
        self, peer: str | None, address: int, count: int, stride: int, num_bytes: int, device_index: int
    ) -> int:  # fmt: skip
        """A handle for `count` pieces of registered memory, `stride` bytes apart; of our own if `peer` is None."""
        pieces = np.empty((count, 3), np.uint64)
        pieces[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
        pieces[:, 1:] = num_bytes, max(device_index, 0)
        listed = self._nixl.nixlXferDList(self._kind(device_index), pieces)
        whose = () if peer is None else (peer,)
        return int(self._call("prepXferDlist", *whose, listed))

    def begin_read(self, remote: int, pieces: Sequence[int], local: int, first: int) -> None:
        """Read these pieces of `remote` into those of `local` from `first` on; both are handles from `prepare`."""
        there, here = np.array(pieces, np.int32), np.arange(first, first + len(pieces), dtype=np.int32)
        handle = self._call("makeXferReq", self._nixl.NIXL_READ, local, here, remote, there)
        if self._is_running("postXferReq", handle):
            self.running.append(handle)

    def is_reading(self) -> bool:
        """Whether any read may still write to its target. Makes progress. Raises NixlError if one failed."""
        self.running = [handle for handle in self.running if self._is_running("getXferStatus", handle)]
        return bool(self.running)

    def _is_running(self, ask: str, handle: int) -> bool:
        status = self._call(ask, handle)
        if status == self._nixl.NIXL_IN_PROG:
            return True
        if status != self._nixl.NIXL_SUCCESS:
            raise NixlError(f"NIXL: {status}")
        self._call("releaseXferReq", handle)
        return False

    def find_link(self) -> str:
        """See `find_link`. Call it once, after the first read."""
        return find_link(self._log.read(), self.name)

    def close(self) -> None:
        """End the agent and its transfers. Idempotent. Its handles become invalid."""
        self._agent = None

    def _kind(self, device_index: int) -> Any:
        return self._nixl.DRAM_SEG if device_index == -1 else self._nixl.VRAM_SEG

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call NIXL by name: an exception keeps this frame's variables alive, and must not keep the agent alive."""
        try:
            return getattr(self._agent, name)(*arguments)
        except Exception as error:  # NIXL's errors have no common class
            words = [line for line in self._log.read() if line and not line.startswith(("|", "+"))]
            raise NixlError(f"NIXL: {error}{f' ({words[-1]})' if words else ''}") from error
