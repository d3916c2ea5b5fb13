"""Texts to vectors, scores and classes, for every API: `embed` is the one way to ask for them.

A text is a request of its own in the router, with its place, its attempts and its share; a request has many.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gateway.access.keys import Key
from gateway.answer.choices import Hold, note_failure
from gateway.answer.merged_streams import MergedStreams
from gateway.errors import ApiError, bad_request, check_count
from gateway.metrics import ChoiceMeter
from gateway.request import rules
from gateway.request.prepare import ServedModel
from gateway.router.engine_client import DEFAULT_PRIORITY, TokenizedRequest
from gateway.text.offload import Check
from gateway.text.tokenizer import Tokenizer
from wire.pooling import RERANK_INSTRUCTION, Pooling, Task
from wire.sampling import SamplingParams

MAX_TEXTS = 2048  # of a request, as in OpenAI's API
MAX_TEXT_BYTES = 1 << 20  # of a text that is cut; others have as many as fit the model (request/rules.py)
MAX_ALL_BYTES = 8 << 20  # of all texts, where a query counts with each document: a body need not be that large
AT_ONCE = 64  # texts that are tokenised before we look whether the client still waits
NO_SAMPLING = SamplingParams(temperature=0.0)

Floats = NDArray[np.float32]
Text = str | Sequence[int] | tuple[str, str]  # a text, its token ids, or a query and a document


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """A client's request for vectors, scores or classes. None: not given."""

    model: str | None
    texts: Sequence[Text]
    params: Sequence[str]  # the field of each text, for errors
    tasks: Sequence[Task] = ("embed",)  # what the model is to be made for
    dimensions: int | None = None  # the first so many numbers of each vector
    truncate: int | None = None  # cut longer texts to so many tokens; -1: to what the model takes
    prompt_name: str | None = None  # of a prompt of the model's that goes before each text
    instruction: str | None = None  # for pairs, where the model takes one
    cache_salt: str = ""
    priority: int | None = None
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors, or logits of classes, in the order of the texts."""

    model: str  # its name, as the request has it
    rows: list[Floats]
    num_tokens: int


def find_pooling(served: ServedModel, name: str, tasks: Sequence[Task]) -> Pooling:
    """Raises ApiError that says what the model is, if it is for something else."""
    pooling = served.tokenizer.pooling
    if pooling is None:
        message = f"the model {name} answers prompts and makes no embeddings; send them to /v1/chat/completions"
        raise bad_request(message, "model", "unsupported_model")
    if pooling.task not in tasks:
        raise bad_request(f"the model {name} makes {pooling.describe()}", "model", "unsupported_model")
    return pooling


async def embed(
    served: ServedModel, raw: EmbedRequest, request_id: str, arrived_s: float, key: Key, hold: Hold | None = None
) -> Embedded:
    """`arrived_s`: by time.perf_counter; `hold`: of a line of a batch, as of answers. Raises ApiError."""
    try:
        key.allowance.check(time.perf_counter(), key.name)
        name = served.names.check(raw.model)
        pooling = find_pooling(served, name, raw.tasks)
        _check(raw, pooling, served.tokenizer)
        num_chars = sum(sum(map(len, one)) if isinstance(one, tuple) else len(one) for one in raw.texts)
        ids = await served.offload.run(
            num_chars, lambda check: _encode(raw, pooling, served.tokenizer, check), key.name
        )
        num_tokens = sum(map(len, ids))
        key.allowance.begin(time.perf_counter(), key.name, num_tokens)
    except ApiError as error:
        note_failure(served, error, request_id, key.name)
        raise
    wanted = [_build(raw, served, name, key, one, request_id, at, arrived_s) for at, one in enumerate(ids)]
    rows = await _run(served, wanted, arrived_s, key, num_tokens, hold)
    if raw.dimensions is not None:
        rules.check_range("dimensions", raw.dimensions, 1, len(rows[0]))
        rows = [_shorten(row, raw.dimensions, pooling) for row in rows]
    return Embedded(name, rows, num_tokens)


def _check(raw: EmbedRequest, pooling: Pooling, tokenizer: Tokenizer) -> None:
    """Checks the rules that need no tokens. Raises ApiError."""
    most, param = tokenizer.context_tokens - 1, raw.params[0].partition("[")[0] if raw.params else "input"
    if not raw.texts:
        raise bad_request(f"{param} is empty; send at least one text", param)
    check_count(param, len(raw.texts), MAX_TEXTS, "texts")
    check_count("cache_salt", len(raw.cache_salt), rules.MAX_CACHE_SALT_CHARS, "characters")
    if raw.truncate not in (None, -1):
        rules.check_range("truncate_prompt_tokens", raw.truncate, 1, most)
    if raw.prompt_name is not None and raw.prompt_name not in pooling.prompts:
        listed = ", ".join(pooling.prompts) or "none"
        raise bad_request(f"prompt_name is {raw.prompt_name[:40]!r}; the model has {listed}", "prompt_name")
    if raw.priority is not None:
        rules.check_range("priority", raw.priority, 0, rules.LAST_PRIORITY)
    if raw.deadline_ms is not None:
        rules.check_range("deadline_ms", raw.deadline_ms, 1, rules.MAX_DEADLINE_MS)
    num_left = MAX_ALL_BYTES
    for text, own in zip(raw.texts, raw.params, strict=True):
        if not text or (isinstance(text, tuple) and not all(text)):
            raise bad_request(f"{own} is empty; leave it out", own)
        if isinstance(text, str | tuple):
            num_bytes = len((text if isinstance(text, str) else "".join(text)).encode(errors="replace"))
            if raw.truncate is None:
                rules.check_text_bytes(num_bytes, own, tokenizer.context_tokens)
            check_count(own, num_bytes, MAX_TEXT_BYTES, "bytes")
            num_left -= num_bytes
            if num_left < 0:
                both = "; the query counts with each document" if isinstance(text, tuple) else ""
                raise bad_request(f"the texts up to {own} have more than {MAX_ALL_BYTES >> 20} MiB{both}", param)
        else:
            rules.check_vocabulary(text, own, tokenizer.vocab_size)


def _encode(raw: EmbedRequest, pooling: Pooling, tokenizer: Tokenizer, check: Check) -> list[Sequence[int]]:
    """Token ids of each text. Raises ApiError for one that is too long."""
    most = tokenizer.context_tokens - 1
    cut = None if raw.truncate is None else most if raw.truncate == -1 else raw.truncate
    before = pooling.prompts.get(raw.prompt_name or pooling.default_prompt, "")
    found: list[Sequence[int]] = []
    for start in range(0, len(raw.texts), AT_ONCE):
        check()
        some = raw.texts[start : start + AT_ONCE]
        texts = [(before + one,) if isinstance(one, str) else one for one in some if isinstance(one, str | tuple)]
        if pooling.prompt and any(len(one) == 2 for one in texts):
            encoded = iter(_fill(pooling.prompt, raw.instruction, texts, tokenizer, cut))
        else:
            encoded = iter(tokenizer.encode_cut([tuple(map(str, one)) for one in texts], cut))
        found += [next(encoded) if isinstance(one, str | tuple) else one[:cut] for one in some]
    for ids, param in zip(found, raw.params, strict=True):
        if not 1 <= len(ids) <= most:
            advice = "shorten it, or let truncate_prompt_tokens cut it" if ids else "it must have at least one"
            message = f"{param} has {len(ids)} tokens; the model takes texts of 1 to {most}: {advice}"
            raise bad_request(message, param, "context_length_exceeded")
    return found


def _fill(
    prompt: Sequence[str], instruction: str | None, pairs: Sequence[tuple[str, ...]], tokenizer: Tokenizer,
    cut: int | None,
) -> list[list[int]]:  # fmt: skip
    """Pairs in the model's prompt, whose middle is tokenised alone and cut, as where it was trained."""
    around = [tokenizer.encode(part, add_special_tokens=False) for part in (prompt[0], prompt[2])]
    room = None if cut is None else max(cut - sum(map(len, around)), 0)
    texts = []
    for query, document in pairs:
        given = {"instruction": instruction or RERANK_INSTRUCTION, "query": query, "document": document}
        texts.append(re.sub(r"\{(\w+)\}", lambda match, given=given: given[match[1]], prompt[1]))  # type: ignore[misc]
    middles = tokenizer.encode_all(texts, add_special_tokens=False)
    return [[*around[0], *middle[:room], *around[1]] for middle in middles]


