"""Policies beside load and cached prefixes; each class here is the default without one. Pure.

gateway/policies/ has those of the service.
"""

from collections.abc import Iterable, Sequence

from gateway.router.request import Request
from gateway.router.worker_view import WorkerView


class HomeFinder:
    """Which workers a session's turns go to, all else equal: any."""

    def find(self, session: str, workers: Sequence[WorkerView]) -> frozenset[str]:
        """Incarnations of the workers that the session's turns go to."""
        return frozenset()


class KeepTimes:
    """How long the KV of a session is worth keeping: as long as any other."""

    def expect(self, session: str, call: str, now: float) -> float:
        """Note a request of the session. Returns seconds within which the next one probably comes; 0: not known."""
        return 0.0


class Revisions:
    """Which revision of the workers a new request goes to: any."""

    def choose(self, workers: Sequence[WorkerView], key: str) -> Sequence[WorkerView]:
        """The workers that a new request may go to. `key`: its session or id."""
        return workers

    def explain(self, workers: Sequence[WorkerView]) -> str:
        """Why a new request can go to none of these workers, of which some decode."""
        return ""


class Expectations:
    """How long requests wait and take, as others did: not at all, and as many tokens as they may."""

    def note_places(self, now: float, num_places: int, is_waited_for: bool) -> None:
        """Note that `num_places` were given now; `is_waited_for`: requests wait for more."""

    def note_answer(self, num_tokens: int) -> None:
        """Note that an answer ended after `num_tokens` tokens."""

    def expect_tokens(self, request: Request) -> float:
        """Tokens that a request will probably take: of its prompt, and of the rest of its answer."""
        return request.num_missing + request.num_left

    def predict_wait_s(self, num_before: int, running: Iterable[Request], views: Sequence[WorkerView]) -> float:
        """Seconds until a request behind so many others has a place; 0 where nothing is known."""
        return 0.0

    def predict_prompt_s(self, num_tokens: int, views: Sequence[WorkerView]) -> float:
        """Seconds for so many prompt tokens on the worker that is first done with them; 0 where no speed is known."""
        return 0.0


class LocalPrefill:
    """How much of a prompt a decode worker computes by itself: up to a fixed number of positions."""

    def __init__(self, max_tokens: int = 0) -> None:
        self._max_tokens = max_tokens

    def choose(self, decode: WorkerView, prefills: Sequence[WorkerView], num_lacking: int) -> tuple[int, str]:
        """Up to how many for a prompt that lacks so many, and why that is or is not enough; empty: not by choice.

        `prefills`: those that could compute it.
        """
        return self._max_tokens, "within --local-prefill-max-tokens" if num_lacking <= self._max_tokens else ""

    def explain(self, workers: Sequence[WorkerView]) -> str:
        """Why decode workers compute all prompts although prefill workers are alive, and how to change it; or empty."""
        return ""
