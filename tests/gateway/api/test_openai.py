"""Chats and completions only: chunks, several prompts, log-probabilities, echo, and the official client."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.answer.choice_text import ShownToken
from gateway.api.openai.answers import ChatLogprobs, TextLogprobs
from gateway.errors import ApiError
from gateway.request.rules import check_num_logprobs
from gateway.request.types import GenerateRequest
from tests.support.adapters import APIS
from tests.support.api_server import ANSWER, SERVED, Served
from tests.support.fake_engine_client import TIMING, Script, likely
from tests.support.rest_adapters import read_events
from tests.support.tiny_tokenizer import END
from tests.support.words import HELLO, TOOLS
from wire.logprobs import TokenLogprobs

CHAT, TEXT = APIS["chat"].body({}), APIS["completions"].body({})
PATHS = {"chat/completions": CHAT, "completions": TEXT}
CALLING: Any = {"messages": HELLO, "tools": APIS["chat"].body({"tools": TOOLS})["tools"], "model": SERVED}


def ask(served: Served, path: str = "completions", stream: bool = False, **fields: Any) -> list[Any]:
    """The answer, or its stream's events except the last."""
    answer = served.http.post(f"/v1/{path}", json={**PATHS[path], "stream": stream, **fields})
    assert answer.status_code == 200, answer.text
    if not stream:
        return [answer.json()]
    *events, last = read_events(answer.text)
    assert last == "[DONE]"
    return events


def read_columns(events: Sequence[Any], index: int = 0) -> dict[str, list[Any]]:
    """The log-probabilities of a completion's choice, whole or streamed."""
    columns = defaultdict[str, list[Any]](list)
    for event in events:
        for choice in event["choices"]:
            for name, column in (choice["logprobs"] or {}).items() if choice["index"] == index else ():
                columns[name] += column
    return dict(columns)


# -- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_streamed_choices_come_as_they_are_ready(served: Served, path: str) -> None:
    served.engine.reset(served.script(ANSWER, delay_s=0.001))
    events = ask(served, path, stream=True, n=3)
    indices = [event["choices"][0]["index"] for event in events]
    assert indices != sorted(indices)
    if path == "chat/completions":
        roles = [at for at, event in enumerate(events) if "role" in event["choices"][0]["delta"]]
        assert roles == sorted(indices.index(index) for index in range(3))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_the_prompt_and_how_likely_they_are(served: Served, path: str, stream: bool) -> None:
    """They are in the prompt's first choice, which begins with them; a chat has them beside its choices."""
    more = {} if stream else {"prompt_logprobs": 1}
    events = ask(served, path, stream, return_token_ids=True, n=2, **more)
    ids = list(served.engine.sent[0]["prompt_ids"])
    assert {event["system_fingerprint"] for event in events} == {events[0]["system_fingerprint"]} != {""}
    places = events if path != "completions" else [choice for event in events for choice in event["choices"]]
    assert next(place["prompt_token_ids"] for place in places if place.get("prompt_token_ids")) == ids
    if stream:
        return
    told = next(place["prompt_logprobs"] for place in places if place.get("prompt_logprobs"))
    truth = likely(ids[1:], 1)
    assert told[0] is None
    for token_id, one, true in zip(ids[1:], told[1:], truth, strict=True):
        assert one[str(token_id)]["logprob"] == true.logprob
        assert set(one) == {str(token_id), *map(str, true.top_ids)}


# -- several prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts(served: Served, stream: bool) -> None:
    texts = [f"answer {index}" for index in range(6)]
    served.engine.reset(Script(), *map(served.script, texts))
    outcome = APIS["completions"].send(
        served, {**TEXT, "prompt": ["one", "two", "three"], "n": 2, "seed": 2**64 - 1}, stream
    )
    assert sorted(outcome.texts) == texts
    by_id = sorted(served.engine.sent, key=lambda sent: int(sent["request_id"].rsplit("-", 1)[1]))
    prompts = [tuple(served.ids(text)) for text in ("one", "one", "two", "two", "three", "three")]
    assert [sent["prompt_ids"] for sent in by_id] == prompts
    assert [sent["seed"] for sent in by_id] == [2**64 - 1, 0] * 3
    assert outcome.usage == (sum(map(len, prompts[::2])), served.engine.num_given, 3 * TIMING.cached_tokens)
    assert served.engine.admitted == [6]
    assert len({sent["request_id"] for sent in by_id}) == 6
    served.engine.reset(served.script(ANSWER))
    ask(served, prompt=["x"] * 64, n=2)
    assert len({sent["seed"] for sent in served.engine.sent}) == 128, "without a seed, each has its own"


# -- log-probabilities -----------------------------------------------------------------------------------------------


def token_name(served: Served, token_id: int) -> str:
    raw = served.tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def test_what_is_impossible_is_a_number_too() -> None:
    """JSON has no infinity."""
    token = ShownToken(5, TokenLogprobs(-math.inf, (6, 7), (-0.5, -math.inf)), 0)
    chat, text = ChatLogprobs(), TextLogprobs()
    for logprobs in (chat, text):
        logprobs.extend([token], lambda token_id: b"%d" % token_id)
    assert json.loads(bytes(chat.content[0]))["logprob"] == -9999
    assert text.token_logprobs == [-9999]
    assert json.loads(bytes(text.top_logprobs[0] or b"")) == {"6": -0.5, "7": -9999, "5": -9999}


