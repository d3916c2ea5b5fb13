"""The offline entry: answers of the demo model, more prompts than rows, and prompts that do not fit."""

from typing import Any

import pytest

from demo.paths import TARGET_DIR
from engine.llm import LLM


def test_answers_in_order_and_as_alone() -> None:
    llm = LLM(str(TARGET_DIR), max_running=2, context_tokens=128)
    questions = ["What is 12 plus 30?", "What is the capital of France?", "What is 3 plus 4?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    template: Any = llm.tokenizer.apply_chat_template
    prompts = [template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    answers = llm.generate(prompts, max_tokens=40)
    for answer, word in zip(answers, ("42", "Paris", "7"), strict=True):
        assert word in answer
    assert [llm.generate([prompt], max_tokens=40)[0] for prompt in prompts] == answers
    assert len(llm._free_pages) == llm.engine.num_pages and len(llm._free_rows) == 2
    with pytest.raises(ValueError, match="a prompt of 1 tokens and 128 of the answer"):
        llm.generate([[5]])