def _build(
    raw: EmbedRequest, served: ServedModel, name: str, key: Key, ids: Sequence[int], request_id: str, at: int,
    arrived_s: float,
) -> TokenizedRequest:  # fmt: skip
    priority = key.order(raw.priority)
    return TokenizedRequest(
        request_id=f"{request_id}-{at}",
        prompt_ids=tuple(ids),
        max_tokens=1,
        sampling=NO_SAMPLING,
        stop_token_ids=frozenset(),
        cache_salt=key.salted(raw.cache_salt) if served.options.salts_by_key else raw.cache_salt,
        priority=DEFAULT_PRIORITY if priority is None else priority,
        age_s=time.perf_counter() - arrived_s,
        deadline_s=None if raw.deadline_ms is None else raw.deadline_ms / 1000,
        call=request_id,
        owner=key.name,
        adapter=name if name in served.names.adapters else "",
    )


async def _run(
    served: ServedModel, wanted: Sequence[TokenizedRequest], arrived_s: float, key: Key, num_tokens: int,
    hold: Hold | None,
) -> list[Floats]:  # fmt: skip
    """Computes a row of numbers for each text. The first text that fails ends the others."""
    rows: dict[int, Floats] = {}
    meters = [ChoiceMeter(served.metrics, arrived_s, one.owner, is_live=False) for one in wanted]
    held: Callable[[int], None] = lambda count: served.waiting.add(key.name, count)  # noqa: E731
    try:
        served.check_share(key.name, len(wanted))
        held(len(wanted))
        with served.ring.admit(len(wanted)) as admitted:
            served.metrics.prompt_tokens.inc(num_tokens)
            streams = [served.ring.generate(one, admitted) for one in wanted]
            async with MergedStreams([hold(stream) for stream in streams] if hold else streams) as merged:
                while len(rows) < len(wanted):
                    index, tokens = await merged.next()
                    if tokens is None or not tokens.vector:
                        raise ApiError(500, "a worker made no vector; try again", None, "incomplete_answer")
                    rows[index] = np.frombuffer(tokens.vector, "<f4")
                    await merged.close(index)
                    held(-1)
                    meters[index].finish("stop")
    except BaseException as error:
        note_failure(served, error, wanted[0].request_id, key.name)
        if isinstance(error, ApiError) and not rows:
            key.allowance.give_back(num_tokens)
        for meter in meters if not isinstance(error, ApiError) else ():
            meter.cancel()
        raise
    finally:
        held(len(rows) - len(wanted))
    return [rows[at] for at in range(len(wanted))]


