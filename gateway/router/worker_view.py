"""One worker at one moment, as the gateway knows it and policies see it. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from gateway.router.worker_keys import WorkerKeys

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """The costs of prompts on a decode worker (worker/chunks.py). Seconds are 0 before they are measured."""

    quiet_s: float = 0.0  # a step with answers alone
    fixed_s: float = 0.0  # what a chunk of any size adds to it
    token_s: float = 0.0  # and what each of its tokens adds
    tokens: int = 0  # of the next chunk; 0: the worker computes no prompts
    read_s: float = 0.0  # to read one token's KV from a prefill worker


UNMEASURED = ChunkCosts()


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment, as the gateway knows it."""

    role: Role
    address: str
    incarnation: str
    layout: bytes  # equal for workers that can exchange pages
    is_alive: bool  # answers, makes progress, is not draining
    trouble: str  # why not, when it is not
    max_running: int
    num_mine: int  # requests this gateway has there
    is_full: bool  # refused a request since it last reported free room
    free_pages: int  # that can be given out
    num_pages: int
    page_tokens: int  # tokens in a page
    weights: str  # fingerprint of its model
    revision: str = ""  # requests are given to workers of one revision
    empty_pages: int = 0  # free ones without KV
    key_tokens_after: int = 0  # tokens after a page that its key stands for, too
    keys: WorkerKeys = field(default_factory=WorkerKeys, compare=False)  # the client's, which follows them
    dtype: str = ""  # of its KV, which shows that of its model
    host: str = ""  # equal for workers on one host
    num_threads: int = 0  # of the CPU that compute its steps; 0: GPUs do
    cpus: frozenset[int] = frozenset()  # that these may run on
    cpu_group: int = 0  # whose quota, `num_cores`, it shares with all processes in it; 0: none
    num_cores: int = 0
    num_others: int = 0  # requests that other gateways had there when it last answered
    tokens_waiting: int = 0  # prompt tokens it had still to compute when it last answered
    tokens_per_s: float = 0.0  # prompt tokens it computes a second; 0: not known
    costs: ChunkCosts = UNMEASURED  # of prompts on a decode worker
    adapters: frozenset[str] = frozenset()  # digests of those that requests may name
    store: str = ""  # where its KV is saved in files; empty: nowhere
    takes_images: bool = False  # it computes prompts with images
    is_draining: bool = False  # but answers, and lends
    is_paused: bool = False  # takes nothing new, and will go on
    is_closed: bool = False  # it has this role, but takes no requests in it
    embeds: bool = False  # a prefill worker whose model makes vectors of texts, and has no answers
    has_slots: bool = True  # for requests with an adapter; False: it refused one since its last answer

    @property
    def num_running(self) -> int:
        """Requests of all gateways."""
        return self.num_mine + self.num_others

    @property
    def answers(self) -> bool:
        """Whether it makes what clients get: tokens, or vectors."""
        return self.role == "decode" or self.embeds

    @property
    def can_lend(self) -> bool:
        return self.is_there or self.is_draining

    @property
    def is_there(self) -> bool:
        """Whether requests that need it wait for it rather than end."""
        return self.is_alive or self.is_paused

    @property
    def partners(self) -> tuple[bytes, str]:
        """Equal for workers that serve a request together."""
        return self.layout, self.revision

    @property
    def computes(self) -> str:
        """Equal for workers that give the same tokens."""
        return f"{self.weights} {self.dtype}".strip()

    def can_serve(self, adapter: str, computes: str) -> bool:
        """Whether it has the adapter of this digest, and computes so. Empty: any."""
        return (not adapter or adapter in self.adapters) and (not computes or computes == self.computes)
