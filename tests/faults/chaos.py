"""Kills a random worker every few seconds under load, and checks that clients see only a pause.

    python -m tests.faults.chaos --minutes 5

Exit code 1 if an answer differs from the undisturbed one, a request hangs or fails, or pages stay used.
"""

import argparse
import os
import queue
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.asking import Asking, draw_salt
from tests.support.fleet import ProcessFleet, run_fleet

VOCAB = 300  # prompts of token ids below this
PROMPTS, ANSWERS = (20, 100, 400, 1500), (40, 150, 400)  # tokens
HANG_S = 60.0  # longest allowed pause between messages
TOO_LONG_S = 5 * HANG_S  # for a whole answer that arrives slowly
KILL_EVERY_S = 5.0
UNUSED_S = 60.0


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class Tally:
    """The results. Written by many threads, under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    pauses: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> None:
        with self.lock:
            self.outcomes[outcome] += 1

    def add(self, case: Case, asking: Asking) -> None:
        outcome = judge(case, asking)
        self.count(outcome)
        with self.lock:
            self.num_tokens += len(asking.tokens)
            self.pauses.append(asking.longest_pause_s)
            if outcome != "right":
                self.complaints.append(
                    f"{time.strftime('%X')} {outcome} after {asking.seconds:.0f} s, longest pause "
                    f"{asking.longest_pause_s:.0f} s: {len(asking.tokens)} of {asking.num_tokens} tokens after "
                    f"{len(asking.prompt)} of prompt, {asking.code} {asking.detail[:300]}"
                )


def judge(case: Case, asking: Asking) -> str:
    """An answer in one word."""
    if asking.has_hung or asking.longest_pause_s > HANG_S:
        return "hung"
    if tuple(asking.tokens) != case.answer[: len(asking.tokens)]:
        return "wrong"
    if asking.code is not None:
        return "failed"
    return "right" if len(asking.tokens) == len(case.answer) else "short"


def build_cases(
    fleet: ProcessFleet, count: int, seed: int, prompts: Sequence[int] = PROMPTS, answers: Sequence[int] = ANSWERS
) -> list[Case]:
    """Requests of mixed lengths, which are drawn from `prompts` and `answers`, answered before any disturbance."""
    dice = random.Random(seed)
    sizes = [(dice.choice(prompts), dice.choice(answers)) for _ in range(count)]
    drawn = [tuple(dice.randrange(6, VOCAB) for _ in range(num_prompt)) for num_prompt, _ in sizes]
    cases = []
    for prompt, (_, num_tokens) in zip(drawn, sizes, strict=True):
        asking = Asking(fleet.grpc_address, prompt, num_tokens).finish()
        assert asking.code is None, asking.detail
        cases.append(Case(prompt, tuple(asking.tokens)))
    return cases


def keep_asking(fleet: ProcessFleet, cases: "queue.SimpleQueue[Case]", tally: Tally, until: float) -> None:
    """One client: one request after the other."""
    dice = random.Random()
    while time.monotonic() < until:
        case = cases.get()
        cases.put(case)
        asking = Asking(
            fleet.grpc_address, case.prompt, len(case.answer), timeout_s=TOO_LONG_S, cache_salt=draw_salt(dice)
        )
        tally.add(case, asking.finish())


def disturb(fleet: ProcessFleet, until: float, every_s: float, seed: int) -> Counter[str]:
    """Kill a random running worker at intervals and restart it, without waiting for others to be back.

    If it has several ranks, half of the time another rank than the first is killed, which must end the whole worker.

    Returns the number of kills per worker. Runs on the main thread.
    """
    dice = random.Random(seed)
    kills: Counter[str] = Counter()
    next_kill = time.monotonic() + every_s
    while next_kill < until:
        time.sleep(max(0.0, next_kill - time.monotonic()))
        next_kill += every_s
        alive = {worker["address"] for worker in fleet.status() if worker["alive"]}
        victims = [worker for worker in fleet.workers() if worker.address in alive]
        if victims:
            victim = dice.choice(victims)
            name = victim.name
            if (ranks := victim.find_ranks()) and dice.random() < 0.5:
                os.kill(dice.choice(ranks), signal.SIGKILL)
                victim.wait_exited(HANG_S)
                name += " by its rank"
            victim.kill()
            victim.start()
            kills[name] += 1
    return kills


@dataclass(frozen=True)
class Chaos:
    """A run's results."""

    tally: Tally
    kills: Counter[str]  # by worker
    unused: str  # used pages and slots at the end, in words
    failed_attempts: float

    @property
    def is_right(self) -> bool:
        return set(self.tally.outcomes) == {"right"}


def run(minutes: float, num_clients: int, every_s: float = KILL_EVERY_S, seed: int = 1, model: str = "") -> Chaos:
    tally, flags = Tally(), [f"--model={model}"] if model else []
    roles = dict.fromkeys(("gateway", "prefill", "decode"), flags)
    # forks: a worker that starts again imports no packages, which on few cores would take all of their time
    with run_fleet(2, 2, flags=roles, lease_s=10, patience_s=HANG_S, forks=True) as fleet:
        cases: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for case in build_cases(fleet, 2 * num_clients, seed):
            cases.put(case)
        until = time.monotonic() + 60 * minutes
        clients = [
            threading.Thread(target=keep_asking, args=(fleet, cases, tally, until), daemon=True)
            for _ in range(num_clients)
        ]
        for client in clients:
            client.start()
        kills = disturb(fleet, until, every_s, seed)
        for client in clients:
            client.join(TOO_LONG_S)
            if client.is_alive():
                tally.outcomes["hung"] += 1
        fleet.wait_until_whole()
        try:
            unused = f"0 after {fleet.wait_until_unused(UNUSED_S):.2f} s"
        except AssertionError as error:
            unused = str(error)
            tally.outcomes["leaked"] += 1
        workers = fleet.workers() if model else []
        if used_slots := sum(int(worker.metric("state_slots_used")) for worker in workers):
            unused += f"; {used_slots} slots of recurrent state"
            tally.outcomes["leaked"] += 1
        failed_attempts = fleet.gateway.metric("attempts_failed_total")
    return Chaos(tally, kills, unused, failed_attempts)


def report(chaos: Chaos, minutes: float) -> None:
    tally, kills = chaos.tally, chaos.kills
    for complaint in tally.complaints[:10]:
        print(complaint)
    pauses = sorted(tally.pauses) or [0.0]
    rows = [
        ("minutes under load", f"{minutes:g}"),
        ("workers killed and restarted", f"{sum(kills.values())} ({', '.join(f'{n} {c}' for n, c in kills.items())})"),
        ("requests by outcome", ", ".join(f"{name} {count}" for name, count in tally.outcomes.items())),
        ("tokens", str(tally.num_tokens)),
        ("attempts that failed and were tried again", f"{chaos.failed_attempts:.0f}"),
        ("longest pause of a request, median", f"{pauses[len(pauses) // 2]:.2f} s"),
        ("longest pause of a request, worst", f"{pauses[-1]:.2f} s (bound {HANG_S:g} s)"),
        ("used pages and slots at the end", chaos.unused),
    ]
    for name, value in rows:
        print(f"| {name:<42} | {value} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--every-s", type=float, default=KILL_EVERY_S, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="", help="folder of a model with the demo's tokens; default: the demo")
    options = parser.parse_args()
    chaos = run(options.minutes, options.streams, options.every_s, options.seed, options.model)
    report(chaos, options.minutes)
    return 0 if chaos.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
