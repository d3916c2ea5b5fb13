"""Prompts that no other request has: drawn from a pool of ordinary tokens or words, and different in each run.

Every prompt begins with pieces drawn by the run, so that a prefix cache has nothing from an earlier run. A shared
prefix begins like that too, the same for all prompts of a run.
"""

import secrets
import string
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from bench.load.workloads import Wanted

HEAD = 4  # pieces that distinguish runs and requests
SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "we", "zi")

Message = dict[str, Any]  # of a conversation: its role and content
Prompt = list[int] | str


def new_run() -> int:
    """A random number, unique to this run."""
    return secrets.randbits(48)


def build_words() -> list[str]:
    """5,832 different words of three syllables."""
    return [first + second + third for first in SYLLABLES for second in SYLLABLES for third in SYLLABLES]


def build_letters(count: int) -> str:
    """Words of random letters, always the same: tokenizers split them into very many different tokens."""
    dice = np.random.default_rng(0)
    letters = np.array([*string.ascii_letters, *string.digits])
    return " ".join("".join(dice.choice(letters, dice.integers(2, 7))) for _ in range(count))


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes the prompts of one run: token ids from `ids`, or text made of words without them."""

    ids: Sequence[int] = ()  # ordinary tokens
    words_a_token: float = 0.5  # for text
    run: int = field(default_factory=new_run)
    shared_tokens: int = 0  # of each prompt, the same for all

    def write(self, wanted: Wanted, index: int, seed: int) -> Prompt:
        """The prompt of request `index`. A given text stays as it is, after its own head."""
        if wanted.text:
            return " ".join(self._draw_words(HEAD, self.run, index)) + "\n" + wanted.text
        num_shared = min(self.shared_tokens, wanted.num_input - 1)
        if self.ids:
            shared = self._draw_ids(num_shared, self.run, 0)
            return shared + self._draw_ids(wanted.num_input - num_shared, self.run, seed, index + 1)
        first = round(num_shared * self.words_a_token)
        num_words = max(1, round(wanted.num_input * self.words_a_token) - first)
        return " ".join(self._draw_words(first, self.run, 0) + self._draw_words(num_words, self.run, seed, index + 1))

    def draw(self, num_tokens: int, *key: int) -> Prompt:
        """So many tokens, the same for the same key and run."""
        if self.ids:
            return self._draw_ids(num_tokens, self.run, *key)
        return " ".join(self._draw_words(max(1, round(num_tokens * self.words_a_token)), self.run, *key))

    def write_images(self, count: int, size: int, index: int) -> list[Message]:
        """The conversation of request `index`: images of noise, which no other request has, and a question."""
        parts: list[dict[str, Any]] = []
        for number in range(count):
            file, dice = BytesIO(), np.random.default_rng((self.run, index, number))
            Image.fromarray(dice.integers(0, 256, (size, size, 3), np.uint8)).save(file, "JPEG")
            url = f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is in these pictures?"}]}]

    def _draw_ids(self, count: int, *key: int) -> list[int]:
        places = np.random.default_rng(key).integers(0, len(self.ids), count)
        return [self.ids[place] for place in places]

    def _draw_words(self, count: int, *key: int) -> list[str]:
        words = build_words()
        return [words[place] for place in np.random.default_rng(key).integers(0, len(words), count)]
