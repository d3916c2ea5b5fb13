"""Options that clients pass to the chat template: accepted names and values; the service's own cannot be overridden."""

import inspect

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.errors import ApiError
from gateway.tools.template_options import MAX_INTEGER, RESERVED, check_options

NO_OPTIONS: list[object] = [[], {}, float("nan"), float("inf"), MAX_INTEGER + 1]
HELLO = [{"role": "user", "content": "hello"}]


def test_scalars_are_taken() -> None:
    kinds = {"enable_thinking": False, "budget": 512, "hint": 0.5, "date": "today", "level": None}
    for given in ({}, kinds, {"n": MAX_INTEGER, "m": -MAX_INTEGER}, {f"name{rank}": rank for rank in range(32)}):
        assert check_options(given, "chat_template_kwargs") == given


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, ""),
        ([], ""),
        ({f"name{rank}": rank for rank in range(33)}, ""),
        *(({"a": value}, ".a") for value in NO_OPTIONS),
        *(({name: None}, f".{name}") for name in ("messages", "tools", "chat_template", "tokenize")),
        *(({name: "x"}, "") for name in ("", "a b", "__class__", "é", "a" * 65)),
        ({"bos_token": ""}, ".bos_token"),
        ({"a": "x" * 4096}, ""),
    ],
)
def test_others_are_refused(given: object, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_options(given, "chat_template_kwargs")
    assert (refused.value.status, refused.value.param) == (400, f"chat_template_kwargs{param}")


def test_nothing_of_the_services_own_can_be_set() -> None:
    """These are transformers' parameters; a newer version may have more."""
    functions = (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template)
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    assert taken <= RESERVED
    assert all(name.endswith("_token") for name in PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES)
