"""Turns the ring's tokens into the choices of a request, delta by delta."""

import asyncio
import time
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import structlog

from gateway.access.keys import Key
from gateway.answer.call_reader import CallReader
from gateway.answer.choice_text import OutputDelta, OutputReader, ShownToken
from gateway.answer.merged_streams import MergedStreams
from gateway.errors import WEIGHTS_GONE, ApiError
from gateway.metrics import ChoiceMeter
from gateway.request.prepare import ServedModel
from gateway.request.rules import LAST_PRIORITY
from gateway.request.types import Echo, GenerateRequest, PreparedRequest
from gateway.router.engine_client import TokenizedRequest, Tokens
from gateway.text.stops import StopStrings
from gateway.text.tokenizer import Tokenizer
from gateway.tools.json_text import JsonText
from gateway.tools.reasoning import new_reader
from gateway.tracing import ReadHeaders, RequestTrace
from wire.logprobs import TokenLogprobs
from wire.timing import Timing

_log = structlog.get_logger()

Hold = Callable[[AsyncGenerator[Tokens, None]], AsyncGenerator[Tokens, None]]

SESSION_HEADER = "x-baton-session"  # of HTTP, or metadata of gRPC
HOLD_CHOICES = "hold_choices"  # in the state of the HTTP request of a batch's line: its Hold

_RESTARTED = "the answer was begun once more: no worker was left of the weights that had begun it"
_PROMPT_TOKENS_AT_ONCE = 512  # writing them blocks the event loop, up to 30 us each


class Totals:
    """A job and its token counts so far. `stream_choices` counts each piece before it yields it."""

    def __init__(self, job: PreparedRequest, arrived_s: float, trace: RequestTrace | None = None) -> None:
        """`arrived_s`: when the request arrived, by time.perf_counter; `trace`: if it is traced."""
        self.job = job
        self.arrived_s = arrived_s
        self.trace = trace
        self.num_prompt = job.num_prompt_tokens
        self.num_completion = 0
        self.num_reasoning = 0  # of num_completion
        self.num_cached = 0  # prompt tokens whose KV was cached
        self.num_open = len(job.generations)  # unfinished choices
        self.notes: Sequence[str] = ()  # what workers gave less of than asked for, so far
        self.may_restart = False  # once, where the weights that began it are gone: its client has nothing of it yet

    def add(self, index: int, piece: OutputDelta) -> None:
        self.num_completion += len(piece.token_ids)
        self.job.key.allowance.spend(time.perf_counter(), len(piece.token_ids))
        self.num_reasoning += piece.num_reasoning_tokens
        self.num_open -= piece.finish_reason is not None
        if piece.timing is not None and index % self.job.num_per_prompt == 0:  # each prompt counts once
            self.num_cached += piece.timing.cached_tokens
        if self.trace is not None and piece.ending is not None:
            self.trace.endings[index] = piece.ending

    def restarts_after(self, error: BaseException) -> bool:
        """Whether the answer begins once more."""
        return self.may_restart and isinstance(error, ApiError) and error.code == WEIGHTS_GONE

    def restart(self) -> None:
        """Count nothing of what is thrown away, but for the key's allowance: it was computed."""
        age_s = time.perf_counter() - self.arrived_s
        generations = tuple(replace(one, age_s=age_s) for one in self.job.generations)
        self.job = replace(self.job, generations=generations, warnings=(*self.job.warnings, _RESTARTED))
        self.num_completion = self.num_reasoning = self.num_cached = 0
        self.num_open, self.may_restart = len(generations), False

    def warnings(self) -> tuple[str, ...]:
        """Warnings for the client: what it asked for and did not get, as far as that is known."""
        return (*self.job.warnings, *self.notes)

    def log(self, event: str, **fields: object) -> None:
        counts = {"choices": len(self.job.generations), "prompt_tokens": self.num_prompt}
        _log.info(event, **counts, tokens=self.num_completion, **fields)


def timing_fields(timing: Timing, names: Iterable[str]) -> dict[str, Any]:
    """Where a choice's time went, by clients' `names`, which end in `_seconds` where ours end in `_s`."""
    return {name: getattr(timing, name.replace("_seconds", "_s")) for name in names}


