"""Rules for what an answer must match: from the client's form to a `Grammar`, the same for REST and gRPC. Pure.

Checks sizes and JSON; the decode worker checks whether a schema, expression or grammar is valid.
"""

import json
import re
from collections.abc import Mapping, Sequence

import pydantic_core

from gateway.errors import bad_request, check_count
from gateway.request.raw import AnswerForm
from gateway.router.engine_client import Grammar
from gateway.tools.json_schema import check_enforced

MAX_GRAMMAR_BYTES = 64 * 2**10


def check_form(form: AnswerForm | None) -> Grammar | None:
    """Returns the grammar that the client asks for, if any. Raises ApiError naming the field."""
    if form is None:
        return None
    if form.kind == "json_object":
        return Grammar("json_object", "", form.param)
    if form.kind == "json_schema":
        return _schema_grammar(form)
    if form.kind == "choice":
        return Grammar("ebnf", _checked(_one_of(form.value, form.param), form.param), form.param)
    if not form.value:
        raise bad_request(f"{form.param} is empty", form.param)
    return Grammar("regex" if form.kind == "regex" else "ebnf", _checked(form.value, form.param), form.param)


def _schema_grammar(form: AnswerForm) -> Grammar:
    """Of a schema, which the client sends as an object or as text."""
    schema, param = form.value, form.param
    try:
        value = pydantic_core.from_json(_checked(schema, param)) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise bad_request(f"{param} must be a JSON schema, which is an object", param, "invalid_type")
        text = _checked(json.dumps(value, ensure_ascii=False, allow_nan=False), param)
    except ValueError as error:
        raise bad_request(f"{param} is not valid JSON: {str(error)[:200]}", param) from error
    return Grammar("json_schema", text, param, check_enforced(value, param, is_strict=form.is_strict))


def _one_of(texts: Sequence[str], param: str) -> str:
    """A grammar that matches exactly these texts."""
    check_count(param, sum([len(text.encode()) for text in texts]), MAX_GRAMMAR_BYTES, "bytes")
    if not texts or not all(texts):
        raise bad_request(f"{param} must hold at least one text, and none that is empty", param)
    return "root ::= " + " | ".join(f'"{_escaped(text)}"' for text in texts)


def _escaped(text: str) -> str:
    return re.sub(r'["\\\x00-\x1f\x7f]', lambda found: f"\\u{ord(found[0]):04x}", text)


def _checked(text: str, param: str) -> str:
    check_count(param, len(text.encode()), MAX_GRAMMAR_BYTES, "bytes")
    if "\0" in text:
        raise bad_request(f"{param} holds a NUL character", param)
    return text