def test_more_log_probabilities_than_memory_may_hold_are_refused() -> None:
    raw = GenerateRequest("m", [], num_logprobs=20, logprobs_param="top_logprobs")
    check_num_logprobs(raw, 1, 10**9)  # bounded by the context
    check_num_logprobs(raw, 2, 2**21 // 21)
    check_num_logprobs(GenerateRequest(None, [], n=17), 17, 17 << 17)  # none are asked for
    with pytest.raises(ApiError, match="lower max_tokens") as caught:
        check_num_logprobs(raw, 2, 2**21 // 21 + 1)
    assert caught.value.param == "top_logprobs"


def test_an_answer_cut_by_a_stop_string_has_timing_and_cached_tokens(served: Served) -> None:
    served.engine.reset(served.script("one two STOP", ends=False, is_hanging=True, delay_s=0.005))
    (answer,) = ask(served, stop="STOP", include_timing=True)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == TIMING.cached_tokens
    assert 0.005 < answer["choices"][0]["timing"]["decode_seconds"] != TIMING.decode_s


# -- echo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"logprobs": 0}])
def test_echo_of_texts(served: Served, stream: bool, more: dict[str, Any]) -> None:
    prompts = ["<|end|>one 🙂", "two"]
    body = {**TEXT, "prompt": prompts, "n": 2, "echo": True, "stop": "one", **more}
    outcome = APIS["completions"].send(served, body, stream)
    assert outcome.texts == [f"{prompts[0]}{ANSWER}"] * 2 + [f"{prompts[1]}{ANSWER}"] * 2


def test_a_prompts_tokens_behind_ill_formed_bytes_begin_behind_them(served: Served) -> None:
    prompt = [served.ids("🙂")[0], *served.ids("ok")]
    (choice,) = ask(served, prompt=prompt, echo=True, logprobs=0, max_tokens=1)[0]["choices"]
    assert choice["text"].startswith("\ufffdok") and choice["logprobs"]["text_offset"][:2] == [0, 1]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_a_prompt_as_lm_eval_asks_for_them(served: Served, max_tokens: int, stream: bool) -> None:
    prompts = [served.ids("hello 🙂 world"), served.ids("the quick")]
    events = ask(served, stream=stream, prompt=prompts, echo=True, logprobs=1, temperature=0, max_tokens=max_tokens)
    if not stream:
        (answer,) = events
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        text = answer["choices"][1]["text"]
        assert text.startswith("the quick") and (max_tokens or text == "the quick")
    answered = list(served.engine.script.token_ids)[:max_tokens]
    for index, ids in enumerate(prompts):
        told = read_columns(events, index)
        assert told["tokens"] == [token_name(served, token_id) for token_id in [*ids, *answered]]
        assert told["token_logprobs"] == [None, *(token.logprob for token in likely([*ids[1:], *answered], 1))]
        assert told["top_logprobs"][0] is None
        scores, tops = told["token_logprobs"][2:-1], told["top_logprobs"][2:-1]  # the columns that lm-eval reads
        greedy = [score == max(top.values()) for score, top in zip(scores, tops, strict=True)]
        assert greedy == [token_id % 2 == 1 for token_id in [*ids, *answered][2:-1]]
        assert told["text_offset"] == sorted(told["text_offset"])
    assert {sent["num_prompt_logprobs"] for sent in served.engine.sent} == {1}
    assert {sent["max_tokens"] for sent in served.engine.sent} == {max(max_tokens, 1)}


# -- where a prompt ends and its answer continues --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "ids", "ids behind control tokens"])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_first_space_is_the_answers(sentence: Served, kind: str, echo: bool, stream: bool) -> None:
    text, answer = "hello world", " how are you"
    ids = sentence.tokenizer.encode(text, add_special_tokens=True)
    answered = sentence.ids(text + answer)[len(sentence.ids(text)) :]
    sentence.engine.reset(Script([*answered, min(sentence.tokenizer.eos_token_ids)]))
    prompt = {"text": text, "ids": ids, "ids behind control tokens": [*ids, END, END, END]}[kind]
    events = ask(sentence, prompt=prompt, echo=echo, logprobs=0, stream=stream)
    whole, told = "".join(event["choices"][0]["text"] for event in events), read_columns(events)
    assert whole == (text if echo else "") + answer
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert whole[offset:].startswith(token) or offset in (0, len(whole)) or token.startswith("<|")
    assert "".join(told["tokens"][-len(answered) - 1 : -1]) == answer
    assert told["text_offset"][-len(answered) - 1] == len(whole) - len(answer)
    sentence.engine.reset(sentence.script("how are you"))
    assert ask(sentence, prompt=[END])[0]["choices"][0]["text"] == "how are you", "behind no text it begins one"
