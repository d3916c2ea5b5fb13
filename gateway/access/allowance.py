"""How many requests and tokens a key has left. Pure: callers pass the time.

Each amount a minute fills evenly, up to itself. Answers are paid for as they grow, so it may be overdrawn: the next
requests then wait until it is above zero again.
"""

from dataclasses import dataclass, field

from gateway.errors import over_limit

_UNITS = ("requests", "tokens")
LIMIT_HEADERS = [f"x-ratelimit-{what}-{unit}" for unit in _UNITS for what in ("limit", "remaining", "reset")]


@dataclass(slots=True)
class _Amount:
    """The requests, or the tokens, of an allowance. 0 a minute: no limit."""

    per_minute: int
    used: float = field(default=0.0, compare=False)
    at: float = field(default=0.0, compare=False)  # when `used` was right

    def refill(self, now: float) -> None:
        self.used = max(self.used - (now - self.at) * self.per_minute / 60, 0.0)
        self.at = now

    @property
    def left(self) -> float:
        return self.per_minute - self.used

    def wait_s(self, wanted: float) -> float:
        """Seconds until as much as is wanted is left."""
        return max((wanted - self.left) * 60 / self.per_minute, 0.0)


class Allowance:
    """The allowance of one key over all APIs. Equal to another with the same limits, whatever is left."""

    def __init__(self, requests_per_minute: int = 0, tokens_per_minute: int = 0) -> None:
        """0: no limit."""
        self._requests, self._tokens = _Amount(requests_per_minute), _Amount(tokens_per_minute)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Allowance) and (self._requests, self._tokens) == (other._requests, other._tokens)

    def check(self, now: float, key: str, num_tokens: int = 1) -> None:
        """Raises ApiError 429 unless a request whose prompts have so many tokens may begin. `key`: its name.

        Prompts that have more than a minute's tokens may begin when none are used.
        """
        for amount, wanted, unit in ((self._requests, 1, "requests"), (self._tokens, num_tokens, "tokens")):
            amount.refill(now)
            if amount.per_minute and (wait_s := amount.wait_s(min(wanted, amount.per_minute))):
                raise over_limit(key, f"{amount.per_minute} {unit}", wait_s)

    def begin(self, now: float, key: str, num_tokens: int) -> None:
        """Checks as `check`, and takes what the request needs."""
        self.check(now, key, num_tokens)
        self._requests.used += 1
        self._tokens.used += num_tokens

    def give_back(self, num_tokens: int) -> None:
        """Gives back what `begin` took, as no worker answered."""
        for amount, taken in ((self._requests, 1), (self._tokens, num_tokens)):
            amount.used = max(amount.used - taken, 0.0)

    def spend(self, now: float, num_tokens: int) -> None:
        """Takes the tokens of an answer."""
        self._tokens.refill(now)
        self._tokens.used += num_tokens

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's headers: each limit, what is left of it, and when all of it is left again."""
        found = {}
        for amount, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            amount.refill(now)
            if amount.per_minute:
                found[f"x-ratelimit-limit-{unit}"] = str(amount.per_minute)
                found[f"x-ratelimit-remaining-{unit}"] = str(max(int(amount.left), 0))
                found[f"x-ratelimit-reset-{unit}"] = f"{amount.wait_s(amount.per_minute):.3f}s"
        return found
