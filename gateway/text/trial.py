"""Loads a tokenizer after a fork with limits has loaded it and tried it out, chat template included.

A checkpoint's author decides what a regular expression, a normalizer or a template costs: one that hangs, fills the
memory or crashes a library ends its fork, and the start with a sentence.
"""

import os
from pathlib import Path
from time import process_time

import msgspec

from gateway.text.template_process import CPU_S as RENDER_CPU_S
from gateway.text.template_process import MEMORY_BYTES as RENDER_BYTES
from gateway.text.tokenizer import Tokenizer, Tried
from runtime.fork import Fork, Limits, Refused
from wire.files import TOKENIZER, blamed_tokenizer, check_folder

LIMITS = Limits(cpu_s=60.0, wall_s=600.0, memory_bytes=6 << 30)  # the largest tokenizers take 3 s and 1 GiB
RENDER_LIMITS = Limits(RENDER_CPU_S, 60.0, RENDER_BYTES)
MOST_TEXT_S = 0.5  # of CPU time, for a text of SAMPLE_CHARS: others take 0.01 s
MOST_TOKENS_A_CHAR = 32  # a character has at most 4 bytes; compatibility forms have up to 18 characters
SAMPLE_CHARS = 4096
MOST_OWN_CHARS = 256
# Runs that make regular expressions backtrack and normalizers multiply, and ordinary text.
SAMPLES = (*"a \n0A._é▁日🙂ﷺ\u200d", "a!", "a ", "aA", "a1", "The quick fox. ")


class Usable(msgspec.Struct, tag=True):
    """The tokenizer can be used."""

    tried: Tried


def load_tokenizer(folder: Path, max_context_tokens: int | None = None) -> Tokenizer:
    """A Tokenizer of a folder that is not trusted. ValueError or OSError name the file that cannot be used."""
    check_folder(folder)
    fork = Fork(LIMITS, lambda _: _try(folder, max_context_tokens))
    answer = fork.ask_now()
    fork.end()
    if not isinstance(answer, msgspec.Raw):
        how = "crashes the library that reads it, or needs too much memory" if answer == "crashed" else "takes too long"
        raise ValueError(f"{folder / TOKENIZER} {how}")
    found: Usable | Refused = msgspec.msgpack.decode(answer, type=Usable | Refused)
    if isinstance(found, Refused):
        raise ValueError(found.message)
    return Tokenizer(folder, max_context_tokens, found.tried)


def _try(folder: Path, max_context_tokens: int | None) -> Usable | Refused:
    """Runs in a fork."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads have stacks, which count
    try:
        tokenizer = Tokenizer(folder, max_context_tokens, Tried(False, ""))
        for sample in (*SAMPLES, *_own_samples(tokenizer)):
            _try_text(tokenizer, (sample * SAMPLE_CHARS)[:SAMPLE_CHARS])
        return Usable(_try_template(tokenizer))
    except (ValueError, OSError) as error:
        return Refused(str(error))
    except MemoryError:
        return Refused(f"{folder / TOKENIZER} needs too much memory")


def _own_samples(tokenizer: Tokenizer) -> list[str]:
    """The tokenizer's patterns, and their characters: patterns that multiply or backtrack name what they do it to."""
    texts = tokenizer.patterns()
    return [*sorted({char for text in texts for char in text})[:MOST_OWN_CHARS], *texts[:MOST_OWN_CHARS]]


def _try_text(tokenizer: Tokenizer, text: str) -> None:
    began = process_time()
    with blamed_tokenizer(tokenizer.folder):
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokenizer.decode(ids)
    took_s, most = process_time() - began, MOST_TOKENS_A_CHAR * len(text)
    if took_s > MOST_TEXT_S or len(ids) > most:
        raise ValueError(
            f"{tokenizer.folder / TOKENIZER} takes {took_s:.1f} s for {len(text)} characters such as {text[:2]!r} and "
            f"makes {len(ids)} tokens of them, expected at most {MOST_TEXT_S} s and {most}"
        )


def _try_template(tokenizer: Tokenizer) -> Tried:
    fork = Fork(RENDER_LIMITS, lambda _: _render(tokenizer))
    answer = fork.ask_now()
    fork.end()
    if isinstance(answer, msgspec.Raw):
        return msgspec.msgpack.decode(answer, type=Tried)
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    path = next((path for name in names if (path := tokenizer.folder / name).exists()), tokenizer.folder)
    how = f"takes longer than {RENDER_CPU_S:g} s" if answer == "slow" else "needs too much memory, or crashes"
    raise ValueError(f"the chat template in {path} {how} to render a sample")


def _render(tokenizer: Tokenizer) -> Tried:
    tokenizer.template.compile()
    return tokenizer.render_samples()
