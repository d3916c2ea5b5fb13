"""One stored answer while this gateway computes it: its tokens, some of them in the store, and its events so far."""

import asyncio
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import numpy as np
import structlog

from gateway.answer.choices import stream_choices
from gateway.api.http.answer import Events
from gateway.errors import ApiError
from gateway.router.attempt import FINISH_REASONS
from gateway.router.engine_client import FinishReason, Tokens
from gateway.store.database import RUNNING, Answer, Change, TokenPart
from gateway.store.kinds import Event, Place, Prepared, StoredWriter
from wire.logprobs import TokenLogprobs
from wire.messages import pack_tokens, unpack_tokens

_log = structlog.get_logger()

WRITE_TOKENS = 32  # an answer that has so many more than the store is written soon
AT_ONCE = 256  # tokens that are read again before others have their turn
_LOGPROBS = msgspec.msgpack.Decoder(list[TokenLogprobs])


def singly(tokens: Tokens, stop_token_ids: frozenset[int]) -> Iterator[Tokens]:
    """The same, a token a part: so the borders of events do not depend on how tokens arrived.

    The end is a part of its own, unless a stop token makes it.
    """
    ids, last = tokens.token_ids, len(tokens.token_ids) - 1
    if not last and tokens.finish_reason is None:
        yield tokens
        return
    is_stopped = tokens.finish_reason == "stop" and stop_token_ids.issuperset(ids[-1:]) and bool(ids)
    of_prompt = tokens.prompt_logprobs  # with the first part
    for at, token_id in enumerate(ids):
        finish = tokens.finish_reason if is_stopped and at == last else None
        scored = tokens.logprobs[at : at + 1]
        yield Tokens((token_id,), finish, scored, None if at else of_prompt, tokens.timing, tokens.computes)
    if tokens.finish_reason and not is_stopped:
        yield Tokens((), tokens.finish_reason, (), None if ids else of_prompt, tokens.timing, tokens.computes)


