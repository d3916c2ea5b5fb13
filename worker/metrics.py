"""Metrics of a worker of any role. Names keep vLLM's suffixes after the prefix `baton:`, so dashboards port."""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from runtime.ops import SECONDS_BUCKETS
from worker.loop import StepCounter
from worker.scheduler import Scheduler
from worker.sequences import Phase, ScheduledSequence, Update

_KEPT = 0.95  # weight that older steps keep after each new one: about the last 20 count


class PromptSpeed:
    """Prompt tokens a second in the last steps that had any; older steps count less and less."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def count(self, num_tokens: int, seconds: float) -> None:
        self._tokens = _KEPT * self._tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0


class WorkerMetrics(StepCounter):
    """Steps, sequences, pages and the prefix cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt positions computed by this worker")
        self.generation_tokens = self.counter("generation_tokens", "Tokens generated")
        self.step_seconds = self.histogram("engine_step_seconds", "Time of one engine step")
        self.cancelled = self.counter("cancelled", "Sequences ended by their gateway", ("phase",))
        self.offers_accepted = self.counter("offers_accepted", "Offers read and used")
        self.offers_refused = self.counter("offers_refused", "Offers not used", ("reason",))
        self.transfer_bytes = self.counter("kv_transfer_bytes", "Bytes read from other workers", ("transport",))
        self.transfer_seconds = self.histogram("kv_transfer_seconds", "Time of one read of offered pages")
        self.tokens_read = self.counter("kv_tokens_read", "Prompt tokens whose KV was read, by where", ("source",))
        self.probed_bytes_per_s = Gauge(
            "baton:kv_transfer_probed_bytes_per_second", "A first large read, of the last peer that shook hands",
            ("transport",), registry=self.registry,
        )  # fmt: skip
        cache = scheduler.kv.cache
        self.gauge("kv_cache_used_pages", "Pages that sequences hold", lambda: cache.num_held)
        self.gauge("kv_cache_cached_pages", "Pages that can be found or given out", lambda: cache.num_cached)
        self.gauge("kv_cache_usage_perc", "Share of pages held, 0 to 1", lambda: cache.num_held / cache.num_pages)
        self.gauge(
            "num_requests_waiting", "Sequences preempted or not begun",
            lambda: sum(sequence.is_waiting for sequence in scheduler),
        )  # fmt: skip
        self.gauge(
            "num_requests_running", "Sequences in steps",
            lambda: sum(not sequence.is_waiting for sequence in scheduler.in_phase(Phase.ACTIVE)),
        )  # fmt: skip
        self.gauge(
            "leases_open", "Sequences whose pages are being handed over",
            lambda: sum(sequence.is_kept or sequence.phase is Phase.RECEIVING for sequence in scheduler),
        )  # fmt: skip
        self._scheduler = scheduler
        self.gauge(
            "prompt_tokens_waiting", "Prompt tokens of its sequences still to be computed here",
            lambda: scheduler.num_tokens_waiting,
        )  # fmt: skip
        self.prompt_speed = PromptSpeed()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """The scheduler's own counters, read at scrape time."""
        for name, text, value in (
            ("leases_expired", "Sequences whose KV did not arrive in time", self._scheduler.num_expired),
            ("num_preemptions", "Sequences that lost their pages to older ones", self._scheduler.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", self._scheduler.kv.num_queried),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", self._scheduler.kv.num_hit),
        ):
            yield CounterMetricFamily(f"baton:{name}", text, value)

    def count_step(
        self, planned: Seq[ScheduledSequence], updates: Iterable[Update], failed: Collection[int], seconds: float
    ) -> None:
        """Count a finished step. Of a prompt that gets its first token, all positions but one are prompt."""
        self.step_seconds.observe(seconds)
        num_tokens = sum([len(update.token_ids) for update in updates])
        prompts = [step for i, step in enumerate(planned) if i not in failed and not step.is_answer]
        num_prompt = sum([step.count - step.wants_token for step in prompts])
        if num_tokens:
            self.generation_tokens.inc(num_tokens)
        if num_prompt:
            self.prompt_tokens.inc(num_prompt)
            self.prompt_speed.count(num_prompt, seconds)

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        """A counter `baton:NAME_total`."""
        return Counter(f"baton:{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge `baton:NAME` that is read at scrape time."""
        Gauge(f"baton:{name}", text, registry=self.registry).set_function(read)

    def histogram(self, name: str, text: str) -> Histogram:
        """A histogram `baton:NAME` of seconds."""
        return Histogram(f"baton:{name}", text, registry=self.registry, buckets=SECONDS_BUCKETS)
