"""A runner as late as a GPU: a step runs only when it is collected, after all that was launched before it.

The host's preparation happens at launch. Until a step has run, its tokens' places hold no token, so an early read
fails.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import ForwardRow, Prepared
from engine.heads.runner import HeadRunner
from engine.input_batch import NO_SLOT, InputBatch
from engine.models.decoder import Decoder
from engine.runner import Begun, Finish, Launched, Masks, ModelOutput, Runner
from engine.staging import Ints
from engine.vision.image_rows import Encoding
from wire.images import ImageSpan
from wire.sampling import SamplingParams

POISON = -1


class LateRows(InputBatch):
    """Queues the device's work."""

    def __init__(
        self, num_rows: int, context_tokens: int, page_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.num_opened = np.zeros(num_rows, np.int64)
        super().__init__(num_rows, context_tokens, page_tokens, vocab_size, device)

    def open(
        self, row: int, token_ids: NDArray[np.int32], sampling: SamplingParams, answer_begin: int, slot: int = NO_SLOT,
        images: Sequence[tuple[ImageSpan, Encoding | None]] = (),
    ) -> None:  # fmt: skip
        self.num_opened[row] += 1
        super().open(row, token_ids, sampling, answer_begin, slot, images)

    def _put(self, parts: Sequence[tuple[int, int, NDArray[np.int32]]]) -> None:
        put = super()._put
        self.queue.append(lambda: put(parts))

    def _clear(self, line: int) -> None:
        clear = super()._clear
        self.queue.append(lambda: clear(line))

    def _count(self, places: Ints, lines: NDArray[np.int32], is_answer: NDArray[np.int32]) -> None:
        count = super()._count
        self.queue.append(lambda: count(places, lines, is_answer))


class LateLaunched(Launched):
    """A queued step."""

    def __init__(self, queue: deque[Callable[[], None]], run: Callable[[], Launched]) -> None:
        self._queue = queue
        self._run = run
        self._result: Launched | Exception | None = None
        queue.append(self._work)

    def _work(self) -> None:
        try:
            self._result = self._run()
        except Exception as error:
            self._result = error

    def collect(self) -> ModelOutput:
        while self._result is None:
            self._queue.popleft()()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result.collect()


class LateRunner(Runner):
    """Runs over `LateRows`, which several runners may share."""

    def __init__(
        self, model: Decoder, attention: AttentionBackend, pages: Tensor, rows: LateRows, *others: Any
    ) -> None:
        super().__init__(model, attention, pages, rows, *others)
        self._late_rows = rows

    def launch(self, requests: Sequence[ForwardRow]) -> Launched:
        begun = self.begin(requests)
        return LateLaunched(self._late_rows.queue, lambda: begun.choose(begun.step))

    def begin(self, requests: Sequence[ForwardRow]) -> Begun:
        rows = self._late_rows
        step = self._prepare(requests)
        opened = rows.num_opened.copy()
        for part in requests:
            if part.num_logits > part.num_given:
                rows.tokens[part.row, part.begin + part.count] = POISON
        finish: list[Finish | Exception] = []

        def forward() -> None:
            try:
                finish.append(self._begin_late(step, opened))
            except Exception as error:
                finish.append(error)

        def choose(completed: Prepared) -> Launched:
            if isinstance(finish[0], Exception):
                raise finish[0]
            return finish[0](completed)

        rows.queue.append(forward)
        return Begun(requests, step, choose)

    def choose(self, begun: Begun, masks: Masks) -> Launched:
        choose = super().choose
        return LateLaunched(self._late_rows.queue, lambda: choose(begun, masks))

    def _begin_late(self, step: Prepared, opened: NDArray[np.int64]) -> Finish:
        """If a row has gone to another sequence, poison is meant for that one: the step's own answer is dropped."""
        places = step.layout.places
        places = places[(self._late_rows.num_opened != opened)[places // self._late_rows.width]]
        flat = self._late_rows.tokens.view(-1)
        flat[torch.from_numpy(places)] = flat[torch.from_numpy(places)].clamp(min=0)
        return self._begin(step)


class LateHeadRunner(LateRunner, HeadRunner):
    """A draft head, which follows late steps."""
