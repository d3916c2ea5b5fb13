"""One try of a request on one pair of workers: does what the request's machine decides. Lives on the asyncio thread."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import grpc

from gateway.generation import Grammar, Sampling, TokenLogprobs, Tokens
from gateway.ring.admission import Places
from gateway.ring.decode_link import Lost as LinkLost
from gateway.ring.decode_link import RemoteSession
from gateway.ring.request_actions import Action, Emit, GiveBack, Leave, Prefill, Reserve
from gateway.ring.request_events import (
    Event,
    Lost,
    News,
    Placed,
    Prefilled,
    Refused,
    Reserved,
    Role,
    SessionTiming,
    TimedOut,
)
from gateway.ring.request_machine import Phase, Request
from gateway.ring.sharing import Leader
from gateway.ring.worker_link import GONE, PrefillLink
from protos import decode_pb2, kv_pb2, prefill_pb2
from runtime import rpc

_READ_AT_ONCE = 512  # log-probabilities; reading them holds the event loop, 7 us each where 20 tokens are told


class PrefillRefusedError(Exception):
    """Carries a prefill worker's refusal through the session's inbox to the request."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.detail)
        self.refused = refused


@dataclass(slots=True)
class Attempt:
    """A try of `request`, which has `places`. Whatever ends it, nothing of it is left on the workers."""

    request: Request
    places: Places
    leader: Leader | None = None  # who is told the session, for others to share its prompt
    partner: RemoteSession | None = None  # a session whose prompt to share
    left: Leave | None = None  # how it ended: the machine's word. Set by `run`
    _prefilling: asyncio.Task[None] | None = None

    async def run(self) -> AsyncGenerator[Tokens, None]:
        """New tokens; afterwards the request waits again or has ended."""
        decode, prefill = self.places.decode, self.places.prefill
        with decode.open_session(self.request.silent_since) as session:
            placed = Placed(session.incarnation, prefill.status.peer.incarnation if prefill else None)
            session.on_over = lambda: self.places.release(decode)  # a client that reads slowly must not keep it
            (reserve,) = self.request.step(placed, time.monotonic())
            assert isinstance(reserve, Reserve)
            event, ticket = await self._reserve(reserve, session)
            if self.leader is not None and isinstance(event, Reserved):
                self.leader.open(session)
            try:
                while True:
                    for action in self.request.step(event, time.monotonic()):
                        self._act(action, session, ticket)
                        if isinstance(action, Emit):
                            yield action.tokens
                    if self.request.phase is not Phase.RUNNING:
                        return
                    event = await self._next_event(session)
            finally:
                if self.leader is not None:
                    self.leader.close()
                if self._prefilling is not None:
                    self._prefilling.cancel()

    def _act(self, action: Action, session: RemoteSession, ticket: kv_pb2.Ticket) -> None:
        prefill = self.places.prefill
        if isinstance(action, Prefill) and prefill is not None:
            self._prefilling = asyncio.create_task(self._prefill(action, prefill, ticket, session))
        elif isinstance(action, GiveBack):
            link = prefill if action.role == "prefill" else self.places.decode
            assert link is not None
            (self.places.give_back_refused if action.is_refused else self.places.release)(link)
        elif isinstance(action, Leave):
            self.left = action

    async def _reserve(self, action: Reserve, session: RemoteSession) -> tuple[Event, kv_pb2.Ticket]:
        generation, decode = self.request.generation, self.places.decode
        message = decode_pb2.ReserveRequest(
            request_id=generation.request_id,
            attempt=action.attempt,
            gateway=session.stream,
            handle=session.handle,
            prompt_ids=action.prompt_ids,
            max_tokens=action.max_tokens,
            sampling=_sampling_message(generation.sampling),
            stop_token_ids=sorted(generation.stop_token_ids),
            local_prefill_max_tokens=action.local_prefill_max_tokens,
            num_emitted=action.num_emitted,
            min_tokens=generation.min_tokens,
            num_logprobs=generation.num_logprobs,
            num_prompt_logprobs=action.num_prompt_logprobs,
            grammar=_grammar_message(generation.grammar),
            speculation=decode_pb2.Speculation(
                drafter=generation.speculation.drafter, max_draft_tokens=generation.speculation.max_draft_tokens
            ),
            share_with=self._share_with(session),
        )
        try:
            answer = await decode.reserve(message, timeout_s=self._remaining_s())
        except grpc.aio.AioRpcError as error:
            return _refusal("decode", decode.address, error), kv_pb2.Ticket()
        return Reserved(answer.needs_prefill), answer.ticket

    def _share_with(self, session: RemoteSession) -> int:
        """Handle of the partner's session, if it is open on the same stream."""
        return self.partner.handle if self.partner is not None and self.partner.stream == session.stream else 0

    async def _prefill(
        self, action: Prefill, prefill: PrefillLink, ticket: kv_pb2.Ticket, session: RemoteSession
    ) -> None:
        """Run the prompt on the prefill worker; trouble goes to the session's inbox, where the request listens."""
        request_id = self.request.generation.request_id
        try:
            run = prefill_pb2.RunRequest(
                request_id=request_id,
                prompt_ids=action.prompt_ids,
                ticket=ticket,
                num_prompt_logprobs=action.num_prompt_logprobs,
            )
            done = await prefill.run(run, timeout_s=self._remaining_s())
        except grpc.aio.AioRpcError as error:
            session.inbox.put_nowait(PrefillRefusedError(_refusal("prefill", prefill.address, error)))
        except Exception as error:  # a bug; the request must hear of it rather than wait
            session.inbox.put_nowait(error)
        else:
            self.places.release(prefill)  # at once: a client that reads slowly must not keep the place
            session.inbox.put_nowait(done)

    async def _next_event(self, session: RemoteSession) -> Event:
        """What is in the inbox counts after the deadline only if it is all of the answer: its reader may be slow."""
        if time.monotonic() >= self.request.deadline and not session.is_over:
            return TimedOut()
        try:
            # not wait_for, which before Python 3.12 swallows a cancellation that comes with the news
            async with asyncio.timeout(self._remaining_s()):
                news = await session.inbox.get()
        except TimeoutError:
            return TimedOut()
        if isinstance(news, PrefillRefusedError):
            return news.refused
        if isinstance(news, Exception):
            raise news
        if isinstance(news, LinkLost):
            return Lost(news.reason)
        if isinstance(news, prefill_pb2.RunResponse):
            return await _prefilled(news)
        error = f"{self.places.decode.address}: {news.error or news.finish_reason}"
        return await _news(news, news.error if news.finish_reason == "grammar_error" else error)

    def _remaining_s(self) -> float:
        return max(self.request.deadline - time.monotonic(), 0.001)


