"""How models write calls of functions: one row of data for each dialect.

The gateway reads and enforces calls by it (gateway/tools), the decode worker writes arguments by it
(decode_worker/grammar/writings.py). The texts are those of the models' own chat templates.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

# In texts:
NAME, ARGUMENTS = "@NAME", "@ARGS"  # the function's
SPACE, BREAK = "␣", "␤"  # perhaps a space, or a line break
NUMBER = "#"  # the call's

Style = Literal["json", "xml", "python", "gemma"]


@dataclass(frozen=True, slots=True)
class Writing:
    """Arguments that are not JSON: `begin`, then `key NAME key_end VALUE value_end` of each, and `end`."""

    style: Style
    key: str = ""
    key_end: str = ""
    json_end: str = ""  # in place of `key_end` before values that are not text; "": the schema tells
    value_end: str = ""
    separator: str = ""  # between two
    begin: str = ""
    end: str = ""
    # Strings are text as it is, in which this never occurs; else they are JSON, as all other values are.
    closer: str = ""
    quotes: str = ""  # around such text
    is_deep: bool = False  # objects and strings within values are written so, too
    is_sorted: bool = False  # arguments stand in the order of their names
    names: str = r"[\w.$-]+"  # expression: those that it can write
    words: tuple[tuple[str, str], ...] = ()  # for JSON's


@dataclass(frozen=True)
class Format:
    """`before`, then of each call `call`, with `between` two of them, and `after`.

    This is what grammars allow. Readers allow whitespace wherever JSON does and for that of the texts, and do without
    what ends calls.
    """

    name: str
    call: str  # with NAME and ARGUMENTS; its first line opens calls where there is no `before`
    between: str = ""
    before: str = ""
    after: str = ""
    writing: Writing | None = None  # of arguments; None: JSON
    is_enforced: bool = True  # there are grammars of it
    # An answer may begin with a call without opener, which grammars write so. In other places this is one.
    bare_opener: str = ""
    id_marker: str = ""  # before an optional id, between name and arguments
    num_id_chars: int = 0  # of ids that the template accepts; 0: any
    id_form: str = ""  # of ids in history: with {name} and {index}
    ends: tuple[str, ...] = ()  # tokens that end an answer, besides the checkpoint's
    has_channels: bool = False  # calls stand in messages of harmony
    has_one_call: bool = False  # templates take one call a message
    takes_text: bool = False  # the template wants arguments as JSON text; found out by gateway/tools/dialect.py
    is_single: bool = False  # the answer ends with its first call
    # Around text that is not a call. Answers do not show these tokens, unless the reader needs them.
    answer_begin: str = ""
    answer_end: str = ""
    after_thought: str = ""  # what opens the message after the one that reasons; "": a line break or two
    preamble_begin: str = ""  # of a message before one that calls; it ends as one that reasons does
    controls: tuple[str, ...] = ()  # tokens that no text holds

    @cached_property
    def begin(self) -> str:
        """The text of a call up to its arguments."""
        return self.call.partition(ARGUMENTS)[0]

    @cached_property
    def end(self) -> str:
        return self.call.partition(ARGUMENTS)[2]

    @property
    def lead(self) -> str:
        """The text of a call up to its name, or to the bracket of the object that has the name."""
        before, bracket, _ = self.begin.partition(NAME)[0].partition("{")
        return before + bracket

    @property
    def is_object(self) -> bool:
        """A call is a JSON object with name and arguments."""
        return f'"{NAME}"' in self.call and "{" in self.call

    @property
    def is_list(self) -> bool:
        return self.before.endswith("[")

    @property
    def style(self) -> Style:
        return self.writing.style if self.writing else "json"

    @cached_property
    def opener(self) -> str:
        """The text that begins calls, up to a line break or a bracket."""
        begin = self.bare_opener or self.before.removesuffix("[") or self.lead.removesuffix("{")
        return begin.partition("\n")[0].removesuffix(SPACE)

    @cached_property
    def closer(self) -> str:
        """The text that ends calls; parsers do without it."""
        own = self.end.lstrip("}").strip()
        if self.style == "xml":
            own = own.partition("\n")[2]
        return self.after.strip().removeprefix("]") or ("" if self.before else own)

    @cached_property
    def markers(self) -> frozenset[str]:
        """Texts that may hold control tokens, which the detokenizer must show."""
        own = self.writing
        inner = (own.key, own.key_end, own.json_end, own.value_end, own.quotes) if own else ()
        outer = (self.begin, self.end) if not self.is_object else ()
        texts = "\n".join((self.opener, self.closer, self.id_marker, *outer, *inner))
        return frozenset(part for part in re.split(f"{NAME}|[{BREAK}{NUMBER}`\n ]", texts) if len(part) > 1)


# What a template that shows tools, but none of the rows, gets: no calls are read, none can be enforced.
PLAIN = Format("plain", "", is_enforced=False)

_OBJECT = '{"name": "@NAME", "arguments": @ARGS}'
_DSML = "｜DSML｜"
_CALL = Writing("python", key_end="=", separator=", ", names=r"[A-Za-z_]\w*")  # f(a=1, b="c")
_PYTHON = Writing(
    "python", key_end="=", separator=", ", names=_CALL.names,
    words=(("true", "True"), ("false", "False"), ("null", "None")),
)  # fmt: skip

FORMATS: Mapping[str, Format] = {
    item.name: item
    for item in (
        # Qwen 2.5 and 3, Hermes, SmolLM3, EXAONE 4, Granite 4
        Format("hermes", f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n"),
        # the same in one line: the demo model
        Format("inline", f"<tool_call>{_OBJECT}</tool_call>"),
        # Qwen3-Coder, Qwen 3.5, Nemotron 3
        Format(
            "qwen-xml", "<tool_call>\n<function=@NAME>\n@ARGS</function>\n</tool_call>", "\n",
            writing=Writing("xml", "<parameter=", ">\n", "", "\n</parameter>\n", closer="</parameter>"),
        ),
        # GLM-4.5 to 4.7
        Format(
            "glm", "<tool_call>@NAME@ARGS</tool_call>", "\n", ends=("<|observation|>",),
            writing=Writing(
                "xml", "<arg_key>", "</arg_key>␤<arg_value>", "", "</arg_value>␤", begin=BREAK, closer="</arg_value>"
            ),
        ),
        # MiniMax M2
        Format(
            "minimax", '<invoke name="@NAME">\n@ARGS</invoke>\n',
            before="<minimax:tool_call>\n", after="</minimax:tool_call>",
            writing=Writing("xml", '<parameter name="', '">', "", "</parameter>\n", closer="</parameter>"),
        ),
        # DeepSeek V3.2
        Format(
            "deepseek-v32", f'<{_DSML}invoke name="@NAME">\n@ARGS</{_DSML}invoke>\n',
            before=f"<{_DSML}function_calls>\n", after=f"</{_DSML}function_calls>", is_enforced=False,
            writing=Writing(
                "xml", f'<{_DSML}parameter name="', '" string="true">', '" string="false">', f"</{_DSML}parameter>\n",
                closer=f"</{_DSML}parameter>",
            ),
        ),
        # DeepSeek V3 and R1
        Format(
            "deepseek-v3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>@NAME\n```json\n@ARGS\n```<｜tool▁call▁end｜>", "\n",
            before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
        ),
        # DeepSeek V3.1
        Format(
            "deepseek-v31", "<｜tool▁call▁begin｜>@NAME<｜tool▁sep｜>@ARGS<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
        ),
        # Kimi K2
        Format(
            "kimi", "<|tool_call_begin|>functions.@NAME:#<|tool_call_argument_begin|>@ARGS<|tool_call_end|>",
            before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
            id_marker=":", id_form="functions.{name}:{index}",
        ),
        # gpt-oss; gateway/tools/reasoning.py brings headers into this form, and a stop token ends the answer
        Format(
            "harmony", "<|channel|>commentary to=functions.@NAME <|constrain|>json<|message|>@ARGS",
            id_marker="<|constrain|>", ends=("<|call|>", "<|return|>"),
            has_channels=True, has_one_call=True, is_single=True,
            answer_begin="<|channel|>final<|message|>", after_thought="<|start|>assistant",
            preamble_begin="<|channel|>commentary<|message|>",
            controls=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
        ),
        # Gemma 4
        Format(
            "gemma4", "<|tool_call>call:@NAME@ARGS<tool_call|>", ends=("<|tool_response>",),
            writing=Writing(
                "gemma", key_end=":", separator=",", begin="{", end="}", closer='<|"|>', quotes='<|"|>',
                is_deep=True, is_sorted=True,
            ),
        ),
        # OLMo 3
        Format("olmo", "@NAME(@ARGS)", "\n", before="<function_calls>", after="</function_calls>", writing=_CALL),
        # LFM2
        Format(
            "lfm2", "@NAME(@ARGS)", ", ", before="<|tool_call_start|>[", after="]<|tool_call_end|>", writing=_PYTHON
        ),
        # Phi-4-mini
        Format("phi4", _OBJECT, ", ", before="<|tool_call|>[", after="]<|/tool_call|>"),
        # Granite 3
        Format("granite", _OBJECT, ", ", before="<|tool_call|>[", after="]"),
        # Nemotron-H, Nemotron Nano 2
        Format("nemotron", _OBJECT, ", ", before="<TOOLCALL>[", after="]</TOOLCALL>"),
        # Command R7B, Command A
        Format(
            "cohere", '\n    {"tool_call_id": "#", "tool_name": "@NAME", "parameters": @ARGS}', ",",
            before="<|START_ACTION|>[", after="\n]<|END_ACTION|>",
            answer_begin="<|START_RESPONSE|>", answer_end="<|END_RESPONSE|>",
        ),
        # Mistral's tokenizers up to version 7
        Format("mistral", _OBJECT, ", ", before=f"[TOOL_CALLS]{SPACE}[", after="]", num_id_chars=9),
        # from version 11 on: Magistral, Ministral 3
        Format("mistral-args", "[TOOL_CALLS]@NAME[ARGS]@ARGS", id_marker="[CALL_ID]", num_id_chars=9),
        # Llama 3.1 to 3.3
        Format(
            "llama3", '{"name": "@NAME", "parameters": @ARGS}', "; ", bare_opener="<|python_tag|>",
            has_one_call=True, ends=("<|eom_id|>",),
        ),
        # Llama 4
        Format(
            "llama4", "@NAME(@ARGS)", ", ", before="[", after="]<|python_end|>", bare_opener="<|python_start|>",
            writing=_PYTHON, is_enforced=False,
        ),
    )
}  # fmt: skip
