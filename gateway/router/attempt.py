"""One try of a request that has places: reserve a session, have the prompt prefilled, follow the tokens."""

import asyncio
from asyncio import sleep
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc

from gateway.errors import bad_request
from gateway.router.attempt_record import AttemptRecord, WorkerName
from gateway.router.decode_client import DecodeClient, Prefilled, Session, SessionEvent
from gateway.router.engine_client import FinishReason, Tokens
from gateway.router.placement import LEAST_LENT
from gateway.router.prefill_client import PrefillClient
from gateway.router.queue import Queue, Waiter
from gateway.router.refusals import read_refusal
from gateway.router.request import AttemptFailed, Request
from protos import decode_pb2, kv_pb2, prefill_pb2
from wire.logprobs import TokenLogprobs
from wire.messages import pack_retention, pack_sampling, unpack_decode_timing, unpack_logprobs, unpack_prefill_timing
from wire.timing import Timing

NO_TIMING = Timing()
FINISH_REASONS: dict[str, FinishReason | None] = {"": None, "stop": "stop", "length": "length"}  # of answers
READ_AT_ONCE = 512  # log-probabilities; reading them holds the event loop, 7 us each with the 20 likeliest tokens


class Attempt:
    """Owns a session, perhaps a call of prefill, and the places of `waiter`.

    When its block ends, nothing of it is left here, and soon nothing on the workers.
    """

    def __init__(
        self, request: Request, waiter: Waiter, queue: Queue, record: AttemptRecord, clock: Callable[[], float]
    ) -> None:
        """`record`: filled in."""
        assert waiter.places is not None
        places, decode, prefill = waiter.places, waiter.places.decode, waiter.places.prefill
        assert isinstance(decode, DecodeClient) and (prefill is None or isinstance(prefill, PrefillClient))
        self._request, self._waiter, self._queue, self._record, self._clock = request, waiter, queue, record, clock
        self._places, self._decode, self._prefill = places, decode, prefill
        self._session: Session = decode.open_session(
            request.attempt,
            request.silent_since,
            lambda: places.release(decode),  # however slowly its client reads
        )
        self.incarnations = decode.incarnation, prefill.incarnation if prefill else None  # of its workers
        self._num_cached = 0  # prompt tokens whose KV is not computed for this attempt, as far as is known
        self._prefilled: Timing | None = None  # where a prefill worker ran
        self._is_remembered = False  # decode is known to have the KV of the prompt
        self._scored: list[TokenLogprobs] = []  # the prompt's tokens', so far
        self._held: Tokens | None = None  # back until all those are here
        self._prefilling: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        name = WorkerName(prefill.address, prefill.incarnation) if prefill else None
        record.place(WorkerName(decode.address, decode.incarnation), name, clock())

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._prefilling is not None:
            self._prefilling.cancel()
        if self._is_remembered and not self._session.is_over:  # cut off: what it has may be lent to the next attempt
            self._remember()
        self._decode.close_session(self._session)
        self._queue.leave(self._waiter)

    async def reserve(self) -> None:
        """Open the session; where the decode worker lacks the prompt's KV, have it prefilled. Raises AttemptFailed."""
        request, places, began = self._request, self._places, self._clock()
        if self.incarnations[0] != places.placement.decode.incarnation:  # perhaps with other weights
            raise AttemptFailed("absent", f"{self._decode.address} has restarted since it was chosen")
        try:
            reserved = await self._decode.reserve(self._build_reserve(), timeout_s=self._remaining_s())
        except grpc.aio.AioRpcError as error:
            failed = read_refusal("decode", self._decode.address, error)
            self._note_refusal(self._decode, failed)
            if failed.why == "compiling":
                request.grammar_s += self._clock() - began
            elif failed.why == "restoring":
                self._queue.remember(self._places, request, "decode")  # it is about to have it
            raise failed from error
        self._record.reserve(reserved.needs_prefill, reserved.ticket.begin)
        request.absent_since, places.is_reserved = None, True
        self._num_cached = reserved.ticket.begin
        self._ring_alarm()
        if self._prefill is not None and reserved.needs_prefill:
            self._prefilling = asyncio.create_task(self._run_prefill(self._prefill, reserved))
        elif self._prefill is not None:
            places.release(self._prefill)
        elif reserved.needs_prefill:
            self._queue.placer.correct(places.placement.decode, request, self._num_cached)
            if places.placement.lender is not None:
                request.mistaken.add(places.placement.lender.incarnation)
            raise AttemptFailed("mistaken", "the decode worker lacks more of the prompt than was expected")

    def _build_reserve(self) -> decode_pb2.ReserveRequest:
        request, wanted, session = self._request, self._request.wanted, self._session
        grammar, speculation = wanted.grammar, wanted.speculation
        return decode_pb2.ReserveRequest(
            request_id=wanted.request_id,
            attempt=request.attempt,
            gateway=session.stream,
            handle=session.handle,
            prompt=request.packed_tokens,
            max_tokens=request.num_left,
            sampling=pack_sampling(wanted.sampling),
            stop_token_ids=sorted(wanted.stop_token_ids),
            local_prefill_max_tokens=self._places.placement.local_prefill_max_tokens,
            num_emitted=len(request.emitted),
            min_tokens=wanted.min_tokens,
            num_logprobs=wanted.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs,
            grammar=decode_pb2.Grammar(kind=grammar.kind, text=grammar.text) if grammar else None,
            speculation=decode_pb2.Speculation(
                drafter=speculation.drafter, max_draft_tokens=speculation.max_draft_tokens
            ),
            cache_salt=wanted.cache_salt,
            adapter=request.adapter,
            images=self._pack_images(with_data=self._prefill is None),
            source=None if self._prefill else self._pack_source(),
            retention=pack_retention(request.retention),
        )

    def _pack_source(self) -> kv_pb2.PageSource | None:
        """The worker that lends KV to the one that computes the prompt; None if none does."""
        placement = self._places.placement
        lender, tokens = placement.lender, placement.num_lent
        if lender is None:
            return None
        return kv_pb2.PageSource(
            address=lender.address, incarnation=lender.incarnation, tokens=tokens, least=LEAST_LENT
        )  # fmt: skip

    def _pack_images(self, with_data: bool) -> list[kv_pb2.Image]:
        return [
            kv_pb2.Image(**image.span._asdict(), data=image.data if with_data else b"")
            for image in self._request.wanted.images
        ]

    async def _run_prefill(self, worker: PrefillClient, reserved: decode_pb2.ReserveResponse) -> None:
        """The answer goes to the session's inbox. The place is free at once, however slowly the client reads."""
        request = self._request
        run = prefill_pb2.RunRequest(
            request_id=request.wanted.request_id,
            prompt=request.packed_tokens,
            cache_salt=request.wanted.cache_salt,
            ticket=reserved.ticket,
            num_prompt_logprobs=request.num_prompt_logprobs,
            images=self._pack_images(with_data=True),
            source=self._pack_source(),
            retention=pack_retention(request.retention),
        )
        try:
            done = await worker.run(run, timeout_s=self._remaining_s(), on_lost=self._session.put)
            prefilled = Prefilled(unpack_prefill_timing(done), await _unpack_logprobs(done.prompt_logprobs))
        except grpc.aio.AioRpcError as error:
            failed = read_refusal("prefill", worker.address, error)
            self._note_refusal(worker, failed)
            self._session.put(failed)
        except Exception as error:  # AttemptFailed, or a bug: the request would wait for ever
            self._session.put(error)
        else:
            self._places.release(worker)
            self._session.put(prefilled)

    def _note_refusal(self, worker: DecodeClient | PrefillClient, failed: AttemptFailed) -> None:
        if failed.why == "no room":
            self._places.release(worker, is_refused=True)
        elif failed.why in ("no adapter", "no slot"):
            worker.refuse_adapter(self._request.adapter, is_loaded=failed.why == "no slot")

    async def next(self) -> Tokens:
        """The next part of the answer. Raises AttemptFailed, or ApiError at the request's deadline."""
        while True:
            event = await self._next_event()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Prefilled):
                self._take_prefilled(event)
                tokens = self._emit(None)
            else:
                tokens = self._emit(await self._take_delta(event))
            if tokens is not None:
                return tokens

    async def _next_event(self) -> SessionEvent:
        """Wait for an event. After the deadline one counts only if the whole answer is here: its reader may be slow."""
        while True:
            is_late = self._clock() >= self._request.due
            if self._session.inbox and (not is_late or self._session.is_over):
                return self._session.inbox.popleft()
            if is_late:
                raise self._request.end_late()
            await self._session.wait()

    def _take_prefilled(self, prefilled: Prefilled) -> None:
        self._prefilled, self._num_cached = prefilled.timing, prefilled.timing.cached_tokens
        self._scored.extend(prefilled.prompt_logprobs)
        self._queue.remember(self._places, self._request, "prefill")
        self._remember()
        self._record.finish_prefill(prefilled.timing, self._clock())

    async def _take_delta(self, delta: decode_pb2.SessionDelta) -> Tokens:
        """Read a delta. Raises AttemptFailed, or ApiError, where it reports trouble."""
        finish = delta.finish_reason
        timing = unpack_decode_timing(delta.timing) if finish else None
        self._record.add_tokens(len(delta.token_ids), timing, self._clock())
        if finish not in FINISH_REASONS:
            raise self._describe_trouble(delta)
        logprobs: Sequence[TokenLogprobs] = ()
        if delta.logprobs or delta.prompt_logprobs:
            logprobs = await _unpack_logprobs(delta.logprobs)
            self._scored.extend(await _unpack_logprobs(delta.prompt_logprobs))
        computes = self._request.name_computes(self._places.placement.decode)
        return Tokens(tuple(delta.token_ids), FINISH_REASONS[finish], tuple(logprobs), None, timing, computes)

    def _describe_trouble(self, delta: decode_pb2.SessionDelta) -> Exception:
        detail, grammar = delta.error or delta.finish_reason, self._request.wanted.grammar
        if delta.finish_reason == "grammar_error" and grammar is not None:  # it would be so anywhere
            return bad_request(f"the answer cannot follow {grammar.param}: {detail}", grammar.param)
        detail = f"{self._decode.address}: {detail}"
        if delta.finish_reason == "expired":  # the decode worker got no KV in time
            return AttemptFailed("expired", detail, "prefill")
        return AttemptFailed("failed", detail)

    def _emit(self, latest: Tokens | None) -> Tokens | None:
        """Tokens for the client; none before all log-probabilities of the prompt that it asked for are here."""
        request, tokens = self._request, _join(self._held, latest)
        wants_prompt = request.num_prompt_logprobs is not None
        if tokens is None or (wants_prompt and len(self._scored) < len(request.wanted.prompt_ids) - 1):
            self._held = tokens
            return None
        self._held = None
        if wants_prompt or tokens.finish_reason or not request.emitted:
            prompt_logprobs = tuple(self._scored) if wants_prompt else None
            is_timed = tokens.finish_reason or not request.emitted
            timing = self._build_timing(tokens.timing or NO_TIMING) if is_timed else None
            tokens = replace(tokens, prompt_logprobs=prompt_logprobs, timing=timing)
        request.is_prompt_scored = request.is_prompt_scored or wants_prompt
        request.emit(tokens.token_ids, self._places.placement.decode, self._clock())
        if tokens.finish_reason or (tokens.token_ids and not self._is_remembered):
            self._remember()
        if tokens.finish_reason:
            self._record.close(self._clock())
        return tokens

    def _remember(self) -> None:
        """The decode worker has the KV of all the request's tokens but the last."""
        self._is_remembered = True
        self._queue.remember(self._places, self._request, "decode")

    def _build_timing(self, decode: Timing) -> Timing:
        """Times of the whole request, from the decode worker's. Where decode prefilled, it knows the prompt's times."""
        prompt, request = self._prefilled or decode, self._request
        return replace(
            decode,
            wake_s=request.wake_s,
            queue_s=request.queue_s,
            grammar_s=request.grammar_s + decode.grammar_s,
            prefill_s=prompt.prefill_s,
            transfer_s=prompt.transfer_s,
            transfer_bytes=prompt.transfer_bytes,
            transport=prompt.transport,
            cached_tokens=min(self._num_cached, len(request.wanted.prompt_ids)),
            read_tokens=prompt.read_tokens,
            attempts=request.attempt,
            prefill_reason=self._places.placement.why,
        )

    def _ring_alarm(self) -> None:
        """Wake at the deadline. The loop's clock may be a little behind ours."""
        remaining_s = self._request.due - self._clock()
        if remaining_s > 0:
            self._alarm = asyncio.get_running_loop().call_later(remaining_s + 0.001, self._ring_alarm)
        else:
            self._session.wake()

    def _remaining_s(self) -> float:
        return max(self._request.due - self._clock(), 0.001)


async def _unpack_logprobs(messages: Sequence[decode_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    """Other tasks get their turn while those of a long prompt are read."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(messages), READ_AT_ONCE):
        if start:
            await sleep(0)
        found += map(unpack_logprobs, messages[start : start + READ_AT_ONCE])
    return found


def _join(held: Tokens | None, latest: Tokens | None) -> Tokens | None:
    """Both parts as one; None if there is none."""
    if held is None or latest is None:
        return held or latest
    token_ids, logprobs = held.token_ids + latest.token_ids, held.logprobs + latest.logprobs
    return replace(latest, token_ids=token_ids, logprobs=logprobs)
