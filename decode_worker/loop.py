"""The engine loop of a decode worker: plan, compute, publish. Knows the session table and the runner, no gRPC."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from decode_worker.batching import Planned, plan_guesses, plan_step
from decode_worker.constraints import Constraints, Standing
from decode_worker.grammar.errors import GrammarMismatchError
from decode_worker.metrics import DecodeMetrics
from decode_worker.session import Delta, Session
from decode_worker.session_table import SessionTable
from decode_worker.speculation.speculator import Speculator
from engine.batch import SequenceSlice
from engine.choice import Choice, Chosen
from engine.kvcache.pool import Pool
from engine.out_of_memory import StepFailedError
from engine.runner import Runner
from engine.speculative import count_accepted
from engine.steps import Answers, compute_each, report_failure, run_step
from engine.thread import EngineThread


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a step gave one session."""

    scored: list[Chosen]  # prompt tokens
    chosen: list[Chosen]  # the next tokens
    is_whole: bool = False  # by its grammar nothing may follow them

    @property
    def tokens(self) -> list[int]:
        return [one.token for one in self.chosen]

    def judged(self, standing: Standing | Exception) -> "_Outcome | Exception":
        """By its grammar."""
        return standing if isinstance(standing, Exception) else replace(self, is_whole=standing is Standing.WHOLE)


class DecodeLoop:
    """Owns the engine thread; its lock guards the session table."""

    def __init__(
        self,
        table: SessionTable,
        runner: Runner,
        pool: Pool,
        speculator: Speculator,
        chunk_tokens: int,
        publish: Callable[[int, list[Delta]], None],
        metrics: DecodeMetrics,
    ) -> None:
        """`publish(step, deltas)` is called on the engine thread and must not block."""
        self.thread = EngineThread(self._step, table.next_deadline)
        self._table = table
        self._runner = runner
        self._pool = pool
        self._speculator = speculator
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._metrics = metrics
        self._constraints = Constraints()

    def _step(self) -> bool:
        planned, expired = self._take_and_plan()
        if not planned and not expired:
            return False
        deltas = expired
        if planned:
            self._copy_shared_pages(planned)
            constrained, ended = self._constrain(self._speculator.guess(planned))
            deltas += ended
            deltas += self._finish(constrained, compute_each(constrained, self._forward, self._explain))
        self._publish(self.thread.progress().steps, deltas)
        return True

    def _take_and_plan(self) -> tuple[list[Planned], list[Delta]]:
        """What to compute now, and the ends of sessions whose KV came too late or never will."""
        costs = self._speculator.costs()
        with self.thread.lock:
            preempted_before = self._table.num_preemptions
            expired = self._table.expire(time.monotonic())
            planned = plan_step(self._table, self._chunk_tokens)
            if costs is not None:
                planned = plan_guesses(self._table, planned, costs)
            preempted = self._table.num_preemptions - preempted_before
        self._metrics.leases_expired.inc(len(expired))
        self._metrics.preemptions.inc(preempted)
        return planned, expired

    def _copy_shared_pages(self, planned: list[Planned]) -> None:
        """Give sessions that took over a prompt a last page of their own, before anything writes to it."""
        for step in planned:
            if step.session.copy is not None:
                self._pool.copy_page(*step.session.copy)

    def _constrain(self, planned: list[Planned]) -> tuple[list[Planned], list[Delta]]:
        """The step with masks, and the ends of answers that are whole, or cannot go on, by their grammars.

        Without those whose grammars have no time: they are as before it.
        """
        constrained: list[Planned] = []
        ended: list[Delta] = []
        for step, outcome in zip(planned, self._constraints.constrain(planned), strict=True):
            if isinstance(outcome, Planned):
                constrained.append(outcome)
            elif outcome is Standing.LATE:
                with self.thread.lock:
                    self._table.finish_step(step.session, 0, (), time.monotonic())
            elif outcome is Standing.WHOLE:
                ended.append(self._end(step.session, "stop"))
            else:
                ended.append(self._end(step.session, _reason(outcome), str(outcome)))
        return constrained, ended

    def _end(self, session: Session, reason: str, error: str = "") -> Delta:
        with self.thread.lock:
            return self._table.fail(session, error, time.monotonic(), reason)

    def _explain(self, error: Exception, planned: Sequence[Planned]) -> StepFailedError:
        if any(step.count > 1 for step in planned):
            culprit = ("--local-prefill-chunk-tokens", self._chunk_tokens)
        elif len(planned) > 1:
            culprit = ("--max-running", self._table.max_running)
        else:
            culprit = ("--kv-memory-mib", self._pool.size_mib)
        return report_failure(error, *culprit, [step.session.request_id for step in planned])

    def _forward(self, planned: Sequence[Planned]) -> list[Answers]:
        choices = [build_choices(step) for step in planned]
        slices = [build_slice(step, len(wanted)) for step, wanted in zip(planned, choices, strict=True)]
        started = time.perf_counter()
        answers = run_step(self._runner, slices, choices)
        seconds = time.perf_counter() - started
        self._metrics.step_seconds.observe(seconds)
        self._speculator.note_step(sum(len(part.token_ids) for part in slices), seconds)
        return answers

    def _finish(self, planned: list[Planned], results: Sequence[Answers | StepFailedError]) -> list[Delta]:
        outcomes = self._settle(planned, results)
        with self.thread.lock:
            now = time.monotonic()
            news = [self._finish_one(step, outcome, now) for step, outcome in zip(planned, outcomes, strict=True)]
        done = [step for step, outcome in zip(planned, outcomes, strict=True) if not isinstance(outcome, Exception)]
        deltas = [delta for delta in news if delta is not None]
        self._metrics.count_step(done, deltas)
        return deltas

    def _settle(
        self, planned: Sequence[Planned], results: Sequence[Answers | StepFailedError]
    ) -> list[_Outcome | Exception]:
        """What each session gets of a step's answers."""
        outcomes = [
            result if isinstance(result, StepFailedError) else self._take(step, result)
            for step, result in zip(planned, results, strict=True)
        ]
        chosen = [
            (step.session, outcome.tokens)
            for step, outcome in zip(planned, outcomes, strict=True)
            if isinstance(outcome, _Outcome)
        ]
        standings = iter(self._constraints.follow(chosen))
        return [
            outcome if isinstance(outcome, StepFailedError) else outcome.judged(next(standings)) for outcome in outcomes
        ]

    def _take(self, step: Planned, answers: Answers) -> _Outcome:
        """Not the tokens after a wrong guess."""
        scored, chosen = answers[: step.num_scored], answers[step.num_scored :]
        if step.guesses:
            num_accepted = count_accepted(step.guesses, [one.token for one in chosen])
            self._metrics.count_guesses(len(step.guesses), num_accepted)
            chosen = chosen[: num_accepted + 1]
        return _Outcome(scored, chosen)

    def _finish_one(self, step: Planned, outcome: _Outcome | Exception, now: float) -> Delta | None:
        if isinstance(outcome, Exception):
            return self._table.fail(step.session, str(outcome), now, _reason(outcome))
        return self._table.finish_step(
            step.session,
            step.count + len(step.guesses),
            outcome.tokens,
            now,
            [one.logprobs for one in outcome.chosen if one.logprobs is not None],
            [one.logprobs for one in outcome.scored if one.logprobs is not None],
            step.guessed,
            outcome.is_whole,
        )


