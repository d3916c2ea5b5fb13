"""A pool that is open to NIXL: registered by the process that has it, and announced to peers, who check what they hear.

Over GPU memory and RDMA devices it has not run yet.
"""

from kvtransfer.memory_file import GENERATION_BYTES
from kvtransfer.nixl_agent import Agent
from kvtransfer.reader import PageStore, ReadError
from protos import kv_pb2

MAX_METADATA_BYTES = 64 << 10  # a few hundred are usual, some more for each network device
MAX_PAGES = 1 << 22  # of a peer, over the runs that are read of each: their lists take 24 bytes a page here
MAX_DEVICES = 1024
ADDRESS_END = 1 << 64


def agent_name(incarnation: str, rank: int) -> str:
    """What the agent of a worker's rank is called."""
    return f"{incarnation}.{rank}"


class NixlPool:
    """Owns the agent that answers for this process' pool."""

    def __init__(self, incarnation: str, store: PageStore, is_local: bool) -> None:
        """`is_local`: for peers on this host alone. Raises NixlError."""
        generations = int(store.generations.ctypes.data)
        self._agent = Agent(agent_name(incarnation, store.rank), answers_alone=True, is_local=is_local)
        self._agent.register(store.address, store.num_pages * store.page_bytes, store.device_index)
        self._agent.register(generations, store.num_pages * GENERATION_BYTES, -1)
        self.facts = kv_pb2.Nixl(
            metadata=self._agent.metadata(), pages_address=store.address, generations_address=generations,
            device_index=store.device_index,
        )  # fmt: skip

    def close(self) -> None:
        """Peers cannot read any more."""
        self._agent.close()


def check_facts(nixl: kv_pb2.Nixl, num_pages: int, page_bytes: int, num_runs: int) -> None:
    """Raise ReadError("layout") when a rank can have no such pool. Whether it has, NIXL finds out."""
    most = MAX_PAGES // num_runs
    if not 0 < num_pages <= most:
        raise ReadError("layout", f"a pool of {num_pages} pages cannot be read through NIXL: 1 to {most} can")
    if not 0 < len(nixl.metadata) <= MAX_METADATA_BYTES:
        raise ReadError("layout", f"NIXL metadata of {len(nixl.metadata)} bytes: 1 to {MAX_METADATA_BYTES} are taken")
    for name, address, num_bytes in (
        ("pages", nixl.pages_address, page_bytes),
        ("generations", nixl.generations_address, GENERATION_BYTES),
    ):
        if address == 0 or address % GENERATION_BYTES or address + num_pages * num_bytes > ADDRESS_END:
            raise ReadError("layout", f"{num_pages} {name} cannot lie at address {address:#x}")
    if not -1 <= nixl.device_index < MAX_DEVICES:
        raise ReadError("layout", f"there is no GPU {nixl.device_index}")
