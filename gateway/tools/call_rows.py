"""How grammars write each dialect's calls: one row of data for each that can be enforced, beside its format's.

The texts are those of the models' own chat templates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SPACE, NUMBER = "␣", "#"  # in texts: perhaps a space; a call's number
NAME = "NAME"  # in texts: the function's name


@dataclass(frozen=True, slots=True)
class CallRow:
    """`before`, then of each call `begin ARGUMENTS end`, with `separator` between two, and `after`."""

    begin: str
    end: str
    separator: str = ""
    before: str = ""
    after: str = ""
    writing: str = ""  # of arguments that are not JSON: a name of decode_worker/grammar/writings.py
    is_single: bool = False  # the answer ends with its first call
    # Around text that is no call. Answers do not show these tokens, unless the reader needs them.
    answer_begin: str = ""
    answer_end: str = ""
    after_thought: str = ""  # what opens the message after the one that reasons; "": a line break or two
    preamble_begin: str = ""  # of a message before one that calls; it ends as one that reasons does
    controls: tuple[str, ...] = ()  # tokens that no text holds


_OBJECT = '{"name": "NAME", "arguments": '
CALL_ROWS: Mapping[str, CallRow] = {
    "hermes": CallRow(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", "\n"),
    "inline": CallRow(f"<tool_call>{_OBJECT}", "}</tool_call>"),
    "qwen-xml": CallRow(
        "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "\n", writing="qwen-xml"
    ),
    "glm": CallRow("<tool_call>NAME", "</tool_call>", "\n", writing="glm"),
    "minimax": CallRow(
        '<invoke name="NAME">\n', "</invoke>\n",
        before="<minimax:tool_call>\n", after="</minimax:tool_call>", writing="minimax",
    ),
    "deepseek-v3": CallRow(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
        before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v31": CallRow(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
    ),
    "kimi": CallRow(
        "<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>", "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
    ),
    "harmony": CallRow(  # a stop token, <|call|> or <|return|>, ends the answer
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "",
        is_single=True, answer_begin="<|channel|>final<|message|>", after_thought="<|start|>assistant",
        preamble_begin="<|channel|>commentary<|message|>",
        controls=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    ),
    "gemma4": CallRow("<|tool_call>call:NAME", "<tool_call|>", writing="gemma"),
    "olmo": CallRow(
        "NAME(", ")", "\n", before="<function_calls>", after="</function_calls>", writing="call"
    ),
    "lfm2": CallRow(
        "NAME(", ")", ", ",
        before="<|tool_call_start|>[", after="]<|tool_call_end|>", writing="python",
    ),
    "phi4": CallRow(_OBJECT, "}", ", ", before="<|tool_call|>[", after="]<|/tool_call|>"),
    "granite": CallRow(_OBJECT, "}", ", ", before="<|tool_call|>[", after="]"),
    "nemotron": CallRow(_OBJECT, "}", ", ", before="<TOOLCALL>[", after="]</TOOLCALL>"),
    "cohere": CallRow(
        '\n    {"tool_call_id": "#", "tool_name": "NAME", "parameters": ', "}", ",",
        before="<|START_ACTION|>[", after="\n]<|END_ACTION|>",
        answer_begin="<|START_RESPONSE|>", answer_end="<|END_RESPONSE|>",
    ),
    "mistral": CallRow(_OBJECT, "}", ", ", before=f"[TOOL_CALLS]{SPACE}[", after="]"),
    "mistral-args": CallRow("[TOOL_CALLS]NAME[ARGS]", ""),
    "llama3": CallRow('{"name": "NAME", "parameters": ', "}", "; "),
}  # fmt: skip
