"""Formats of tool calls: one row of data for each. `parse.py` reads them, `grammar.py` enforces them.

`dialect.py` finds out which one a chat template shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Form = Literal["object", "array", "named", "list", "plain"]
Style = Literal["json", "gemma", "python", "xml"]


@dataclass(frozen=True, slots=True)
class Parameters:
    """One argument in XML: `begin KEY between VALUE end`. Its type is the schema's, unless `between` tells it."""

    begin: str
    between: tuple[str, ...]  # one, or two: before a text, and before other JSON
    end: str
    after: str  # ends all arguments


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write calls.

    object: `opener {"name": NAME, "arguments": {...}} closer`, each call with its own opener.
    array: `opener [{"name": NAME, "arguments": {...}}, ...] closer`.
    named: `opener`, calls, `closer`; each call is `call NAME args_marker ARGUMENTS call_end`. Without a closer, each
    call has its own opener.
    list: `opener [NAME(key=VALUE, ...), ...] closer`.
    plain: calls are not known; all is text.
    A line break in a marker is optional. Parsers allow whitespace wherever JSON does and around markers; grammars allow
    exactly this text.
    """

    name: str
    form: Form
    opener: str  # its first character occurs in it once
    closer: str = ""  # first character as above; parsers do without it
    name_key: str = "name"
    arguments_key: str = "arguments"
    layout: str = ""  # text that the model writes after the opener and before the closer
    # An answer may begin with a call without opener; more calls follow after ";". The grammar writes this form.
    is_bare: bool = False
    call: str = ""
    args_marker: str = ""
    id_marker: str = ""  # before an optional id, between name and args_marker
    call_end: str = ""
    style: Style = "json"  # of named arguments
    parameters: Parameters | None = None  # of XML
    num_id_chars: int = 0  # of ids that the template accepts; 0: any
    id_form: str = ""  # of ids in history: with {name} and {index}
    ends: tuple[str, ...] = ()  # tokens that end an answer, besides the checkpoint's
    has_channels: bool = False  # calls stand in messages of harmony
    has_one_call: bool = False  # templates take one call a message
    takes_text: bool = False  # the template wants arguments as JSON text; found out by dialect.py

    @property
    def markers(self) -> frozenset[str]:
        """Texts that may hold control tokens, which the detokenizer must show."""
        given = self.parameters
        inner = (given.begin, *given.between, given.end, given.after) if given else ()
        own = (self.opener, self.closer, self.call, self.args_marker, self.id_marker, self.call_end, *inner)
        return frozenset({*own, _GEMMA_QUOTE if self.style == "gemma" else ""} - {""})

    @property
    def bare_begin(self) -> str:
        """The first character of a call without opener; empty if that is any."""
        return {"object": "{", "list": "["}.get(self.form, "")


_GEMMA_QUOTE = '<|"|>'
# What a template that shows tools, but none of the rows, gets: no calls are read, none can be enforced.
PLAIN = Format("plain", "plain", "")

FORMATS: Mapping[str, Format] = {
    item.name: item
    for item in (
        # Qwen 2.5 and 3, Hermes, SmolLM3, EXAONE 4, Granite 4
        Format("hermes", "object", "<tool_call>", "</tool_call>", layout="\n"),
        # the same in one line: the demo model
        Format("inline", "object", "<tool_call>", "</tool_call>"),
        # Qwen3-Coder, Qwen 3.5, Nemotron 3
        Format(
            "qwen-xml",
            "named",
            "<tool_call>",
            "</tool_call>",
            layout="\n",
            call="<function=",
            args_marker=">",
            style="xml",
            parameters=Parameters("<parameter=", (">",), "</parameter>", "</function>"),
        ),
        # GLM-4.5 to 4.7
        Format(
            "glm",
            "named",
            "<tool_call>",
            style="xml",
            parameters=Parameters("<arg_key>", ("</arg_key>\n<arg_value>",), "</arg_value>", "</tool_call>"),
            ends=("<|observation|>",),
        ),
        # MiniMax M2
        Format(
            "minimax",
            "named",
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            call='<invoke name="',
            args_marker='">',
            style="xml",
            parameters=Parameters('<parameter name="', ('">',), "</parameter>", "</invoke>"),
        ),
        # DeepSeek V3.2
        Format(
            "deepseek-v32",
            "named",
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            call='<｜DSML｜invoke name="',
            args_marker='">',
            style="xml",
            parameters=Parameters(
                '<｜DSML｜parameter name="',
                ('" string="true">', '" string="false">'),
                "</｜DSML｜parameter>",
                "</｜DSML｜invoke>",
            ),
        ),
        # DeepSeek V3 and R1
        Format(
            "deepseek-v3",
            "named",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            args_marker="```json",
            call_end="```\n<｜tool▁call▁end｜>",
        ),
        # DeepSeek V3.1
        Format(
            "deepseek-v31",
            "named",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            call="<｜tool▁call▁begin｜>",
            args_marker="<｜tool▁sep｜>",
            call_end="<｜tool▁call▁end｜>",
        ),
        # Kimi K2
        Format(
            "kimi",
            "named",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            call="<|tool_call_begin|>functions.",
            id_marker=":",
            args_marker="<|tool_call_argument_begin|>",
            call_end="<|tool_call_end|>",
            id_form="functions.{name}:{index}",
        ),
        # gpt-oss; reasoning.py brings headers into this form
        Format(
            "harmony",
            "named",
            "<|channel|>commentary to=functions.",
            id_marker="<|constrain|>",
            args_marker="<|message|>",
            call_end="<|call|>",
            ends=("<|call|>", "<|return|>"),
            has_channels=True,
            has_one_call=True,
        ),
        # Gemma 4
        Format(
            "gemma4",
            "named",
            "<|tool_call>",
            "<tool_call|>",
            call="call:",
            style="gemma",
            ends=("<|tool_response>",),
        ),
        # OLMo 3
        Format("olmo", "named", "<function_calls>", "</function_calls>", style="python"),
        # LFM2
        Format("lfm2", "list", "<|tool_call_start|>", "<|tool_call_end|>", style="python"),
        # Phi-4-mini
        Format("phi4", "array", "<|tool_call|>", "<|/tool_call|>"),
        # Granite 3
        Format("granite", "array", "<|tool_call|>"),
        # Nemotron-H, Nemotron Nano 2
        Format("nemotron", "array", "<TOOLCALL>", "</TOOLCALL>"),
        # Command R7B, Command A
        Format(
            "cohere",
            "array",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            name_key="tool_name",
            arguments_key="parameters",
        ),
        # Mistral's tokenizers up to version 7
        Format("mistral", "array", "[TOOL_CALLS]", num_id_chars=9),
        # from version 11 on: Magistral, Ministral 3
        Format(
            "mistral-args", "named", "[TOOL_CALLS]", args_marker="[ARGS]", id_marker="[CALL_ID]", num_id_chars=9
        ),
        # Llama 3.1 to 3.3
        Format(
            "llama3",
            "object",
            "<|python_tag|>",
            arguments_key="parameters",
            is_bare=True,
            has_one_call=True,
            ends=("<|eom_id|>",),
        ),
        # Llama 4
        Format("llama4", "list", "<|python_start|>", "<|python_end|>", is_bare=True, style="python"),
    )
}  # fmt: skip
