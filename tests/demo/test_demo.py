"""The demo models: reproducible text, a lossless tokenizer, and sizes and answers as documented."""

import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from demo.corpus.dialogue import Dialogue, held_out_scenes, training_dialogue, training_dialogues
from demo.corpus.scene import Message, Scene, Tool, is_held_out_text
from demo.evaluate import held_out_cases, measure
from demo.paths import DRAFT_DIR, TARGET_DIR
from demo.tokens import SPECIAL_TOKENS, render
from tests.support.threads import one_thread

__all__ = ["one_thread"]  # a fixture

MAX_FILE_BYTES = 16_000_000
tokenizer: Any = AutoTokenizer.from_pretrained(TARGET_DIR)  # its types are narrower than its arguments


def num_parameters(directory: Path) -> int:
    weights = load_file(directory / "model.safetensors")
    return sum(weight.numel() for weight in weights.values())


def templated(dialogue: Dialogue, **options: bool) -> str:
    messages = [message.as_openai() for message in dialogue.messages]
    tools = [tool.as_openai() for tool in dialogue.tools] or None
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def scenes(seed: int, count: int) -> list[Scene]:
    return list(itertools.islice(held_out_scenes(Random(seed)), count))


def test_the_same_seed_gives_the_same_text() -> None:
    first, second = (list(itertools.islice(training_dialogues(Random(3)), 200)) for _ in range(2))
    assert first == second


def test_no_held_out_prompt_is_trained_on() -> None:
    asked = {"\n".join(scene.said()).casefold() for scene in scenes(5, 1000)}
    assert all(is_held_out_text(prompt) for prompt in asked)
    for dialogue in itertools.islice(training_dialogues(Random(6)), 2000):
        said = {m.content.casefold() for m in dialogue.messages if m.role in ("user", "tool")}
        assert not said & asked
        assert not any(is_held_out_text(text) for text in said)


def test_every_scene_accepts_its_own_answer() -> None:
    assert all(scene.is_right(scene.messages[-1].content) for scene in scenes(8, 500))


@given(st.text())
def test_the_tokenizer_loses_no_text(text: str) -> None:
    if not any(special in text for special in SPECIAL_TOKENS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_a_sum_is_seen_digit_by_digit() -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_render_is_what_the_template_writes() -> None:
    rng = Random(11)
    for dialogue in (training_dialogue(rng) for _ in range(300)):
        assert render(dialogue) == templated(dialogue)


def test_the_template_opens_the_answer_and_writes_calls_as_the_model_does() -> None:
    tool = Tool("get_weather", ("city",), "Get the weather.", ("unit",))
    question = Dialogue((Message("user", "What is the weather in Rome?"),), (tool,))
    text = templated(question, add_generation_prompt=True)
    assert "- get_weather(city, unit?): Get the weather.<|end|>" in text
    assert text.endswith("<|user|>What is the weather in Rome?<|end|><|assistant|>")
    arguments: object
    for arguments in ({"city": "Rome"}, json.dumps({"city": "Rome"})):
        call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        expected = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><|end|>'
        assert str(tokenizer.apply_chat_template(history, tokenize=False)).endswith(expected)


def test_the_models_are_as_small_as_promised() -> None:
    assert num_parameters(DRAFT_DIR) * 10 <= num_parameters(TARGET_DIR)
    for directory in (TARGET_DIR, DRAFT_DIR):
        assert (directory / "model.safetensors").stat().st_size <= MAX_FILE_BYTES
    assert (DRAFT_DIR / "tokenizer.json").read_bytes() == (TARGET_DIR / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("directory", [TARGET_DIR, DRAFT_DIR], ids=["target", "draft"])
def test_generation_ends_at_either_end_token(directory: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((directory / name).read_text())
        assert settings["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|end|>", "<|end_of_text|>"])


def test_most_held_out_prompts_are_answered_right_and_the_draft_mostly_agrees() -> None:
    cases = [case for case in held_out_cases(13, 48) if "stor" not in case.scene.kind]  # stories are long
    found = measure(TARGET_DIR, DRAFT_DIR, cases, limit=64)
    assert sum(outcome.is_right for outcome in found) >= 0.65 * len(found)
    assert sum(o.num_agreed for o in found) >= 0.6 * sum(o.num_tokens for o in found)
