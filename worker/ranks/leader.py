"""Rank 0 leads, the others follow: the leader sends every change of rows and every step through its links.

The leader's scheduler and loop do not know this: they use `LedInputBatch` and `LedRunner` as rows and runner. Followers
have the same rows and runners over their own shards, and get the same tokens, since ranks share their results.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import ForwardRow, Prepared
from engine.heads.runner import HeadRunner
from engine.input_batch import NO_SLOT, InputBatch
from engine.out_of_memory import end_process
from engine.runner import Begun, Launched, Masks, ModelOutput, Runner
from engine.vision.image_rows import Encoding
from wire.images import ImageSpan
from wire.sampling import SamplingParams
from worker.ranks.links import StepReceiver, StepSender

log = structlog.get_logger()

SEND_S = 30.0  # for followers to read: they lag by a few steps at most
MOST_BEHIND = 2  # steps that a follower may launch before it collects one
NO_LOCK = nullcontext()

Array = NDArray[np.int32]


class Open(msgspec.Struct, tag=True, array_like=True):
    row: int
    token_ids: Array
    sampling: SamplingParams
    answer_begin: int
    slot: int
    images: Sequence[tuple[ImageSpan, Encoding | None]]

    def apply(self, rows: InputBatch) -> None:
        images = [(span, own and own.to(rows.device)) for span, own in self.images]
        rows.open(self.row, self.token_ids, self.sampling, self.answer_begin, self.slot, images)


class Close(msgspec.Struct, tag=True, array_like=True):
    row: int

    def apply(self, rows: InputBatch) -> None:
        rows.close(self.row)


class Tokens(msgspec.Struct, tag=True, array_like=True):
    parts: list[tuple[int, int, Array]]

    def apply(self, rows: InputBatch) -> None:
        rows.write_tokens(self.parts)


class Pages(msgspec.Struct, tag=True, array_like=True):
    row: int
    first: int
    pages: list[int]

    def apply(self, rows: InputBatch) -> None:
        rows.write_pages(self.row, self.first, self.pages)


class FillSlot(msgspec.Struct, tag=True, array_like=True):
    slot: int
    adapter: str

    def apply(self, rows: InputBatch) -> None:
        rows.fill_slot(self.slot, self.adapter)


class DropAdapter(msgspec.Struct, tag=True, array_like=True):
    adapter: str

    def apply(self, rows: InputBatch) -> None:
        rows.drop_adapter(self.adapter)


class Sampled(msgspec.Struct, tag=True, array_like=True):
    """Tokens that the last stage chose: the first one goes on from them."""

    places: list[int]  # in the flat InputBatch.tokens
    tokens: list[int]

    def apply(self, rows: InputBatch) -> None:
        places, tokens = (torch.tensor(values, device=rows.device) for values in (self.places, self.tokens))
        rows.flat_tokens.index_copy_(0, places, tokens.clamp(min=0).to(torch.int32))


Delta = Open | Close | Tokens | Pages | FillSlot | DropAdapter | Sampled


class Step(msgspec.Struct, tag=True, array_like=True):
    """The changes of rows since the last step, and the step."""

    deltas: list[Delta]
    runner: int  # 0: the model's, 1: the draft model's
    requests: Sequence[ForwardRow]  # empty: there are changes alone
    is_begun: bool  # Choice follows, with further masks


class Choice(msgspec.Struct, tag=True, array_like=True):
    """Runner.choose for the last step."""

    masks: dict[int, Array]


def _pack(array: Array | Tensor) -> tuple[tuple[int, ...], bytes, str]:
    if isinstance(array, Tensor):
        name = str(array.dtype).removeprefix("torch.")
        return tuple(array.shape), array.contiguous().view(torch.uint8).cpu().numpy().tobytes(), name
    return array.shape, array.tobytes(), ""


def _unpack(kind: type, packed: tuple[list[int], bytes, str]) -> Array | Tensor:
    shape, data, name = packed
    if kind is Tensor:
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, name)).view(shape)
    return np.frombuffer(data, np.int32).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder = msgspec.msgpack.Decoder(Step | Choice, dec_hook=_unpack)


class Leader:
    """Sends steps to followers. Owned by the engine thread once that runs."""

    def __init__(
        self, sender: StepSender, is_closing: Callable[[], bool] = lambda: False,
        end_process: Callable[[], None] = end_process,
    ) -> None:  # fmt: skip
        """`is_closing`: whether the worker is ending; followers may be gone then. `end_process`: for a failed step."""
        self._sender = sender
        self.is_closing = is_closing
        self.end_process = end_process
        self._deltas: list[Delta] = []
        self.is_leading = False  # False during warm-up, which all ranks do by themselves

    def note(self, delta: Delta) -> None:
        """Send it with the next step."""
        if self.is_leading:
            self._deltas.append(delta)

    def send(self, runner: int, requests: Sequence[ForwardRow], is_begun: bool = False) -> None:
        """Send a step, before rank 0 computes it. is_begun: `send_choice` follows. Raises LinkError."""
        if self.is_leading:
            deltas, self._deltas = self._deltas, []
            self._sender.write(_encoder.encode(Step(deltas, runner, requests, is_begun)), SEND_S)

    def flush(self) -> None:
        """Send what was noted, without a step. Raises LinkError."""
        self.send(0, [])

    def send_choice(self, masks: Masks) -> None:
        """Send what the last step may choose. Raises LinkError."""
        if self.is_leading:
            self._sender.write(_encoder.encode(Choice(dict(masks))), SEND_S)


class LedInputBatch(InputBatch):
    """Rank 0's rows."""

    def __init__(self, leader: Leader, *sizes: Any) -> None:
        """sizes: see `InputBatch`."""
        super().__init__(*sizes)
        self._leader = leader

    def open(
        self, row: int, token_ids: Array, sampling: SamplingParams, answer_begin: int, slot: int = NO_SLOT,
        images: Sequence[tuple[ImageSpan, Encoding | None]] = (),
    ) -> None:  # fmt: skip
        super().open(row, token_ids, sampling, answer_begin, slot, images)
        self._leader.note(Open(row, token_ids, sampling, answer_begin, slot, images))

    def close(self, row: int) -> None:
        self._leader.note(Close(row))
        super().close(row)

    def write_tokens(self, parts: Sequence[tuple[int, int, Array]]) -> None:
        if parts:
            self._leader.note(Tokens(list(parts)))
            super().write_tokens(parts)

    def write_pages(self, row: int, first: int, pages: Sequence[int]) -> None:
        self._leader.note(Pages(row, first, list(pages)))
        super().write_pages(row, first, pages)

    def fill_slot(self, slot: int, digest: str) -> None:
        self._leader.note(FillSlot(slot, digest))
        super().fill_slot(slot, digest)

    def drop_adapter(self, digest: str) -> None:
        self._leader.note(DropAdapter(digest))
        self._leader.flush()
        super().drop_adapter(digest)


