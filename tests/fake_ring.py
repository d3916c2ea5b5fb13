"""A scripted `Ring` for tests of the front: answers with given tokens and records how each generation ended."""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from gateway.errors import ApiError
from gateway.generation import FinishReason, Generation, Tokens


@dataclass(frozen=True)
class Script:
    """What the ring does with the next generations."""

    token_ids: Sequence[int] = ()  # ends early at a stop token of the request or at its max_tokens
    group: int = 1  # tokens that come together
    delay_s: float = 0.0  # before each group
    error: ApiError | None = None  # raised after the tokens
    is_hanging: bool = False  # after the tokens, nothing comes any more
    bug: Exception | None = None  # raised after the tokens


class FakeRing:
    """Usable from any thread's event loop."""

    def __init__(self) -> None:
        self.script = Script()
        self.unready: str | None = None
        self.generations: list[Generation] = []
        self.starts: queue.Queue[str] = queue.Queue()  # request ids
        self.endings: queue.Queue[str] = queue.Queue()  # "complete", "failed" or "closed", one a generation

    def check_ready(self) -> str | None:
        """As scripted."""
        return self.unready

    async def generate(self, generation: Generation) -> AsyncIterator[Tokens]:
        """As scripted."""
        script, ending = self.script, "closed"
        self.generations.append(generation)
        self.starts.put(generation.request_id)
        try:
            for news in _news(script, generation):
                await asyncio.sleep(script.delay_s)
                if news.finish_reason is not None:
                    ending = "complete"
                yield news
                if news.finish_reason is not None:
                    return
            if script.is_hanging:
                await asyncio.Event().wait()
            if script.error or script.bug:
                ending = "failed"
                raise script.error or script.bug or AssertionError
        finally:
            await asyncio.sleep(0)  # letting go of pages takes an await, too
            self.endings.put(ending)

    def wait_ending(self, timeout_s: float = 2.0) -> str:
        """How the oldest generation not yet asked for ended."""
        return self.endings.get(timeout=timeout_s)

    def reset(self, script: Script) -> None:
        """Forgets what was recorded."""
        self.script, self.unready = script, None
        self.generations.clear()
        self.starts, self.endings = queue.Queue(), queue.Queue()


def _news(script: Script, generation: Generation) -> Iterator[Tokens]:
    ids, finish = list(script.token_ids)[: generation.max_tokens], cast(FinishReason | None, None)
    if len(ids) == generation.max_tokens:
        finish = "length"
    for rank, token_id in enumerate(ids):
        if token_id in generation.stop_token_ids:
            ids, finish = ids[: rank + 1], "stop"
            break
    for start in range(0, len(ids), script.group):
        group = tuple(ids[start : start + script.group])
        yield Tokens(group, finish if start + script.group >= len(ids) else None)