def _reason(outcome: object) -> str:
    """The finish_reason of a session that ends by this error."""
    return "grammar_error" if isinstance(outcome, GrammarMismatchError) else "error"


def build_slice(step: Planned, num_logits: int) -> SequenceSlice:
    """The positions that a step computes of a session, guesses included."""
    session, begin = step.session, step.session.computed
    token_ids = [*session.tokens[begin : begin + step.count], *step.guesses]
    return SequenceSlice(token_ids, begin, session.pages, num_logits)


def build_choices(step: Planned) -> list[Choice]:
    """What to ask about the slice's last rows: log-probabilities of prompt tokens, then a token after each guess."""
    session, wanted = step.session, step.session.wanted
    tokens, sampling, answer_begin = session.tokens, wanted.sampling, session.answer_begin
    choices = [
        Choice(sampling, position, tokens, answer_begin, num_logprobs=wanted.num_prompt_logprobs, is_given=True)
        for position in range(session.scored, session.scored + step.num_scored)
    ]
    if step.wants_token:
        history = session.count_tokens()
        choices += [
            Choice(
                sampling,
                end,
                tokens,
                answer_begin,
                session.forbidden_at(end),
                mask=None if step.masks is None else step.masks[end - len(tokens)],
                num_logprobs=wanted.num_logprobs,
                guesses=step.guesses[: end - len(tokens)],
                history=history,
            )
            for end in range(len(tokens), len(tokens) + len(step.guesses) + 1)
        ]
    return choices
