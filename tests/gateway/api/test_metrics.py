"""What the gateway measures of requests, with the test's own clock, and of their wait for workers.

For counts of whole, failed and abandoned answers see test_cases.py and test_ends.py.
"""

from prometheus_client import CollectorRegistry

from gateway.errors import missed_deadline, not_ready
from gateway.metrics import MAX_OWNERS, ChoiceMeter, RequestMetrics


class Measured:
    """A request measured by a clock that the test sets."""

    def __init__(self, itl_goal_s: float = 0.0) -> None:
        self.now = self.arrived_s = 100.0
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry, itl_goal_s)

    def choice(self, owner: str = "") -> ChoiceMeter:
        return ChoiceMeter(self.metrics, self.arrived_s, owner, lambda: self.now)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"baton:{name}", labels) or 0.0

    def latency(self, name: str) -> tuple[float, float]:
        """Count, and total seconds."""
        return self.value(f"{name}_seconds_count"), self.value(f"{name}_seconds_sum")


def test_each_choice_is_timed_from_the_requests_arrival() -> None:
    one = Measured()
    one.now += 0.25
    one.metrics.prompt_tokens.inc(7)
    first, second = one.choice(), one.choice()
    one.now += 0.25
    first.add_tokens(2)
    first.add_tokens(0)
    assert one.latency("time_to_first_token") == (1, 0.5)
    one.now += 0.5
    first.add_tokens(4)
    assert one.latency("inter_token_latency") == (4, 0.5), "tokens that arrive together share their time"
    assert one.value("inter_token_latency_seconds_bucket", le="0.1") == 0
    assert one.value("inter_token_latency_seconds_bucket", le="0.2") == 4
    second.add_tokens(1)
    assert one.latency("time_to_first_token") == (2, 0.5 + 1.0)
    one.now += 1.0
    first.finish("stop")
    one.now += 1.0
    second.finish("length")
    assert one.latency("e2e_request_latency") == (2, 2.0 + 3.0)
    assert first.decode_s == 0.5 and second.decode_s == 0
    assert one.value("prompt_tokens_total") == one.value("generation_tokens_total") == 7


def test_tokens_and_answers_are_judged_by_the_goal_and_counted_for_a_few_owners() -> None:
    one = Measured(itl_goal_s=0.1)
    good, bad = one.choice("key-a"), one.choice("user-b")
    for choice, late in ((good, 0.5), (bad, 0.25)):
        choice.add_tokens(5)
        for _ in range(99):
            one.now += 0.0625
            choice.add_tokens(1)
        one.now += late
        choice.add_tokens(1 if choice is good else 2)  # these share their time
        choice.finish("stop")
    assert (one.value("goal_tokens_total", outcome="held"), one.value("goal_tokens_total", outcome="broken")) == (
        198,
        3,
    )
    assert one.value("goal_answers_total", outcome="held", owner="key-a") == 1
    assert one.value("goal_answers_total", outcome="broken", owner="user-b") == 1
    one.metrics.count_failure(missed_deadline(), "user-b")
    one.metrics.count_failure(not_ready("none"), "user-b")
    for number in range(2 * MAX_OWNERS):
        one.choice(f"user-{number}").finish("stop")
    one.choice().finish("stop")
    assert one.value("goal_answers_total", outcome="held", owner="other") == MAX_OWNERS + 2
    assert one.value("goal_answers_total", outcome="held", owner="none") == 1
    described = one.metrics.describe_goals()
    assert (described["itl_goal_ms"], described["tokens"]) == (100.0, {"held": 198, "broken": 3})
    assert described["refused"] == [{"reason": "deadline", "owner": "user-b", "count": 1}]
    assert {"outcome": "broken", "owner": "user-b", "count": 1} in described["answers"]


def test_without_a_goal_nothing_is_judged() -> None:
    one = Measured()
    choice = one.choice()
    choice.add_tokens(1)
    choice.add_tokens(1)
    choice.finish("stop")
    assert one.metrics.describe_goals() == {"itl_goal_ms": 0, "tokens": {}, "answers": [], "refused": []}
