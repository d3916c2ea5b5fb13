"""What a decode worker counts."""

from collections.abc import Sequence

from decode_worker.batching import Planned
from decode_worker.session import Delta, Phase
from decode_worker.session_table import SessionTable
from runtime.metrics import WorkerMetrics


class DecodeMetrics(WorkerMetrics):
    """`prompt_tokens` counts local prefill and recomputation: 0 while prefill workers serve and pages suffice."""

    def __init__(self, table: SessionTable) -> None:
        super().__init__()
        self.generation_tokens = self.counter("generation_tokens", "Tokens generated")
        self.transfer_bytes = self.counter("kv_transfer_bytes", "Bytes read from prefill workers", ("transport",))
        self.transfer_seconds = self.histogram("kv_transfer_seconds", "Time of one read of offered pages")
        self.offers_accepted = self.counter("offers_accepted", "Offers read and believed")
        self.offers_refused = self.counter("offers_refused", "Offers not believed", ("reason",))
        self.leases_expired = self.counter("leases_expired", "Sessions whose KV did not arrive in time")
        self.preemptions = self.counter("num_preemptions", "Sequences that lost their pages to older ones")
        self.cancelled = self.counter("cancelled", "Sessions ended by their gateway", ("phase",))
        self.draft_tokens = self.counter("spec_draft_tokens", "Tokens guessed ahead")
        self.accepted_tokens = self.counter("spec_accepted_tokens", "Tokens guessed ahead that were right")
        self.add_pool_gauges(lambda: table.allocator.num_used, table.allocator.num_pages)
        self.gauge("num_requests_running", "Sequences decoding", lambda: len(table.in_phase(Phase.ACTIVE)))
        self.gauge(
            "num_requests_waiting",
            "Sequences preempted, or whose prompt another one computes",
            lambda: len(table.in_phase(Phase.PREEMPTED, Phase.SHARING)),
        )
        self.gauge("leases_open", "Sessions whose KV is arriving", lambda: len(table.in_phase(Phase.RECEIVING)))

    def count_step(self, planned: Sequence[Planned], deltas: Sequence[Delta]) -> None:
        """The step that chooses a token computes one position of decode for it; those beyond are local prefill."""
        self.generation_tokens.inc(sum(len(delta.token_ids) for delta in deltas))
        self.prompt_tokens.inc(sum(step.count - step.wants_token for step in planned))

    def count_guesses(self, drafted: int, accepted: int) -> None:
        """Of so many tokens guessed ahead, so many were right."""
        self.draft_tokens.inc(drafted)
        self.accepted_tokens.inc(accepted)


class GrammarMetrics:
    """Grammars that answers had to match."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.results = metrics.counter("grammars", "Found in the cache, compiled, refused or failed", ("result",))
        self.compile_seconds = metrics.histogram("grammar_compile_seconds", "Time to compile one, waiting included")
