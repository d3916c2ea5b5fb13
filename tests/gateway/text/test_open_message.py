"""A conversation with an open last message: the prompt ends where the answer continues it."""

from pathlib import Path

import pytest

from gateway.text.detokenize import last_with_text
from gateway.text.tokenizer import TemplateRefusalError, Tokenizer
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, write_byte_level, write_sentencepiece

ASKED = {"role": "user", "content": "Paris is?"}
START = "<|user|>Paris is?<|end|><|assistant|>"
TRIMMING = CHAT_TEMPLATE.replace("m.content", "m.content | trim")
WITH_BLOCK = CHAT_TEMPLATE.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)
CUTTING = CHAT_TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
REFUSING = "{% if messages[-1].role != 'user' %}{{ raise_exception('ask first') }}{% endif %}" + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_level(tmp_path_factory.mktemp("tiny")))


def render(tokenizer: Tokenizer, template: str, text: str) -> str:
    tokenizer._hf.chat_template = template
    return tokenizer.render_chat([ASKED, {"role": "assistant", "content": text}], is_open=True)


@pytest.mark.parametrize(
    ("template", "text", "end"),
    [
        (CHAT_TEMPLATE, "a city", "a city"),
        (CHAT_TEMPLATE, " a city \n", " a city \n"),
        (CHAT_TEMPLATE, "Paris is?", "Paris is?"),  # the same as for another message
        (CHAT_TEMPLATE, "<|end|>", "<|end|>"),
        (CHAT_TEMPLATE, "", ""),
        (CHAT_TEMPLATE, " \n", ""),
        (TRIMMING, " a city \n", "a city"),
        (TRIMMING, "", ""),
        (WITH_BLOCK, "a city", "<think>\n\n</think>\n\na city"),
        (CUTTING, "a city", "a city"),
    ],
)
def test_the_prompt_ends_with_the_open_message(tokenizer: Tokenizer, template: str, text: str, end: str) -> None:
    assert render(tokenizer, template, text) == START + end


@pytest.mark.parametrize(
    ("template", "text", "why"),
    [
        (CUTTING, "<think>a town?</think>a city", "drops or changes the text of the last message"),
        (CHAT_TEMPLATE.replace("m.content", "'...'"), "a city", "drops or changes"),
        (REFUSING, "a city", "ask first"),
    ],
)
def test_a_template_may_not_leave_it_open(tokenizer: Tokenizer, template: str, text: str, why: str) -> None:
    with pytest.raises(TemplateRefusalError, match=why) as refused:
        render(tokenizer, template, text)
    assert "Paris" not in str(refused.value)


def test_the_answer_goes_on_with_its_text(tmp_path: Path) -> None:
    """A sentencepiece decoder would drop the first space of an answer that begins a text."""
    tokenizer = Tokenizer(write_sentencepiece(tmp_path))
    prompt = tokenizer.render_chat([ASKED, {"role": "assistant", "content": "hello"}], is_open=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer = tokenizer.encode("world", add_special_tokens=False)  # the normaliser puts a space before it
    assert tokenizer.detokenizer().push(answer) == "world"
    assert tokenizer.detokenizer(before=last_with_text(tokenizer, ids)).push(answer) == " world"
