"""Formats of reasoning, which one a chat template uses, and whether a prompt opens it. Pure.

`reasoning_reader.py` reads them, `grammar.py` allows them before a grammar. Must not know requests or tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

# inside: the prompt opens the block and the answer begins in it. possible: the answer may open it.
# off: the prompt closes the block, or the answer continues content.
ReasoningStart = Literal["inside", "possible", "off"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning occurs once, at the start of the answer, between `begin` and `end`.

    Newlines next to the markers are layout. Markers may be control tokens, which the detokenizer must then show.
    """

    name: str
    begin: str
    end: str


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    item.name: item
    for item in (
        ReasoningFormat("think", "<think>", "</think>"),  # Qwen, DeepSeek, GLM, MiniMax M2, Nemotron, Kimi K2
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),  # Magistral from 2507 on, Ministral 3
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),  # Seed-OSS
        ReasoningFormat("minimax-m3", "<mm:think>", "</mm:think>"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
    )
}


def resolve_reasoning(setting: str, template: str, has_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """The format named by `setting`, None for "none", or the template's for "auto"."""
    if setting == "auto":
        return choose_reasoning(template, has_token)
    return None if setting == "none" else REASONING_FORMATS[setting]


def choose_reasoning(template: str, has_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """The format of a chat template; None if it has no reasoning, or uses another format.

    Some templates only remove reasoning up to the end marker. They count if both markers are tokens of the vocabulary:
    the model is then trained to write them.
    """
    for item in REASONING_FORMATS.values():
        is_trained = has_token(item.begin) and has_token(item.end)
        if item.end in template and (item.begin in template or is_trained):
            return item
    return None


def reasoning_start(format: ReasoningFormat, prompt: str, opened: str = "") -> ReasoningStart:
    """Where an answer begins. Only the prompt's end counts, as users may write markers too.

    `opened`: the text of the open assistant's message that ends the prompt.
    """
    opened = opened.strip()
    last_begin, last_end = opened.rfind(format.begin), opened.rfind(format.end)
    if last_begin != last_end:
        return "inside" if last_begin > last_end else "off"
    head = prompt.rstrip().removesuffix(opened).rstrip()
    if head.endswith(format.begin):
        return "inside"
    return "off" if opened or head.endswith(format.end) else "possible"
