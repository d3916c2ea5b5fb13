"""Texts whose prompts are all there is: each becomes a vector, and nothing is handed over."""

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

import grpc

from engine.engine import Vectors
from engine.out_of_memory import StepFailedError
from protos import prefill_pb2
from wire.page_keys import TOKEN_BYTES
from worker.loop import InFlightStep, StepExtras
from worker.params import SequenceParams
from worker.sequences import Update


@dataclass(slots=True)
class Embedding:
    """The vector of one text, while it is computed."""

    ended: asyncio.Future[Update] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    vector: bytes = b""


class EmbeddedTexts(StepExtras):
    """Owns the vectors of running calls. A text is a sequence whose answer is one token, which means nothing."""

    def __init__(self, pooled: Vectors | None) -> None:
        """pooled: None: the model answers."""
        self._pooled = pooled
        self._handles = count(1)
        self._running: dict[int, Embedding] = {}  # handle |-> the text's; from before its sequence is admitted

    @property
    def embeds(self) -> bool:
        """Whether the model makes vectors."""
        return self._pooled is not None

    @property
    def is_whole(self) -> bool:
        """Whether the KV of a text is of no use to another."""
        return self._pooled is not None and self._pooled.is_whole

    def begin(self, request: prefill_pb2.EmbedPromptRequest) -> tuple[SequenceParams, Embedding]:
        """`end` follows. ValueError for what the model cannot compute."""
        if self._pooled is None:
            raise ValueError("the model of this worker answers prompts, and makes no vectors")
        handle, num_prompt = next(self._handles), len(request.prompt) // TOKEN_BYTES
        params = SequenceParams(
            request.request_id, request.prompt, num_prompt - 1, 1, request.cache_salt, request.adapter, handle=handle
        )
        self._running[handle] = Embedding()
        return params, self._running[handle]

    def end(self, params: SequenceParams) -> None:
        """Forgets the vector: its call is over."""
        self._running.pop(params.handle, None)

    def judge(
        self, flight: InFlightStep, chosen: Seq[list[int]], failed: Mapping[int, StepFailedError]
    ) -> dict[int, Exception | bool]:
        """Takes the vectors, on the engine thread: the rows of the step are still those of its sequences."""
        for step in flight.planned:
            if self._pooled is not None and step.num_chosen:
                vector, running = self._pooled.take(step.sequence.row), self._running.get(step.sequence.params.handle)
                if vector is not None and running is not None and not step.is_dropped:
                    running.vector = vector.astype("<f4").tobytes()
        return {}

    def on_updates(self, updates: Seq[Update]) -> None:
        """Wakes the calls of texts that ended. On the asyncio thread."""
        for update in updates:
            running = self._running.get(update.sequence.params.handle)
            if running is not None and update.finish_reason and not running.ended.done():
                running.ended.set_result(update)


def read_result(update: Update, embedding: Embedding) -> prefill_pb2.EmbedPromptResponse | tuple[grpc.StatusCode, str]:
    """The answer to a text's call, from its last update; or the status and reason if it has no vector."""
    sequence, timing = update.sequence, update.timing
    if update.error or not embedding.vector or timing is None:
        return grpc.StatusCode.INTERNAL, update.error or "the step made no vector"
    queue_s = (sequence.started_at or sequence.admitted_at) - sequence.admitted_at
    prefill_s = timing.prefill_s + timing.first_step_s - queue_s
    return prefill_pb2.EmbedPromptResponse(
        vector=embedding.vector, queue_seconds=queue_s, prefill_seconds=prefill_s, cached_tokens=sequence.num_cached
    )
