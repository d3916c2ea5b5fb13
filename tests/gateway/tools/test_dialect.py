"""Each family's own words: what its chat template writes is found out, and read back equal however it is cut.

Templates named in TRL are real ones from PyPI's trl; the others are rebuilt (tests/support/chat_templates.py).
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import pytest

from gateway.tools import dialect
from gateway.tools.dialect import PROBES, find_dialect
from gateway.tools.parse import HELD_ARGUMENTS_CHARS, Arguments, CallBegin, CallParser, Content, Event
from gateway.tools.reasoning import REASONING_FORMATS, ChannelReader, new_reader
from runtime.config_parts import ToolFormat
from tests.support.chat_templates import LLAMA, REBUILT, downloaded, probes_of, rendered
from tests.support.chat_templates import TRL as TRL_PACKAGE
from tests.support.texts import joined, summary
from wire.dialects import FORMATS, PLAIN, Format

TRL = {  # template |-> the format that it shows
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_think": "qwen-xml",
    "qwen3_5_nothink": "qwen-xml",
    "qwen3_6": "qwen-xml",
    "qwen3_8": "qwen-xml",
    "nemotron_3_nano": "qwen-xml",
    "nemotron_3_5_lightning": "qwen-xml",
    "nemotron_3_ultra": "qwen-xml",
    "glm4moe": "glm",
    "deepseekv3": "deepseek-v3",
    "gptoss": "harmony",
    "gemma4": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "lfm2_2_5": "lfm2",
    "lfm2_2_5_v2": "lfm2",
    "lfm2_v2": "lfm2",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
}
LLAMA_CPP = {
    "Bielik-11B-v3.0-Instruct": "hermes",
    "Cohere2MoE": "cohere",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "LFM2.5-8B-A1B": "lfm2",
    "MiniMax-M2": "minimax",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-args",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen3-Coder": "qwen-xml",
    "StepFun3.5-Flash": "qwen-xml",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-v32",
    "google-gemma-4-31B-it": "gemma4",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral-args",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi",
    "openai-gpt-oss-120b": "harmony",
    "unsloth-mistral-Devstral-Small-2507": "mistral-args",
}
WITHOUT_TOOLS = ("deepseekv3", "deepseek-ai-DeepSeek-V3.1")  # templates that leave them out
CASES = [
    *(("trl", name, format) for name, format in TRL.items()),
    *(("llama.cpp", name, format) for name, format in LLAMA_CPP.items()),
    *(("rebuilt", name, name) for name in REBUILT),
]
ONE_CALL = [name for name, format in FORMATS.items() if format.has_one_call]
TURN_ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<turn|>",
        "<|observation|>",
        "<｜end▁of▁sentence｜>",
        "<eos>",
        "[e~[",
        "<SPECIAL_12>",
    ),
    *("<|end_of_text|>", "<|END_OF_TURN_TOKEN|>"),
)
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": ["number", "null"]},
    "sure": {"type": "boolean"},
    "more": {"$ref": "#/$defs/more"},
    "list": {"type": "array"},
    "any": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"more": {"type": "object"}}}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"get_weather": SCHEMA, "now": {}, "send-mail": {}}
PLAIN_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}  # as all templates take it
SHOWN: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string", "description": "the city"}}},
    "now": {},
    "send-mail": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {**PLAIN_SCHEMA, **schema}}}
    for name, schema in SHOWN.items()
]
NESTED = {"city": "Łódź 🙂", "days": -3, "share": 0.5, "sure": True, "more": {"k": [1, {"a": "}]"}]}, "list": ["x", 2]}
TEXTS = {"city": 'a "b"\nc </x> \\ {d}, [e](f=1) 🙂'}
Call = tuple[str, Mapping[str, Any]]


class Written(NamedTuple):
    """An answer as a template writes it."""

    text: str  # of the answer
    calls: Sequence[Call]
    lead: str


def source_of(kind: str, name: str) -> str:
    if kind == "rebuilt":
        return REBUILT[name]
    return downloaded(name, TRL_PACKAGE if kind == "trl" else LLAMA)


def write(source: str, format: Format, calls: Sequence[Call], lead: str = "") -> Written:
    """The rendered answer, without reasoning and the end of the turn."""
    takes_text = find_dialect(format.name, probes_of(source)).format.takes_text  # type: ignore[union-attr]
    listed = [
        {
            "id": format.id_form.format(name=name, index=index) or f"probe000{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments) if takes_text else arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": lead, "tool_calls": listed}
    last = {"role": "tool", "name": calls[-1][0], "tool_call_id": listed[-1]["id"], "content": "ok"}
    text = rendered(source, [{"role": "user", "content": "QUESTION"}, answer, last], *TOOLS)
    tail = text.rpartition("QUESTION")[2]
    if not format.has_channels:
        tail = tail[tail.find("<|im_start|>assistant\n") + 1 :] if "<|im_start|>assistant\n" in tail else tail
    return Written(_without_ends(tail, format, lead), calls, lead)


def _without_ends(tail: str, format: Format, lead: str) -> str:
    """From the lead or the first call on, up to the end of the last."""
    marks = [tail.find(mark) for mark in (format.opener, "<|start|>assistant", '{"name"', "[get_weather(", "[now(")]
    begin = min(mark for mark in marks if mark >= 0)
    if lead and 0 <= tail.find(lead) < begin:
        begin = tail.find(lead)
    ends = [at for end in (*TURN_ENDS, "<|start|>functions", "<|tool_response>") if (at := tail.find(end, begin)) >= 0]
    return tail[begin : min(ends)]


def read(format: Format, pieces: Sequence[str], is_trusted: bool = False) -> list[Event]:
    ids = (f"id{n}" for n in itertools.count())
    parser = CallParser(format, SCHEMAS, lambda: next(ids), is_trusted=is_trusted, schemas=SCHEMAS)
    channels = ChannelReader("possible") if format.has_channels else None
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(channels.push(piece).content if channels else piece)
    events += parser.push(channels.flush().content) if channels else []
    return joined(events + parser.flush())


def values(events: Sequence[Event]) -> tuple[str, list[Call]]:
    content, calls = summary(events)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


# Which format a template shows.


@pytest.mark.parametrize(("kind", "name", "format"), CASES)
def test_the_format_is_what_the_template_writes(kind: str, name: str, format: str) -> None:
    found = find_dialect("auto", probes_of(source_of(kind, name)))
    if name in WITHOUT_TOOLS:
        assert found == (None, "the chat template shows the model no tools")
        found = find_dialect(format, probes_of(source_of(kind, name)))
        assert found.why == "--tool-format says so"
    assert found.format is not None and found.format.name == format
    assert found.format.takes_text == (format in ("deepseek-v3", "deepseek-v31") and kind != "llama.cpp")


@pytest.mark.parametrize(
    ("setting", "texts", "name", "why"),
    [
        ("auto", [""], None, "shows the model no tools"),
        ("auto", ["tools: get_weather: Look up the weather."], "plain", "no way known here"),
        ("auto", ["Look up the weather. Respond with <|tool_call|> and a list."], "granite", "names its markers"),
        ("auto", ["Look up the weather. <tool_call><function=name></function></tool_call>"], "hermes", "names its"),
        ("none", ["Look up the weather. <|tool_call|>"], None, "says so"),
        ("plain", ["Look up the weather. <|tool_call|>"], "plain", "says so"),
        ("kimi", [""], "kimi", "says so"),
    ],
)
def test_what_is_said_of_other_templates(setting: str, texts: Sequence[str], name: str | None, why: str) -> None:
    found = find_dialect(setting, texts)
    assert (found.format and found.format.name) == name
    assert why in found.why


@pytest.mark.parametrize("name", ["llama3", "gemma", "gemma3", "phi3"])
def test_a_template_that_leaves_tools_out_shows_none(name: str) -> None:
    assert find_dialect("auto", probes_of(downloaded(name))) == (None, "the chat template shows the model no tools")


def test_a_template_that_only_speaks_of_calls() -> None:
    found = find_dialect("auto", probes_of(downloaded("ibm-granite-granite-3.3-2B-Instruct", LLAMA)))
    assert found == (FORMATS["granite"], "the chat template names its markers beside the tools")


@pytest.mark.parametrize(
    ("package", "name"),
    [
        (TRL_PACKAGE, "lfm2"),
        (TRL_PACKAGE, "muse_glimmer"),
        # the markers of another row are in their words about tools, but they write calls in another way
        (LLAMA, "MiniMax-M3"),
        (LLAMA, "unsloth-Apriel-1.5"),
        (LLAMA, "Kimi-K2-Thinking"),  # changes a list where there are calls, which transformers' sandbox refuses
    ],
)
def test_a_template_that_shows_tools_in_no_known_way_gets_the_default(package: str, name: str) -> None:
    assert find_dialect("auto", probes_of(downloaded(name, package))).format == PLAIN


def test_little_of_a_long_template_is_read() -> None:
    texts = ["Look up the weather. " + "".join(format.opener + format.closer for format in FORMATS.values())] * 4
    read_chars = 0

    class Counted(CallParser):
        def push(self, text: str) -> list[Event]:
            nonlocal read_chars
            read_chars += len(text)
            return super().push(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect, "CallParser", Counted)
        assert find_dialect("auto", [text + "<tool_call>" * 10**5 for text in texts]).format is not None
    assert 0 < read_chars <= 2 * 2048 * len(texts) * len(FORMATS)


def test_each_format_has_a_template_and_can_be_named() -> None:
    assert {format for _, _, format in CASES} == set(FORMATS)
    assert set(get_args(ToolFormat)) == {"auto", "none", "plain", *FORMATS}
    assert len(PROBES[-1]) == 1


# What a template writes is read back.


@pytest.mark.parametrize(("kind", "name", "format"), CASES)
def test_what_a_template_writes_is_read_back(kind: str, name: str, format: str) -> None:
    source, row = source_of(kind, name), FORMATS[format]
    texts = {"city": TEXTS["city"].replace("\\", "/")} if name in ("lfm2_2_5",) else TEXTS
    answers: list[list[Call]] = [
        [("get_weather", NESTED)],
        [("get_weather", texts)],
        [("now", {})],
        [("now", {}), ("now", {"any": "x"})],
    ]
    for calls in answers:
        if len(calls) > 1 and format in ONE_CALL:
            continue
        for lead in ("", "Let me look 🙂."):  # bare calls begin the answer, and harmony has messages for text
            if lead and (row.bare_opener or row.has_channels):
                continue
            text = write(source, row, calls, lead).text
            text = text if text.startswith(lead) else lead + text  # some templates leave it out
            for pieces in ([text], list(text)):
                for is_trusted in (False, True):
                    assert values(read(row, pieces, is_trusted)) == (lead, calls), text
            after = (
                f"{text}\n\nDone."
                if format != "harmony"
                else f"{text}<|start|>assistant<|channel|>final<|message|>Done."
            )
            assert values(read(row, list(after))) == values(read(row, [after]))
            assert values(read(row, [after]))[1] == calls
            assert values(read(row, [after]))[0].removeprefix(lead).strip() == "Done."


@pytest.mark.parametrize(("kind", "name", "format"), {case[2]: case for case in reversed(CASES)}.values())
def test_calls_are_read_alike_at_every_cut(kind: str, name: str, format: str) -> None:
    """Text before and after, nested objects, no arguments, several calls, characters beyond ASCII."""
    row = FORMATS[format]
    lead = "" if row.bare_opener or row.has_channels else "Let me look 🙂."
    calls: list[Call] = [("get_weather", {**NESTED, "any": "é\n<"}), ("now", {})]
    calls = calls[:1] if format in ONE_CALL else calls
    text = write(source_of(kind, name), row, calls, lead).text + " Done"
    text = text if text.startswith(lead) else lead + text  # some templates leave it out
    whole = read(row, [text])
    assert values(whole)[1] == calls
    for cut in range(1, len(text)):
        assert read(row, [text[:cut], text[cut:]]) == whole


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_a_call_that_is_cut_off_or_of_no_tool_is_content(format: Format) -> None:
    kind, name, _ = next(case for case in CASES if case[2] == format.name)
    source = source_of(kind, name)
    text = write(source, format, [("get_weather", {"city": "Rome", "days": 1})]).text
    inside = text.find("Rome") + 2
    for cut in range(len(text) - 1, inside, -1):  # the last character may be of a marker that ends nothing
        if not values(read(format, [text[:cut]]))[1]:
            break
    else:
        raise AssertionError("a call is whole before its arguments end")
    for end in (inside, cut):
        content, calls = summary(read(format, [text[:end]]))
        assert calls == [] and content.strip() and "Ro" in content
    other = text.replace("get_weather", "huh")
    content, calls = summary(read(format, [other]))
    assert calls == [] and "Rome" in content
    both = other + text if not format.bare_opener else text
    assert [name for name, _ in summary(read(format, [both]))[1]] == ["get_weather"]


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_a_malformed_call_is_content_and_the_next_one_is_read(format: Format) -> None:
    kind, name, _ = next(case for case in CASES if case[2] == format.name)
    calls: list[Call] = [("get_weather", {"days": 7777})]
    good = write(source_of(kind, name), format, calls).text
    for wrong in ("77-", "[7", "tru"):
        # in XML, what reads as no number is a text, which a call may well hold
        is_xml, begin = format.style == "xml", format.writing.key if format.writing else ""
        text = good.replace(begin, "<x") if is_xml else good.replace("7777", wrong)
        for pieces in ([text], list(text)):
            content, found = values(read(format, pieces))
            assert found == [] and content.strip()
        if not format.bare_opener and not (wrong == "[7" and format.style != "xml"):  # an open list takes what follows
            assert values(read(format, [text + good]))[1][-1:] == calls


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_a_call_inside_a_thought_is_none(format: Format) -> None:
    kind, name, _ = next(case for case in CASES if case[2] == format.name)
    call = write(source_of(kind, name), format, [("now", {})]).text
    thought = REASONING_FORMATS["harmony" if format.has_channels else "think"]
    final = "<|start|>assistant<|channel|>final<|message|>" if format.has_channels else ""
    inside = call.replace("<|start|>", "").replace("<|channel|>", "").replace("<|message|>", "").replace("<|call|>", "")
    text = f"{thought.begin}Perhaps {inside}?{thought.end}{final}No."
    for pieces in ([text], list(text)):
        reader = new_reader(thought, "possible")
        parts = [*map(reader.push, pieces), reader.flush()]
        assert "".join(part.reasoning for part in parts) == f"Perhaps {inside}?"
        parser = CallParser(format, SCHEMAS, lambda: "id", schemas=SCHEMAS)
        events = [event for part in parts for event in parser.push(part.content)] + parser.flush()
        assert joined(events) == [Content("No.")]


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_long_arguments_are_streamed_and_take_linear_time(format: Format) -> None:
    """Counted in characters that are held: none of 20 kB stays."""
    kind, name, _ = next(case for case in CASES if case[2] == format.name)
    city = "one < two, " * 1900
    text = write(source_of(kind, name), format, [("get_weather", {"city": city})]).text
    parser = CallParser(format, SCHEMAS, lambda: "id", schemas=SCHEMAS)
    channels = ChannelReader("possible") if format.has_channels else None
    most, seen, num_begun = 0, "", 0
    for char in text:
        events = parser.push(channels.push(char).content if channels else char)
        most = max(most, len(parser._held))
        num_begun += sum(isinstance(event, CallBegin) for event in events)
        seen += "".join(event.text for event in events if isinstance(event, Arguments))
        assert not any(isinstance(event, Content) for event in events)
    assert num_begun == 1 and city[:15000] in seen
    assert most <= HELD_ARGUMENTS_CHARS + 300
    assert values(read(format, [text], is_trusted=True))[1] == [("get_weather", {"city": city})]
