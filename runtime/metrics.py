"""Prometheus metrics of a worker. Names keep vLLM's suffixes under the prefix `baton:`, so dashboards port."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from runtime.addresses import bare

# From 1 ms; each bucket about twice the one before.
SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class WorkerMetrics:
    """What prefill and decode workers both count."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt positions computed by this worker")
        self.step_seconds = self.histogram("engine_step_seconds", "Time of one engine step")

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        """A counter `baton:NAME_total`."""
        return Counter(f"baton:{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge `baton:NAME` whose value is read when scraped."""
        Gauge(f"baton:{name}", text, registry=self.registry).set_function(read)

    def histogram(self, name: str, text: str) -> Histogram:
        """A histogram `baton:NAME` of seconds."""
        return Histogram(f"baton:{name}", text, registry=self.registry, buckets=SECONDS_BUCKETS)

    def add_pool_gauges(self, used: Callable[[], int], total: int) -> None:
        """How full the pool is."""
        self.gauge("kv_cache_used_pages", "Pages somebody holds", used)
        self.gauge("kv_cache_usage_perc", "Share of pages held, 0 to 1", lambda: used() / total)

    def serve(self, host: str, port: int) -> int:
        """Answer /metrics on its own thread; returns the port, which `port` 0 leaves to the system."""
        server, _thread = start_http_server(port, bare(host), self.registry)
        return int(server.server_port)