class LedRunner(Runner):
    """Rank 0's runner of one model. If a step fails after it was sent, ranks differ, so the process ends."""

    def __init__(self, leader: Leader, number: int, *parts: Any) -> None:
        """number: see `Step.runner`; parts: see `Runner`."""
        super().__init__(*parts)
        self._leader = leader
        self._number = number

    def launch(self, requests: Sequence[ForwardRow]) -> Launched:
        step = self._prepare(requests)  # finds errors in requests before anything is sent
        with self._ending():
            self._leader.send(self._number, requests)
            return self._run(step)

    def begin(self, requests: Sequence[ForwardRow]) -> Begun:
        step = self._prepare(requests)
        with self._ending():
            self._leader.send(self._number, requests, is_begun=True)
            return Begun(requests, step, self._begin(step))

    def choose(self, begun: Begun, masks: Masks) -> Launched:
        with self._ending():
            self._leader.send_choice(masks)
            return super().choose(begun, masks)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the process on an error."""
        try:
            yield
        except Exception:
            if self._leader.is_leading and not self._leader.is_closing():
                log.exception("a step of several ranks failed; this process ends")
                self._leader.end_process()
            raise


class Deferred(Launched):
    """A step that the stages before compute. This rank's stage does once it, or a later step, is collected."""

    def __init__(self, step: Prepared, compute: Callable[["Deferred"], ModelOutput]) -> None:
        self.step = step
        self._compute = compute
        self.output: ModelOutput | None = None

    def collect(self) -> ModelOutput:
        return self._compute(self)


class StagedRunner(LedRunner):
    """Rank 0's runner of a model in stages, of which its own is the last: several steps are under way in others."""

    def __init__(self, leader: Leader, number: int, *parts: Any) -> None:
        super().__init__(leader, number, *parts)
        self._waiting: deque[Deferred] = deque()  # sent, in order

    def launch(self, requests: Sequence[ForwardRow]) -> Launched:
        if not self._leader.is_leading:
            return super().launch(requests)
        step = self._prepare(requests)
        with self._ending():
            self._leader.send(self._number, requests)
        self._waiting.append(Deferred(step, self._compute))
        return self._waiting[-1]

    def begin(self, requests: Sequence[ForwardRow]) -> Begun:
        raise NotImplementedError("all tokens that a step of stages goes on from are known when it is launched")

    def _compute(self, wanted: Deferred) -> ModelOutput:
        while wanted.output is None:
            deferred = self._waiting.popleft()
            with self._ending():
                output = deferred.output = self._run(deferred.step).collect()
            if output.tokens:
                self._leader.note(Sampled(deferred.step.outputs.places.tolist(), output.tokens))
        return wanted.output


class LedHeadRunner(LedRunner, HeadRunner):
    """Rank 0's runner of a draft head: only drafts are sent, since each rank's head follows its model by itself."""


def follow(
    receiver: StepReceiver, rows: InputBatch, runners: Sequence[Runner],
    lock: AbstractContextManager[object] = NO_LOCK,
) -> None:  # fmt: skip
    """Repeat the leader's steps until LinkError or any failure; the process is useless then. `lock`: held in each."""
    behind: deque[Launched] = deque()
    begun: tuple[Runner, Begun] | None = None
    while True:
        message = _decoder.decode(receiver.read())
        with lock:
            if isinstance(message, Choice):
                assert begun is not None, "a choice without a step"
                runner, step = begun
                behind.append(runner.choose(step, message.masks))
            else:
                for delta in message.deltas:
                    delta.apply(rows)
                if not message.requests:
                    continue
                runner = runners[message.runner]
                if message.is_begun:
                    begun = runner, runner.begin(message.requests)
                    continue
                behind.append(runner.launch(message.requests))
            if len(behind) > MOST_BEHIND:
                behind.popleft().collect()