async def begin(
    served: ServedModel, raw: GenerateRequest, request_id: str, arrived_s: float, key: Key, headers: ReadHeaders
) -> Totals:
    """Checks a request, for `stream_choices`. `arrived_s`: as in Totals; `key`: its API key. Raises ApiError."""
    if session := next((value for name, value in headers() or () if name == SESSION_HEADER), None):
        raw = replace(raw, session=str(session), session_param=SESSION_HEADER)
    trace = served.begin_trace(raw, request_id, arrived_s, headers)
    try:
        return Totals(await served.prepare(raw, request_id, arrived_s, key), arrived_s, trace)
    except BaseException as error:
        note_failure(served, error, request_id, key.name)
        if trace is not None:
            trace.close(error)
        raise


def note_failure(
    served: ServedModel, error: BaseException, request_id: str, owner: str = "", num_tokens: int = 0
) -> None:
    """Counts a failure, and logs it if it is not the client's fault; bugs are logged where they end."""
    served.metrics.count_failure(error, owner)
    if isinstance(error, ApiError) and error.status >= 500:
        facts = {"status": error.status, "code": error.code, "reason": error.message}
        _log.warning("request not answered", request_id=request_id, tokens=num_tokens, **facts)


async def stream_choices(
    served: ServedModel, totals: Totals, hold: Hold | None = None, *, is_whole: bool = False
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Yields (index of its choice, piece) as pieces arrive. Closing this iterator closes the ring's.

    `hold`: of a batch's line, whose choices wait for their turns. `is_whole`: nobody sees pieces before the last.

    Raises the ring's ApiError: the first choice that fails ends the others.
    """
    job = totals.job
    meters = [
        ChoiceMeter(served.metrics, totals.arrived_s, one.owner, is_live=one.priority < LAST_PRIORITY)
        for one in job.generations
    ]
    waits = is_whole and not job.stop_strings  # which are looked for in content only
    choices = [_Choice(job, index, served.tokenizer, meter, waits) for index, meter in enumerate(meters)]
    failure: BaseException | None = None
    restarts = False
    waiting = set[int]()  # for their first token
    try:
        served.check_share(job.key.name, len(choices))
        waiting.update(range(len(choices)))
        served.waiting.add(job.key.name, len(choices))
        with served.ring.admit(len(choices)) as admitted:
            if not any(generation.emitted for generation in job.generations):
                served.metrics.prompt_tokens.inc(totals.num_prompt)
            totals.notes = admitted.notes
            new_attempts = totals.trace.add_choice if totals.trace else lambda: None
            streams = [served.ring.generate(generation, admitted, new_attempts()) for generation in job.generations]
            streams = [hold(stream) for stream in streams] if hold else streams
            async with MergedStreams(streams) as merged:
                while totals.num_open:
                    index, tokens = await merged.next()
                    if index in waiting:
                        waiting.remove(index)
                        served.waiting.add(job.key.name, -1)
                    if tokens is None:
                        message = "the answer ended before it was complete; try again"
                        raise ApiError(500, message, None, "incomplete_answer")
                    for num_before, piece in enumerate(choices[index].read(tokens)):
                        if piece.finish_reason is not None:
                            await merged.close(index)  # before the client sees the end
                        totals.add(index, piece)
                        if not totals.num_open:
                            totals.log("answered", reason=piece.finish_reason)
                        if num_before:
                            await asyncio.sleep(0)  # lets other requests run while a long prompt is echoed
                        yield index, piece
    except BaseException as error:
        if restarts := totals.restarts_after(error):
            totals.log("begun once more")
            raise
        note_failure(served, error, job.generations[0].request_id, job.generations[0].owner, totals.num_completion)
        if isinstance(error, ApiError) and not totals.num_completion:
            job.key.allowance.give_back(totals.num_prompt)
        failure = error if totals.num_open else None  # else the client left with the whole answer
        if isinstance(error, CancelledError | GeneratorExit):
            for meter in meters:
                meter.cancel()
            if totals.num_open:
                totals.log("cancelled")
        raise
    finally:
        served.waiting.add(job.key.name, -len(waiting))
        if totals.trace is not None and not restarts:
            totals.trace.note_usage(totals.num_prompt, totals.num_cached, totals.num_completion)
            totals.trace.close(failure)


class _Choice:
    """Reads one choice's tokens."""

    def __init__(self, job: PreparedRequest, index: int, tokenizer: Tokenizer, meter: ChoiceMeter, waits: bool) -> None:
        """`waits`: as in ReasoningReader."""
        prompt = job.prompts[job.prompt_of(index)]
        generation, reasoning = job.generations[index], job.reasoning
        self._meter = meter
        self._job = job
        self._generation = generation
        self._echo = prompt.echo
        self._is_begun = False
        self._num_known = len(generation.emitted)  # tokens that come first, and were counted when they were generated
        self._reader = OutputReader(
            tokenizer.detokenizer(job.visible_controls, prompt.before, reasoning.hidden if reasoning else ()),
            StopStrings(job.stop_strings),
            generation.stop_token_ids,
            with_logprobs=generation.num_logprobs is not None,
            reasoning=new_reader(reasoning, prompt.reasoning, waits=waits) if reasoning else None,
            text_offset=len(self._echo.text) if self._echo else 0,
        )
        self._calls = None
        if job.tools and job.tools.format.call:
            is_trusted = generation.grammar is not None and job.tools.format.is_enforced
            self._calls = CallReader(
                job.tools, f"{job.call_seed} {index}", is_trusted=is_trusted, begins=job.form is not None
            )
        # A grammar that also allows calls or reasoning lets JSON's strings have control characters.
        is_json = job.form is not None and job.form.kind in ("json_schema", "json_object")
        self._json_text = JsonText() if is_json and (reasoning or job.tools) else None

    def read(self, tokens: Tokens) -> Iterator[OutputDelta]:
        if not self._is_begun:
            self._is_begun = True
            yield from _prompt_pieces(self._generation, self._echo, tokens.prompt_logprobs)
        if self._job.is_prompt_only:
            piece = OutputDelta("", finish_reason=tokens.finish_reason and "length", timing=tokens.timing)
        else:
            piece = self._reader.read(tokens)
        num_known = min(self._num_known, len(piece.token_ids))
        self._num_known -= num_known
        if num_known:
            self._meter.skip_tokens()
        self._meter.add_tokens(len(piece.token_ids) - num_known)
        if piece.finish_reason is not None:
            self._meter.finish(piece.finish_reason)
            if piece.timing is not None and tokens.finish_reason is None:  # a stop string: the ring reports no timing
                piece = replace(piece, timing=replace(piece.timing, decode_s=self._meter.decode_s))
            if not (isinstance(piece.stop, str) or piece.stop in self._job.stop_token_ids):
                piece = replace(piece, stop=None)
        for part in self._calls.read(piece) if self._calls else (piece,):
            if self._json_text is not None:
                part = replace(part, text=self._json_text.push(part.text, is_last=part.finish_reason is not None))
            yield part


def _prompt_pieces(
    generation: TokenizedRequest, echo: Echo | None, logprobs: Sequence[TokenLogprobs] | None
) -> Iterator[OutputDelta]:
    """Yields the prompt: its text if it is echoed, its tokens if their log-probabilities are requested."""
    if generation.num_prompt_logprobs is None:
        if echo is not None:
            yield OutputDelta(echo.text)
        return
    ids = generation.prompt_ids
    if logprobs is None or len(logprobs) != len(ids) - 1:
        raise ValueError(f"the first tokens must come with log-probabilities of all {len(ids)} prompt tokens but one")
    for start in range(0, len(ids), _PROMPT_TOKENS_AT_ONCE):
        tokens = tuple(
            ShownToken(ids[at], logprobs[at - 1] if at else None, min(echo.offsets[at], len(echo.text)) if echo else 0)
            for at in range(start, min(start + _PROMPT_TOKENS_AT_ONCE, len(ids)))
        )
        if echo is None:
            yield OutputDelta("", prompt_tokens=tokens)
        else:
            yield OutputDelta("" if start else echo.text, shown_tokens=tokens)