@dataclass(slots=True)
class ChoiceTokens:
    """The tokens of one choice so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each, if requested
    finish: FinishReason | None = None
    num_saved: int = 0  # tokens in the store
    is_end_saved: bool = False

    def add(self, tokens: Tokens) -> None:
        self.ids += tokens.token_ids
        self.logprobs += tokens.logprobs
        self.finish = tokens.finish_reason or self.finish

    @property
    def tokens(self) -> Tokens:
        """All tokens so far, as one part."""
        return Tokens(tuple(self.ids), self.finish, tuple(self.logprobs))

    def take_part(self, choice: int) -> TokenPart | None:
        """The tokens that the store lacks; None if it has all."""
        begin = self.num_saved
        ids = self.ids[begin:]
        if not ids and (self.finish is None or self.is_end_saved):
            return None
        logprobs = msgspec.msgpack.encode(self.logprobs[begin:]) if self.logprobs else b""
        return TokenPart(choice, begin, pack_tokens(np.array(ids, np.int32)), logprobs, self.finish or "")


def join_parts(parts: Sequence[TokenPart], num_choices: int) -> list[ChoiceTokens]:
    """Joins the parts in the store into the tokens of each choice."""
    choices = [ChoiceTokens() for _ in range(num_choices)]
    for part in parts:
        one = choices[part.choice]
        one.ids += unpack_tokens(part.ids).tolist()
        one.logprobs += _LOGPROBS.decode(part.logprobs) if part.logprobs else []
        one.finish = FINISH_REASONS[part.finish]
        one.num_saved, one.is_end_saved = len(one.ids), one.finish is not None
    return choices


def find_end(events: Sequence[Event]) -> Sequence[Event]:
    """The events that end an answer. A failed one may have two."""
    return events[-2:] if events[-1][1].startswith(b"event: error\n") else events[-1:]


class Run:
    """Computes an answer until its end, even if no client listens."""

    def __init__(
        self,
        answer: Answer,
        prepared: Prepared,
        writer: StoredWriter,
        kept: list[ChoiceTokens],
        on_due: Callable[[], None],
        is_held: Callable[[], bool],
        *,
        is_new: bool,
        is_waited_for: bool,
        is_kept: bool,
    ) -> None:
        """`kept`: what the store has of each choice. `prepared`: its job goes on behind that.

        `on_due`: called when there is something to store soon. `is_held`: whether no other gateway can have taken it.
        `is_new`: the store has no row of it. `is_waited_for`:
        its client learns of it with its first tokens, and of an error before in another way. `is_kept`: its client may
        read it elsewhere.
        """
        self.answer, self.totals, self.is_new = answer, prepared.totals, is_new
        self._on_due, self._is_waited_for, self.is_kept = on_due, is_waited_for, is_kept
        self.is_known = asyncio.Event()  # the store has its row
        self.is_lost = False  # another gateway works on it, or it was deleted
        self.is_held = is_held
        self.error: ApiError | None = None  # why it failed
        self.choices = kept
        self._served, self._writer = prepared.served, writer
        self._is_stopped = False  # its task, by us
        self._saved_state = answer.status, answer.computes  # in its row
        self._waiting: list[asyncio.Future[None]] = []  # for a change
        self._part_bytes = self._row_bytes = 0  # of parts that are saved; of these and the result, as the row has it
        self.log: list[Event] = writer.begin()
        self.num_begun = len(self.log)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether no more events will follow here."""
        return self.is_lost or self.answer.status not in RUNNING

    @property
    def end(self) -> bytes:
        """The bytes that follow the last event."""
        return self._writer.end if self.answer.status in ("completed", "incomplete") else b""

    @property
    def is_saved(self) -> bool:
        """Whether the store has all of it, or is not to have it."""
        return self.is_lost or (not self.is_new and self.answer.status == self._saved_state[0] not in RUNNING)

    @property
    def num_unsaved(self) -> int:
        """Tokens that the store lacks."""
        return sum(len(one.ids) - one.num_saved for one in self.choices)

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run())
        return self._task

    async def _run(self) -> None:
        numbers = iter(range(len(self.choices)))
        is_whole = not self.is_kept  # no client reads it before its end
        pieces = stream_choices(
            self._served, self.totals, lambda stream: self._follow(next(numbers), stream), is_whole=is_whole
        )
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    if piece.finish_reason is not None:  # by a stop string
                        self.choices[index].finish = self.choices[index].finish or piece.finish_reason
                    self._note(self._writer.events(index, piece))
        except ApiError as error:
            if self.is_kept and not (self.is_new or self.is_held()):  # the gateway that has it now may do better
                self.is_lost = True
                self._note([])
            else:
                self._fail(error)
        except CancelledError:
            if not (self.is_lost or self._is_stopped):
                raise
        except Exception:
            _log.exception("answer failed", answer=self.answer.id)
            message = f"the answer {self.answer.id} failed inside the service; its log says why"
            self._fail(ApiError(500, message, None, "internal_error"))

    async def _follow(self, choice: int, stream: AsyncGenerator[Tokens, None]) -> AsyncGenerator[Tokens, None]:
        """Yields the tokens kept of a choice, then those of its stream, which it keeps."""
        kept, stops = self.choices[choice], self.totals.job.generations[choice].stop_token_ids
        async with aclosing(stream):
            for rank, one in enumerate(list(singly(kept.tokens, stops)), 1):
                yield one
                if rank % AT_ONCE == 0:
                    await asyncio.sleep(0)
            if kept.finish is not None:
                return
            async for tokens in stream:
                self.answer.computes = self.answer.computes or tokens.computes
                for one in singly(tokens, stops):
                    kept.add(one)
                    yield one
                if self.num_unsaved >= WRITE_TOKENS:
                    self._on_due()

    @property
    def is_refused(self) -> bool:
        """Whether it failed before its client learned of it."""
        return self.error is not None and self._is_waited_for and not any(one.ids for one in self.choices)

    def _fail(self, error: ApiError) -> None:
        self.error = error
        self.is_lost = self.is_refused and self.is_new  # then no client needs it
        self._note(self._writer.failed(error))

    def _note(self, events: Sequence[Event]) -> None:
        """Adds events, and wakes who waits for them."""
        self.log += events
        if self.answer.status in RUNNING and (ended := self._writer.ended) is not None:
            self.answer.status, self.answer.result = ended
            self._on_due()
        elif self.answer.status == "queued" and any(one.ids for one in self.choices):
            self.answer.status, self.answer.result = "in_progress", self._writer.so_far("in_progress")
        waiting, self._waiting = self._waiting, []
        for woken in waiting:
            if not woken.done():
                woken.set_result(None)

    async def _wait_changed(self) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._waiting.append(woken)
        await woken

    async def follow(self, place: Place, elsewhere: Events, at: int = 0, *, is_asked: bool = False) -> Events:
        """Yields events that a client lacks, those that are there at once; where it is lost, those from `elsewhere`.

        `at`: how much of the log has passed the client's place. `is_asked`: for the client that asked for it. Raises
        its ApiError if it was refused.
        """
        while True:
            if is_asked and self.is_refused and self.error is not None:
                raise self.error
            if at < len(self.log):
                shown, at = place.take(self.log[at:]), len(self.log)
                if shown:
                    yield shown
            elif self.is_lost:
                async with aclosing(elsewhere):
                    async for shown in elsewhere:
                        yield shown
                return
            elif self.is_over:
                if shown := place.take_end(find_end(self.log)) + self.end:
                    yield shown
                return
            else:
                await self._wait_changed()

    async def wait(self) -> None:
        """Waits until it is over."""
        while not self.is_over:
            await self._wait_changed()

    async def pause(self) -> None:
        """Stops the computation; the answer is not over."""
        if not self.is_over and self._task is not None:
            self._is_stopped = True
            self._task.cancel()
            await asyncio.wait({self._task})

    async def stop(self, *, is_lost: bool = False) -> None:
        """Ends it: cancelled by its client, or because it is not this gateway's any more."""
        if self.is_over or self._task is None:
            return
        await self.pause()
        if self.is_over:  # in the meantime
            return
        self.is_lost = is_lost
        self._note([] if is_lost else self._writer.cancelled())

    @property
    def has_news(self) -> bool:
        """Whether the store lacks something of it."""
        state = self.answer.status, self.answer.computes
        return not self.is_saved and (self.is_new or state != self._saved_state or bool(self.num_unsaved))

    def take_change(self) -> tuple[Change, list[tuple[int, bool]]]:
        """The change that the store lacks, and the sizes for `mark_saved` once the store has it."""
        sizes = [(len(one.ids), one.finish is not None) for one in self.choices]
        parts = [one.take_part(choice) for choice, one in enumerate(self.choices)]
        state = self.answer.status, self.answer.computes
        has_changed = self.is_new or state != self._saved_state
        answer = Answer(*(getattr(self.answer, name) for name in Answer.__slots__))
        new = [part for part in parts if part is not None]
        size = self._part_bytes + _size(new) + len(answer.result)
        return Change(answer, self.is_new, has_changed, size - self._row_bytes if has_changed else 0, new), sizes

    def mark_saved(self, change: Change, sizes: Sequence[tuple[int, bool]]) -> None:
        self.is_known.set()
        self.is_new, self._saved_state = False, (change.answer.status, change.answer.computes)
        self._part_bytes += _size(change.parts)
        self._row_bytes += change.num_bytes
        for one, (num_tokens, has_end) in zip(self.choices, sizes, strict=True):
            one.num_saved, one.is_end_saved = num_tokens, has_end


def _size(parts: Sequence[TokenPart]) -> int:
    return sum(len(part.ids) + len(part.logprobs) for part in parts)