def _shorten(row: Floats, dimensions: int, pooling: Pooling) -> Floats:
    """A Matryoshka vector's first numbers, as long as the whole was where that is 1."""
    part = row[:dimensions]
    return part / max(float(np.linalg.norm(part)), 1e-12) if pooling.normalizes else part


def activate(logits: Floats, pooling: Pooling) -> Floats:
    """[L] logits of classes |-> [L] what clients get of them."""
    if pooling.activation == "softmax":
        powers = np.exp(logits - logits.max())
        found: Floats = powers / powers.sum()
    else:
        found = (1 / (1 + np.exp(-logits)) if pooling.activation == "sigmoid" else logits).astype(np.float32)
    return found


async def score(
    served: ServedModel, raw: EmbedRequest, pairs: Sequence[tuple[str, str]], request_id: str, arrived_s: float,
    key: Key, hold: Hold | None = None,
) -> tuple[list[float], Embedded]:  # fmt: skip
    """How much the texts of each pair have to do with each other; of a model for embeddings, the cosine.

    `raw.texts` is left out.
    """
    pooling = find_pooling(served, served.names.check(raw.model), ("score", "embed"))
    if pooling.task == "embed":
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        asked = replace(raw, texts=texts, params=[raw.params[0]] * len(texts), tasks=("embed",))
        found = await embed(served, asked, request_id, arrived_s, key, hold)
        row_of = {
            text: row / max(float(np.linalg.norm(row)), 1e-12) for text, row in zip(texts, found.rows, strict=True)
        }
        return [float(row_of[one] @ row_of[other]) for one, other in pairs], found
    asked = replace(raw, texts=pairs, tasks=("score",))
    found = await embed(served, asked, request_id, arrived_s, key, hold)
    return [float(activate(row, pooling)[0]) for row in found.rows], found
