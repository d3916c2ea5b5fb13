"""A request to a worker: one sequence, as the gateway wants it."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from wire.images import ImageSpan, check_images
from wire.page_keys import TOKEN_BYTES
from wire.retention import Retention
from wire.sampling import SamplingParams

ANY_NUMBER = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class SequenceParams:
    """One request to a worker. ValueError at creation names a value that does not fit the others."""

    request_id: str
    prompt: bytes  # token ids, int32 little-endian
    end: int  # KV of positions [0, end) must be computed or received before the first token
    max_tokens: int = 0  # of the answer; 0: only the KV is needed (prefill)
    cache_salt: str = ""
    adapter: str = ""  # content digest of the adapter that computes it; empty: the base model
    num_prompt_logprobs: int | None = None  # report the prompt tokens' log-probabilities, with this many top ones each
    local_prefill_max_tokens: int = ANY_NUMBER  # receive the KV if more tokens than this are missing
    gateway: str = ""  # name of its stream of updates
    handle: int = 0  # the gateway's number for it; 0: none
    attempt: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # an answer with fewer tokens cannot be stopped
    num_emitted: int = 0  # the last num_emitted tokens of the prompt belong to the answer
    num_logprobs: int | None = None  # report each token's log-probability, with this many top ones
    drafter: str = "off"  # makes the drafts
    max_draft_tokens: int = 0  # per step
    probes: bool = False  # now and then draft although it does not seem worth its cost
    grammar: object | None = None  # what the answer must match; only the decode worker looks inside
    grammar_s: float = 0.0  # waited for the grammar
    images: Seq[ImageSpan] = ()  # in the prompt, by position
    retention: Retention | None = None  # how long its pages are worth keeping
    encodings: Mapping[bytes, Any] = field(default_factory=dict)  # digest |-> its Encoding, of those here
    num_prompt: int = field(init=False)  # tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_prompt", len(self.prompt) // TOKEN_BYTES)
        if self.num_emitted >= self.num_prompt:
            raise ValueError(f"num_emitted is {self.num_emitted}, expected less than {self.num_prompt} prompt tokens")
        longest = self.num_emitted + self.max_tokens
        if self.min_tokens > longest:
            raise ValueError(f"min_tokens is {self.min_tokens}, but the answer has at most {longest} tokens")
        check_images(self.images, self.num_prompt)

    def lacks_images(self, num_cached: int = 0) -> bool:
        """Whether KV of positions from `num_cached` on needs the encoding of an image that is not here."""
        return any(image.end > num_cached and image.digest not in self.encodings for image in self.images)
