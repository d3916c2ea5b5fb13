"""From the ring's tokens to the choices of a request, piece by piece. Must not know REST or gRPC."""

import asyncio
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import structlog

from gateway.answer.calls import CallReader
from gateway.answer.choice_text import Piece, PieceReader, ShownToken
from gateway.answer.merge import MergedStreams
from gateway.errors import ApiError
from gateway.metrics import ChoiceMeter
from gateway.request.job import Echo, Job
from gateway.request.prepare import ServedModel
from gateway.request.raw import RawRequest
from gateway.request.record import ReadHeaders, RequestRecord, open_record
from gateway.router.engine_client import TokenizedRequest, Tokens
from gateway.text.stops import StopStrings
from gateway.text.tokenizer import Tokenizer
from gateway.tools.json_text import JsonText
from gateway.tools.reasoning_reader import ReasoningReader
from wire.logprobs import TokenLogprobs
from wire.timing import Timing

_log = structlog.get_logger()

_PROMPT_TOKENS_AT_ONCE = 512  # writing them blocks the event loop, up to 30 us each


class Totals:
    """A job and its token counts so far. `stream_choices` counts each piece before it yields it."""

    def __init__(self, job: Job, arrived_s: float, record: RequestRecord | None = None) -> None:
        """`arrived_s`: when the request arrived, by time.perf_counter; `record`: for its trace, if there is to be."""
        self.job = job
        self.arrived_s = arrived_s
        self.record = record
        self.num_prompt = job.num_prompt_tokens
        self.num_completion = 0
        self.num_reasoning = 0  # of num_completion
        self.num_cached = 0  # prompt tokens whose KV was cached
        self.num_open = len(job.generations)  # unfinished choices

    def add(self, index: int, piece: Piece) -> None:
        self.num_completion += len(piece.token_ids)
        self.num_reasoning += piece.num_reasoning_tokens
        self.num_open -= piece.finish_reason is not None
        if piece.timing is not None and index % self.job.num_per_prompt == 0:  # each prompt counts once
            self.num_cached += piece.timing.cached_tokens
        if self.record is not None and piece.ending is not None:
            self.record.endings[index] = piece.ending

    def log(self, event: str, **fields: object) -> None:
        _log.info(
            event,
            choices=len(self.job.generations),
            prompt_tokens=self.num_prompt,
            tokens=self.num_completion,
            **fields,
        )


def timing_fields(timing: Timing, names: Iterable[str]) -> dict[str, Any]:
    """Where a choice's time went, by clients' `names`, which end in `_seconds` where ours end in `_s`."""
    return {name: getattr(timing, name.replace("_seconds", "_s")) for name in names}


async def begin(
    served: ServedModel, raw: RawRequest, request_id: str, arrived_s: float, headers: ReadHeaders
) -> Totals:
    """Checks a request, for `stream_choices`. Raises ApiError.

    `arrived_s`: as in Totals; `headers`: returns the request's.
    """
    record = open_record(served.write_record, raw, served.names.listed[0], request_id, arrived_s, headers)
    try:
        return Totals(await served.prepare(raw, request_id), arrived_s, record)
    except BaseException as error:
        if record is not None:
            record.close(error)
        raise


async def stream_choices(served: ServedModel, totals: Totals) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yields (index of its choice, piece) as pieces arrive. Closing this iterator closes the ring's.

    Raises the ring's ApiError: the first choice that fails ends the others.
    """
    job = totals.job
    served.metrics.prompt_tokens.inc(totals.num_prompt)
    meters = [ChoiceMeter(served.metrics, totals.arrived_s) for _ in job.generations]
    choices = [_Choice(job, index, served.tokenizer, meter) for index, meter in enumerate(meters)]
    try:
        with _recorded(totals), served.ring.admit(len(choices)) as admitted:
            new_attempts = totals.record.add_choice if totals.record else lambda: None
            streams = [served.ring.generate(generation, admitted, new_attempts()) for generation in job.generations]
            async with MergedStreams(cast("Sequence[AsyncGenerator[Tokens, None]]", streams)) as merged:
                while totals.num_open:
                    index, tokens = await merged.next()
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
    except (CancelledError, GeneratorExit):
        for meter in meters:
            meter.cancel()
        if totals.num_open:
            totals.log("cancelled")
        raise


@contextmanager
def _recorded(totals: Totals) -> Iterator[None]:
    """Around the answer: in the end its record is written, if there is one."""
    if totals.record is None:
        yield
        return
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error if totals.num_open else None  # else the client left with the whole answer
        raise
    finally:
        totals.record.note_usage(totals.num_prompt, totals.num_cached, totals.num_completion)
        totals.record.close(failure)


class _Choice:
    """Reads one choice's tokens."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer, meter: ChoiceMeter) -> None:
        prompt = job.prompts[job.prompt_of(index)]
        generation, reasoning = job.generations[index], job.reasoning
        self._meter = meter
        self._job = job
        self._generation = generation
        self._echo = job.echoes[job.prompt_of(index)]
        self._is_begun = False
        self._reader = PieceReader(
            tokenizer.detokenizer(job.visible_controls, prompt.before),
            StopStrings(job.stop_strings),
            generation.stop_token_ids,
            with_logprobs=generation.num_logprobs is not None,
            reasoning=ReasoningReader(reasoning, is_inside=prompt.reasoning == "inside") if reasoning else None,
            text_offset=len(self._echo.text) if self._echo else 0,
        )
        is_trusted = generation.grammar is not None
        self._calls = CallReader(job.tools, is_trusted=is_trusted, is_json=job.is_json) if job.tools else None
        self._json_text = JsonText() if job.is_json and reasoning and not job.tools else None

    def read(self, tokens: Tokens) -> Iterator[Piece]:
        if not self._is_begun:
            self._is_begun = True
            yield from _prompt_pieces(self._generation, self._echo, tokens.prompt_logprobs)
        piece = _without_text(tokens) if self._job.is_prompt_only else self._reader.read(tokens)
        self._meter.add_tokens(len(piece.token_ids))
        if piece.finish_reason is not None:
            self._meter.finish(piece.finish_reason)
            piece = self._finished(piece, tokens)
        if self._json_text is not None:
            piece = replace(piece, text=self._json_text.push(piece.text))
        yield from self._calls.read(piece) if self._calls else (piece,)

    def _finished(self, piece: Piece, tokens: Tokens) -> Piece:
        if piece.timing is not None and tokens.finish_reason is None:  # a stop string: the ring reports no final timing
            piece = replace(piece, timing=replace(piece.timing, decode_s=self._meter.decode_s))
        is_named = isinstance(piece.stop, str) or piece.stop in self._job.stop_token_ids
        return piece if is_named else replace(piece, stop=None)


def _without_text(tokens: Tokens) -> Piece:
    """The piece for a request that wants only its prompt."""
    return Piece("", finish_reason=None if tokens.finish_reason is None else "length", timing=tokens.timing)


def _prompt_pieces(
    generation: TokenizedRequest, echo: Echo | None, logprobs: Sequence[TokenLogprobs] | None
) -> Iterator[Piece]:
    """Yields the prompt: its text if it is echoed, its tokens if their log-probabilities are requested."""
    if generation.num_prompt_logprobs is None:
        if echo is not None:
            yield Piece(echo.text)
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
            yield Piece("", prompt_tokens=tokens)
        else:
            yield Piece("" if start else echo.text, shown_tokens=tokens)