def _refusal(role: Role, address: str, error: grpc.aio.AioRpcError) -> Refused:
    detail = f"{address}: {error.details()}"
    metadata = tuple(error.trailing_metadata() or ())
    if (rpc.REFUSED_FOR, rpc.NO_ROOM) in metadata:
        return Refused(role, "no room", detail)
    if (rpc.REFUSED_FOR, rpc.GRAMMAR_BUSY) in metadata:
        return Refused(role, "compiling", detail)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        if role == "decode":
            detail = error.details() or "the decode worker refused the request"
        is_grammar = (rpc.FIELD_AT_FAULT, "grammar") in metadata
        return Refused(role, "invalid", detail, is_grammar)
    if error.code() is grpc.StatusCode.NOT_FOUND and role == "decode":
        return Refused(role, "unshared", detail)
    is_absent = error.code() in GONE or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return Refused(role, "absent" if is_absent else "failed", detail)


def _sampling_message(sampling: Sampling) -> decode_pb2.SamplingParams:
    return decode_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[decode_pb2.TokenBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
    )


def _grammar_message(grammar: Grammar | None) -> decode_pb2.Grammar | None:
    return None if grammar is None else decode_pb2.Grammar(kind=grammar.kind, text=grammar.text)


async def _prefilled(response: prefill_pb2.RunResponse) -> Prefilled:
    return Prefilled(
        prefill_s=response.queue_seconds + response.prefill_seconds,
        transfer_s=response.transfer_seconds,
        transfer_bytes=response.transfer_bytes,
        transport=response.transport,
        prompt_logprobs=await _logprobs(response.prompt_logprobs),
    )


async def _news(delta: decode_pb2.SessionDelta, error: str) -> News:
    timing = delta.timing
    return News(
        delta.attempt,
        delta.token_ids,
        delta.finish_reason,
        error,
        await _logprobs(delta.logprobs),
        await _logprobs(delta.prompt_logprobs),
        SessionTiming(
            timing.kv_seconds,
            timing.first_step_seconds,
            timing.decode_seconds,
            timing.draft_tokens,
            timing.accepted_tokens,
        ),
    )


async def _logprobs(messages: Sequence[decode_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    """Others get their turn while those of a long prompt are read."""
    told: list[TokenLogprobs] = []
    for start in range(0, len(messages), _READ_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        told += map(_told, messages[start : start + _READ_AT_ONCE])
    return told


def _told(one: decode_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(one.logprob, tuple(zip(one.top_ids, one.top_logprobs, strict=True)))
