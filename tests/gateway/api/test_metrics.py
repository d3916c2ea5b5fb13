"""What the gateway measures of requests, with the test's own clock, and of their wait for workers.

For counts of whole, failed and abandoned answers see test_cases.py and test_ends.py.
"""

from prometheus_client import CollectorRegistry

from gateway.metrics import ChoiceMeter, RequestMetrics


class Measured:
    """A request measured by a clock that the test sets."""

    def __init__(self) -> None:
        self.now = self.arrived_s = 100.0
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry)

    def choice(self) -> ChoiceMeter:
        return ChoiceMeter(self.metrics, self.arrived_s, lambda: self.now)

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
