"""Optional features of a worker's service: their interfaces, which are also the objects of a worker without them.

compose.py names those that a worker has. They live on the asyncio thread.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import kv_pb2, worker_pb2
from wire.page_keys import PageKey
from wire.timing import NOTHING_READ, ReadTokens
from worker.params import SequenceParams
from worker.sequences import Sequence


class LoanRefusedError(Exception):
    """Nothing can be lent to this caller."""


class KVSource:
    """Where KV comes from that a worker lacks, before a prompt is admitted, and goes to. Here it is all computed."""

    async def restore(
        self, params: SequenceParams, keys: list[PageKey], wait_s: float, source: kv_pb2.PageSource | None = None
    ) -> bool:
        """Read what the pools lack of a prompt's pages, if that is faster than to compute it. `source`: may have some.

        False: it takes longer than `wait_s`, and goes on; ask again. NoRoomError: the prompt has none now.
        """
        return True

    def count_read(self, sequence: Sequence) -> ReadTokens:
        """Those of a newly admitted sequence's cached tokens that were just read."""
        return NOTHING_READ

    async def lend(self, request: worker_pb2.LendRequest) -> worker_pb2.LendResponse:
        """Name pages that are cached here, or in use. Raises LoanRefusedError."""
        raise LoanRefusedError("this worker lends no pages")

    def add_to_status(self, status: worker_pb2.WorkerStatus, request: worker_pb2.StatusRequest) -> None:
        """Set what is kept and was read, and what changed since the answer before."""

    async def close(self) -> None:
        """The server has stopped."""


class ImageSource:
    """Encodings of prompts' images. The model takes none."""

    takes_images = False

    async def encode(self, files: Mapping[bytes, bytes], wait_s: float) -> Mapping[bytes, Any] | None:
        """`files`: digest |-> file |-> their encodings. ValueError: one is not an image, or too large for the model.

        None: it takes longer than `wait_s`, and goes on; ask again.
        """
        raise ValueError("is refused, since this worker takes no images: its model has no use for them")

    def close(self) -> None:
        """The server has stopped."""


class RefusedError(Exception):
    """`code`: the status of the call."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class AdapterSource:
    """Loads adapters (LoRA). This worker takes none."""

    async def load(self, name: str, path: str, digest: str) -> str:
        """See LoadAdapterRequest. Returns the digest. Raises RefusedError. A cancelled load goes on."""
        detail = "this worker takes no adapters: set --max-loras to 1 or more"
        raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, detail)

    def unload(self, digest: str) -> None:
        """New sequences cannot have it. Idempotent."""


class Weights:
    """The worker's weights, and its pauses. These stay, and it never pauses."""

    leave: Callable[[str], None] = staticmethod(lambda incarnation: None)
    """Ends what gateways have here; they learn the incarnation."""

    @property
    def pause(self) -> str:
        """Why it takes nothing new, after its name; empty: it does."""
        return ""

    def inside(self) -> AbstractContextManager[None]:
        """Around a call that may admit a sequence: weights do not change meanwhile."""
        return nullcontext()

    def set_pause(self, for_s: float, ends: bool) -> int:
        """See PauseRequest. Returns how many sequences are left."""
        raise RefusedError(grpc.StatusCode.UNIMPLEMENTED, "this worker does not pause")

    async def set(self, request: worker_pb2.SetWeightsRequest) -> worker_pb2.SetWeightsResponse:
        """See `SetWeights` in worker.proto. Raises RefusedError. A cancelled change goes on."""
        raise RefusedError(grpc.StatusCode.UNIMPLEMENTED, "this worker keeps its weights")


@dataclass(slots=True)
class Features:
    """Those of one worker."""

    tiers: KVSource = field(default_factory=KVSource)
    images: ImageSource = field(default_factory=ImageSource)
    adapters: AdapterSource = field(default_factory=AdapterSource)
    weights: Weights = field(default_factory=Weights)
