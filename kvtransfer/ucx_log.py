"""What UCX says it reads a peer's memory by: tables in its log, which nothing else tells. Knows their form alone.

| AGENT inter-node cfg#2 |                                  a title: whose, and to where
| remote memory read by ucp_get*(multi) into host memory from host |
| 0..inf | zero-copy | rc_mlx5/mlx5_0:1 |                   a row: message sizes, manner, transport/device
"""

import ctypes
import os
import re
from collections.abc import Sequence

TABLES = "remote memory read*"  # those wanted, as UCX_PROTO_INFO takes them
UNKNOWN = "unknown"
_MAX_BYTES = 1 << 20  # of log that are looked at
_LANE = re.compile(r"\b([a-z][a-z0-9_]*)/\S+")


class UcxLog:
    """A memory file that UCX writes its log to. Made before UCX is loaded; there is one for the process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("baton-ucx-log", os.MFD_CLOEXEC)
        self._begin = 0  # of what was not read yet
        os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> list[str]:
        """The lines since the last call, without time and process."""
        ctypes.CDLL(None).fflush(None)  # UCX leaves them in a stream of libc
        written = os.pread(self._fd, _MAX_BYTES, self._begin)
        self._begin = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, 0)  # what comes next is written behind a hole, which takes no memory
        return [line.partition("]   ")[2] for line in written.decode(errors="replace").splitlines()]


def find_link(lines: Sequence[str], agent: str) -> str:
    """The transports by which `agent` reads large pieces of peers' memory, such as "rc_mlx5" or "cma+tcp"; or UNKNOWN.

    The last word counts: the table of the peer comes after that of the agent itself.
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
    """Whether all of it is known, and better than TCP."""
    return link != UNKNOWN and "tcp" not in link.split("+")
