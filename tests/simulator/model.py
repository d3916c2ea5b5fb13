"""Pages whose contents name their owner, and a model whose next token follows from all the KV it finds.

The content of a position is a number that follows from the one before it and from the token, as KV does. So a foreign,
stale or missing page changes every later token.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from tests.simulator.world import ViolationError

PAGE_TOKENS = 2
Owner = tuple[str, int]  # request, attempt
Cell = tuple[Owner | None, int, int]  # owner, position, content


class Memory:
    """The pool of one incarnation. Peers that mapped it can read it after its owner's death."""

    def __init__(self, num_pages: int) -> None:
        self.pages: list[list[Cell]] = [[(None, -1, 0)] * PAGE_TOKENS for _ in range(num_pages)]
        self.generations = [0] * num_pages

    def compute(self, owner: Owner, pages: Sequence[int], begin: int, token_ids: Sequence[int]) -> None:
        """Write the KV of `token_ids`, which follow on the first `begin` positions of `pages`."""
        content = self.content(pages, begin - 1) if begin else 0
        for position, token in enumerate(token_ids, begin):
            content = hash((content, token))
            self.pages[pages[position // PAGE_TOKENS]][position % PAGE_TOKENS] = (owner, position, content)

    def content(self, pages: Sequence[int], position: int) -> int:
        return self.pages[pages[position // PAGE_TOKENS]][position % PAGE_TOKENS][2]

    def next_token(self, pages: Sequence[int], num_tokens: int) -> int:
        return choose_token([self.content(pages, position) for position in range(num_tokens)])

    def copy(self, source: int, target: int) -> None:
        self.pages[target] = list(self.pages[source])

    def check_owned(
        self, owner: Owner, pages: Sequence[int], num_tokens: int, twins: Container[Owner] = (), num_shared: int = 0
    ) -> None:
        """The first `num_tokens` positions of `pages` hold `owner`'s KV and nothing else.

        The first `num_shared` may be KV of `twins`, who have the same prompt.
        """
        for position in range(num_tokens):
            found = self.pages[pages[position // PAGE_TOKENS]][position % PAGE_TOKENS]
            is_own = found[0] == owner or (position < num_shared and found[0] in twins)
            if not is_own or found[1] != position:
                raise ViolationError(f"{owner} runs on {found} at position {position}")


def choose_token(contents: Sequence[int]) -> int:
    return hash(tuple(contents)) & 0xFFFFFF


def answer(prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """What an undisturbed service answers."""
    contents: list[int] = []
    tokens = list(prompt_ids)
    for token in prompt_ids:
        contents.append(hash((contents[-1] if contents else 0, token)))
    for _ in range(max_tokens):
        tokens.append(choose_token(contents))
        contents.append(hash((contents[-1], tokens[-1])))
    return tokens[len(prompt_ids) :]


@dataclass(frozen=True, slots=True)
class Ticket:
    """As kv.proto's, with the process in place of its address."""

    address: str
    incarnation: str
    session: int
    attempt: int
    end: int


@dataclass(frozen=True, slots=True)
class Offer:
    """As kv.proto's."""

    ticket: Ticket
    incarnation: str  # of the prefill worker
    positions: range
    pages: list[int]
    generations: list[int]
