"""Values of all processes: to messages and back, field by field, and the names of pages."""

import codecs
import math
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import decode_pb2, kv_pb2, prefill_pb2
from wire.files import read_json_object
from wire.logprobs import TokenLogprobs
from wire.messages import (
    pack_decode_timing,
    pack_logprobs,
    pack_sampling,
    pack_tokens,
    unpack_decode_timing,
    unpack_logprobs,
    unpack_prefill_timing,
    unpack_sampling,
    unpack_tokens,
)
from wire.page_keys import KEY_BYTES, next_key, page_keys, root_key
from wire.sampling import LEAST_TEMPERATURE, SCALARS, SamplingParams
from wire.timing import ReadTokens, Timing

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
PENALTY = st.floats(allow_nan=False, allow_infinity=False)
TOKEN = st.integers(0, 2**31 - 1)
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 1e300),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 2**32 - 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**64 - 1),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "repetition_penalty": st.floats(0, 1e300, exclude_min=True),
    "logit_bias": st.lists(st.tuples(TOKEN, FLOAT32), max_size=4).map(tuple),
}
OF_DECODE = (
    "grammar_s",
    "prefill_s", "first_step_s", "decode_s", "cached_tokens", "read_tokens", "draft_tokens",
    "accepted_tokens", "steps", "preemptions",
)  # fmt: skip
OF_PREFILL = ("prefill_s", "transfer_s", "transfer_bytes", "transport", "cached_tokens", "read_tokens")
READ = ReadTokens(1, 2, 3)
OF_GATEWAY = ("wake_s", "queue_s", "attempts", "prefill_reason")


def default(name: str, of: type[Any] = Timing) -> Any:
    return next(field.default for field in fields(of) if field.name == name)


def test_every_sampling_parameter_is_tried() -> None:
    assert set(SAMPLING) == {field.name for field in fields(SamplingParams)}
    assert {*SCALARS, "logit_bias"} == set(SAMPLING)


@given(st.builds(SamplingParams, **SAMPLING))
def test_sampling_there_and_back(params: SamplingParams) -> None:
    message = decode_pb2.SamplingParams.FromString(pack_sampling(params).SerializeToString())
    assert unpack_sampling(message) == params


def test_a_message_with_nothing_set_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="top_p is 0"):
        unpack_sampling(decode_pb2.SamplingParams())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf]),
        ("top_p", [0.0, 1.1, math.nan]),
        ("top_k", [-1]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("seed", [-1, 2**64]),
        ("frequency_penalty", [math.nan, -math.inf]),
        ("presence_penalty", [math.nan, math.inf]),
        ("repetition_penalty", [0.0, -1.0, math.nan, math.inf]),
        ("logit_bias", [((-1, 1.0),), ((1, math.nan),), ((0, 0.0), (1, math.inf))]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            replace(SamplingParams(), **{name: value})


def test_greedy_and_penalties_are_seen() -> None:
    greedy = [SamplingParams(temperature=value).is_greedy for value in (0.0, LEAST_TEMPERATURE / 2, LEAST_TEMPERATURE)]
    assert greedy == [True, True, False]
    assert not SamplingParams().has_penalties
    penalties = [SamplingParams(repetition_penalty=0.5), SamplingParams(frequency_penalty=0.5)]
    assert all(params.has_penalties for params in [*penalties, SamplingParams(presence_penalty=0.5)])


@given(FLOAT32, st.lists(st.tuples(TOKEN, FLOAT32), max_size=5))
def test_logprobs_there_and_back(logprob: float, top: list[tuple[int, float]]) -> None:
    one = TokenLogprobs(logprob, tuple(token for token, _ in top), tuple(likely for _, likely in top))
    assert unpack_logprobs(decode_pb2.TokenLogprobs.FromString(pack_logprobs(one).SerializeToString())) == one


def test_every_field_of_a_timing_has_an_owner() -> None:
    assert {*OF_DECODE, *OF_PREFILL, *OF_GATEWAY} == {field.name for field in fields(Timing)}


@pytest.mark.parametrize("name", [field.name for field in fields(Timing)])
def test_decode_tells_its_own_timing(name: str) -> None:
    value: Any = {"transport": "shm", "read_tokens": READ}.get(name, 7)
    timing = replace(Timing(), **{name: value})
    assert timing != Timing()
    assert unpack_decode_timing(pack_decode_timing(timing)) == (timing if name in OF_DECODE else Timing())


def test_prefill_tells_its_own_timing() -> None:
    response = prefill_pb2.RunResponse(
        queue_seconds=1.0, prefill_seconds=2.0, transfer_seconds=4.0, transfer_bytes=5, transport="shm",
        cached_tokens=6, read_tokens=kv_pb2.ReadTokens(files=1, prefill=2, decode=3),
    )  # fmt: skip
    timing = unpack_prefill_timing(response)
    assert timing == Timing(
        prefill_s=3.0, transfer_s=4.0, transfer_bytes=5, transport="shm", cached_tokens=6, read_tokens=READ
    )
    changed = {field.name for field in fields(Timing) if getattr(timing, field.name) != default(field.name)}
    assert changed == set(OF_PREFILL)


@given(st.lists(TOKEN))
def test_tokens_are_packed_little_endian_and_come_back(tokens: list[int]) -> None:
    packed = pack_tokens(np.array(tokens, np.int32))
    assert packed == struct.pack(f"<{len(tokens)}i", *tokens)
    found = unpack_tokens(packed)
    assert found.dtype == np.int32 and found.tolist() == tokens


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_part_of_a_token_is_refused(size: int) -> None:
    with pytest.raises(ValueError):
        unpack_tokens(bytes(size))


TOKENS = st.lists(st.integers(0, 2), max_size=14)


def keys_of(tokens: list[int], page_tokens: int, model: str = "m", salt: str = "") -> list[bytes]:
    return list(page_keys(root_key(model, salt), pack_tokens(np.array(tokens, np.int32)), page_tokens))


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_prompts_share_keys_exactly_as_far_as_they_share_whole_pages(
    one: list[int], other: list[int], page_tokens: int
) -> None:
    first, second = keys_of(one, page_tokens), keys_of(other, page_tokens)
    assert len(first) == len(one) // page_tokens
    assert all(len(key) == KEY_BYTES for key in first)
    assert len(set(first)) == len(first), "each page of a prompt has its own key"
    for at in range(min(len(first), len(second))):
        end = (at + 1) * page_tokens
        assert (first[at] == second[at]) == (one[:end] == other[:end])


def test_model_salt_and_parent_keep_keys_apart() -> None:
    tokens = [1, 2, 3, 4]
    roots = [("m", ""), ("n", ""), ("m", "s"), ("m", "t"), ("ms", ""), ("", "ms"), ("m", "\udc80")]
    found = [keys_of(tokens, 2, *root) for root in roots]
    assert len({key for keys in found for key in keys}) == 2 * len(roots)
    packed = pack_tokens(np.array(tokens[2:], np.int32))
    assert next_key(found[0][0], packed) == found[0][1] != next_key(root_key("m", ""), packed)


def test_a_byte_order_mark_belongs_to_no_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(codecs.BOM_UTF8 + b'{"a": 1}')
    assert read_json_object(path) == {"a": 1}
