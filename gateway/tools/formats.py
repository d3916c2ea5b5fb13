"""Formats of tool calls, and which one a chat template uses. `parse.py` reads them, `grammar.py` enforces them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Form = Literal["object", "array", "named"]


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write calls.

    object: `opener {"name": NAME, "arguments": {...}} closer`, each call with its own opener.
    array: `opener [{"name": NAME, "arguments": {...}}, ...]`.
    named: `opener NAME args_marker {...}`, each call with its own opener.
    Parsers allow whitespace wherever JSON does and around markers; grammars allow exactly this text.
    """

    name: str
    form: Form
    opener: str  # its first character occurs in it once
    closer: str = ""  # first character as above; optional for parsers at the end of the text
    arguments_key: str = "arguments"
    layout: str = ""  # text that the model writes after the opener and before the closer
    separator: str = ""  # text that it writes between calls
    # An answer may begin with a call without opener; more calls follow after ";". The grammar writes this form.
    is_bare: bool = False
    args_marker: str = ""
    id_marker: str = ""  # before an optional id, between name and args_marker
    num_id_chars: int = 0  # of ids that the template accepts; 0: any

    @property
    def markers(self) -> frozenset[str]:
        """Texts that may be control tokens, which the detokenizer must show."""
        return frozenset({self.opener, self.closer, self.args_marker, self.id_marker} - {""})


_HERMES = Format("hermes", "object", "<tool_call>", "</tool_call>", layout="\n", separator="\n")
_INLINE = Format("inline", "object", "<tool_call>", "</tool_call>")
_LLAMA3 = Format("llama3", "object", "<|python_tag|>", arguments_key="parameters", separator="; ", is_bare=True)
_MISTRAL = Format("mistral", "array", "[TOOL_CALLS]", separator=", ", num_id_chars=9)
_MISTRAL_ARGS = Format(
    "mistral-args", "named", "[TOOL_CALLS]", args_marker="[ARGS]", id_marker="[CALL_ID]", num_id_chars=9
)

FORMATS: Mapping[str, Format] = {
    item.name: item
    for item in (
        _HERMES,  # Qwen 2.5 and 3, Hermes
        _INLINE,  # the same in one line: the demo model
        _LLAMA3,  # Llama 3.1 to 3.3
        _MISTRAL,  # Mistral's tokenizers up to version 7
        _MISTRAL_ARGS,  # from version 11 on
    )
}


def resolve_format(setting: str, template: str) -> Format | None:
    """The format named by `setting`; None for "none"; for "auto" the chat template's, or None if it shows none."""
    if setting != "auto":
        return FORMATS.get(setting)
    if not re.search(r"\btools\b", template):
        return None
    if _MISTRAL.opener in template:
        return _MISTRAL_ARGS if _MISTRAL_ARGS.args_marker in template else _MISTRAL
    if _HERMES.opener in template and re.search(r'"arguments\\?"', template):  # others fill <tool_call> with XML
        return _INLINE if f"{_INLINE.opener}{{" in template else _HERMES
    return _LLAMA3 if "<|start_header_id|>" in template and '"parameters": ' in template else None
