"""Where one request's time went. Pure.

Each process fills in its part; the gateway merges the parts of the decode and the prefill worker.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

KVOrigin = Literal["files", "prefill", "decode"]


class ReadTokens(NamedTuple):
    """Prompt tokens whose KV was read for a request instead of computed, by where it was."""

    files: int = 0
    prefill: int = 0  # pools of other workers of this role
    decode: int = 0


NOTHING_READ = ReadTokens()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds and counts of the last attempt; `queue_s` and `grammar_s` add up over all attempts."""

    wake_s: float = 0.0  # gateway: until its model was awake
    queue_s: float = 0.0  # gateway: until the request got its slots on workers
    grammar_s: float = 0.0  # decode: until its grammar was compiled
    prefill_s: float = 0.0  # until the prompt's KV was computed, queueing included
    transfer_s: float = 0.0  # prefill: reads by the decode worker; overlaps with prefill_s
    transfer_bytes: int = 0  # prefill
    transport: str = ""  # prefill: as in HandshakeResponse; empty if nothing was transferred
    first_step_s: float = 0.0  # decode: from complete KV to the first token
    decode_s: float = 0.0  # decode: from the first token to the last
    cached_tokens: int = 0  # prompt tokens whose KV was not computed for this request
    read_tokens: ReadTokens = NOTHING_READ  # of those
    draft_tokens: int = 0  # decode: drafted
    accepted_tokens: int = 0  # decode: of draft_tokens
    steps: int = 0  # decode: engine steps that yielded tokens
    preemptions: int = 0  # decode: how often it lost its pages
    attempts: int = 1  # gateway
    prefill_reason: str = ""  # gateway: why the decode worker computed the prompt or a prefill worker did

    @property
    def file_tokens(self) -> int:
        return self.read_tokens.files

    @property
    def prefill_lent_tokens(self) -> int:
        return self.read_tokens.prefill

    @property
    def decode_lent_tokens(self) -> int:
        return self.read_tokens.decode
