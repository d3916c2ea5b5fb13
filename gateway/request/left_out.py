"""What agents send and this service has no use for: one table for all APIs of what is taken, left out and warned of.

What is neither here nor a field of a body is refused by name. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

ANY: Final[object] = object()  # every value
Ignored = Mapping[str, tuple[object, ...]]  # field |-> values that are taken without effect

_PROMPT_CACHE = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")

# API |-> fields that have no effect here, whatever their value
FIELDS: Mapping[str, Ignored] = {
    "chat": dict.fromkeys(_PROMPT_CACHE, (ANY,)),
    "completions": dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), (ANY,)),
    "responses": dict.fromkeys((*_PROMPT_CACHE, "client_metadata"), (ANY,)),
}
# API |-> types of tools that its own service runs: the model is not shown them, so it does not call them
TOOLS: Mapping[str, re.Pattern[str]] = {
    "messages": re.compile(r"(web_search|web_fetch|code_execution)_\d{8}"),
    "responses": re.compile(r"web_search(_preview)?(_\d{4}_\d\d_\d\d)?|image_generation|code_interpreter"),
}
# First lines of a system's text that change from request to request, so that no prefix would stay equal
HEADERS = (re.compile(r"x-anthropic-billing-header: [^\n]*(\n|$)"),)


def split_header(texts: Sequence[str]) -> tuple[str, str]:
    """(the header line of a system's texts, or "", and the texts without it joined)."""
    first = texts[0] if texts else ""
    size = max([len(found[0]) for header in HEADERS if (found := header.match(first))], default=0)
    return first[:size], first[size:] + "".join(texts[1:])
