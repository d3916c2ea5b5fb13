"""Metrics of requests, measured where text leaves the service. The router counts what is queued or running."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.errors import ApiError
from gateway.router.engine_client import FinishReason

# Three buckets per decade from 1 ms; tokens arrive within seconds, answers within minutes.
_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REQUEST_BUCKETS_S = (*_TOKEN_BUCKETS_S, 20.0, 50.0, 100.0, 200.0, 500.0)


MAX_OWNERS = 32  # with a label of their own, the first ones; the others share one
SHARE_HELD = 0.99  # of the times between an answer's tokens: so many keep the goal if the answer does


class ModelMetrics(Collector):
    """The metrics of several models in one registry, each with the label `model`."""

    def __init__(self) -> None:
        self._registries: dict[str, CollectorRegistry] = {}

    def add(self, model: str) -> CollectorRegistry:
        """A registry for the model's metrics."""
        registry = self._registries[model] = CollectorRegistry()
        return registry

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for model, registry in self._registries.items():
            for one in registry.collect():
                family = merged.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                family.samples += [sample._replace(labels={"model": model, **sample.labels}) for sample in one.samples]
        return merged.values()


@dataclass(slots=True)
class Gaps:
    """Times between tokens of live answers."""

    total_s: float = 0.0
    count: int = 0

    def add(self, total_s: float, count: int) -> None:
        self.total_s += total_s
        self.count += count


class RequestMetrics:
    """The metrics of all requests, registered once per registry."""

    def __init__(self, registry: CollectorRegistry, itl_goal_s: float = 0.0, live_gaps: Gaps | None = None) -> None:
        """`itl_goal_s`: goal for the time between tokens; 0: none. `live_gaps`: those of several models together."""
        self.registry = registry
        self.itl_goal_s = itl_goal_s
        self.live_gaps = live_gaps or Gaps()  # between tokens of all answers but those of the last priority
        self._owners: set[str] = set()

        def count(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"baton:{name}", help, labels, registry=registry)

        def time(name: str, help: str, buckets_s: Sequence[float]) -> Histogram:
            return Histogram(f"baton:{name}_seconds", help, buckets=buckets_s, registry=registry)

        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of requests started; each prompt counts once.")
        self.generation_tokens = count("generation_tokens", "Tokens generated.")
        meaning = "From a request's arrival to each choice's first token."
        self.time_to_first_token = time("time_to_first_token", meaning, _REQUEST_BUCKETS_S)
        meaning = "Time between tokens; tokens that come together share theirs."
        self.inter_token_latency = time("inter_token_latency", meaning, _TOKEN_BUCKETS_S)
        meaning = "From a request's arrival to each choice's last token."
        self.e2e_request_latency = time("e2e_request_latency", meaning, _REQUEST_BUCKETS_S)
        self.request_success = count("request_success", "Choices answered in full.", "finished_reason")
        meaning = "Choices their client gave up, before the first token (waiting) or after it (decode)."
        self.cancelled = count("cancelled", meaning, "phase")
        meaning = "Tokens after a choice's first, by whether they came within --itl-goal-ms."
        self.goal_tokens = count("goal_tokens", meaning, "outcome")
        meaning = f"Choices answered in full, by whether {SHARE_HELD:.0%} of those tokens did."
        self.goal_answers = count("goal_answers", meaning, "outcome", "owner")
        self.refused = count("requests_refused", "Requests refused with 429.", "reason", "owner")
        self.failed = count("requests_failed", "Requests that ended with an error of any kind.", "code")

    def label_owner(self, owner: str) -> str:
        """Bounds the number of labels. `owner`: as in TokenizedRequest."""
        if owner and (owner in self._owners or len(self._owners) < MAX_OWNERS):
            self._owners.add(owner)
            return owner
        return "other" if owner else "none"

    def count_failure(self, error: BaseException, owner: str = "") -> None:
        """Counts a request that ends with `error`. `owner`: as in TokenizedRequest, where it is known."""
        if isinstance(error, ApiError):
            self.failed.labels(error.code or str(error.status)).inc()
            if error.status == 429:
                self.refused.labels(error.code, self.label_owner(owner)).inc()
        elif isinstance(error, Exception):
            self.failed.labels("bug").inc()

    def describe_goals(self) -> dict[str, Any]:
        """Counts, so far: tokens and answers that kept or broke the goal, and requests that were refused."""
        found: dict[str, Any] = {"itl_goal_ms": self.itl_goal_s * 1e3, "tokens": {}, "answers": [], "refused": []}
        for counter in (self.goal_tokens, self.goal_answers, self.refused):
            for sample in next(iter(counter.collect())).samples:
                if sample.name.endswith("_total"):
                    if counter is self.goal_tokens:
                        found["tokens"][sample.labels["outcome"]] = int(sample.value)
                    else:
                        place = "answers" if counter is self.goal_answers else "refused"
                        found[place].append({**sample.labels, "count": int(sample.value)})
        return found


class ChoiceMeter:
    """Times one choice of a request. The first `finish` or `cancel` ends it; later ones are not counted."""

    def __init__(
        self,
        metrics: RequestMetrics,
        arrived_s: float,
        owner: str = "",
        clock: Callable[[], float] = time.perf_counter,
        *,
        is_live: bool = True,
    ) -> None:
        """`arrived_s`: when the request arrived, by `clock`; `owner`: as in TokenizedRequest.

        `is_live`: somebody waits for its tokens.
        """
        self._is_live = is_live
        self._metrics = metrics
        self._owner = owner
        self._num_tokens = self._num_held = 0  # after the first: all, and those within the goal
        self._clock = clock
        self._arrived_s = arrived_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._is_over = False

    def add_tokens(self, num_tokens: int) -> None:
        """Counts tokens that arrived together."""
        if not num_tokens:
            return
        now = self._clock()
        self._metrics.generation_tokens.inc(num_tokens)
        if self._last_token_s is None:
            self._first_token_s = now
            self._metrics.time_to_first_token.observe(now - self._arrived_s)
        else:
            each_s = (now - self._last_token_s) / num_tokens
            if self._is_live:
                self._metrics.live_gaps.add(now - self._last_token_s, num_tokens)
            for _ in range(num_tokens):
                self._metrics.inter_token_latency.observe(each_s)
            if self._metrics.itl_goal_s:
                is_held = each_s <= self._metrics.itl_goal_s
                self._num_tokens += num_tokens
                self._num_held += num_tokens if is_held else 0
                self._metrics.goal_tokens.labels("held" if is_held else "broken").inc(num_tokens)
        self._last_token_s = now

    def skip_tokens(self) -> None:
        """Tokens that another gateway has counted: the next one's time counts from now."""
        self._last_token_s = self._clock()

    @property
    def decode_s(self) -> float:
        """Seconds from the first tokens to the latest."""
        return (self._last_token_s or 0.0) - (self._first_token_s or 0.0)

    def finish(self, reason: FinishReason) -> None:
        """Call it when the answer is complete."""
        if not self._is_over:
            self._is_over = True
            self._metrics.e2e_request_latency.observe(self._clock() - self._arrived_s)
            self._metrics.request_success.labels(reason).inc()
            if self._metrics.itl_goal_s:
                is_held = self._num_held >= SHARE_HELD * self._num_tokens
                owner = self._metrics.label_owner(self._owner)
                self._metrics.goal_answers.labels("held" if is_held else "broken", owner).inc()

    def cancel(self) -> None:
        """Call it when the client has left."""
        if not self._is_over:
            self._is_over = True
            self._metrics.cancelled.labels("waiting" if self._last_token_s is None else "decode").inc()
