"""Hours of ordinary trouble: disconnecting clients, bad input, restarts; memory, files and pages must not grow.

    python -m tests.faults.soak --minutes 60 --restart-every-s 120

Exit code 1 if memory grows, files stay open, pages stay used, an answer is wrong or a request hangs or fails. A
restarted worker is measured anew; a process that lived less than five minutes is shown, but not judged.
"""

import argparse
import queue
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tests.faults.chaos import HANG_S, UNUSED_S, Case, Tally, build_cases
from tests.support.asking import Asking, draw_salt
from tests.support.fleet import Process, ProcessFleet, run_fleet

ALLOWED = {"right", "cancelled", "refused"}  # outcomes
CANCELLED, BAD = 0.20, 0.05  # shares of all requests
SAMPLE_S = 5.0
GROWTH = 0.02  # allowed growth of memory between the second and the last quarter, as a share
SLACK_BYTES = 8 << 20  # growth that allocators may show without a leak
SLACK_FILES = 16  # connections come and go
SHOWN_SAMPLES = 12  # least for a process to be shown: a minute
JUDGED_SAMPLES = 60  # least for a process to be judged: five minutes, the first quarter being warm-up
DRAIN_S = 120.0  # generous, for a loaded machine


@dataclass
class Sample:
    """One process at one time."""

    private_bytes: int
    num_files: int


@dataclass
class Soak:
    """The results so far."""

    fleet: ProcessFleet
    cases: "queue.SimpleQueue[Case]" = field(default_factory=queue.SimpleQueue)
    tally: Tally = field(default_factory=Tally)
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # process and incarnation |-> its samples
    num_restarts: int = 0

    def keep_asking(self, until: float, seed: int) -> None:
        """One client: one request after the other."""
        dice = random.Random(seed)
        while time.monotonic() < until:
            kind = dice.random()
            if kind < BAD:
                self.tally.count(ask_badly(self.fleet, dice))
            elif kind < BAD + CANCELLED:
                self.tally.count(self._leave(dice))
            else:
                case = self._take()
                self.tally.add(case, self._ask(case, dice).finish())

    def _take(self) -> Case:
        case = self.cases.get()
        self.cases.put(case)
        return case

    def _ask(self, case: Case, dice: random.Random) -> Asking:
        return Asking(
            self.fleet.grpc_address, case.prompt, len(case.answer), timeout_s=2 * HANG_S, cache_salt=draw_salt(dice)
        )

    def _leave(self, dice: random.Random) -> str:
        """A request that is cancelled at a random point."""
        case = self._take()
        asking = self._ask(case, dice)
        time.sleep(dice.random() * dice.choice((0.02, 0.5)))
        asking.cancel()
        asking.finish()
        is_right = tuple(asking.tokens) == case.answer[: len(asking.tokens)]
        return "cancelled" if is_right and not asking.has_hung else "wrong"

    def sample(self) -> None:
        for process in self.fleet.processes.values():
            self.samples.setdefault(f"{process.name} #{process.num_starts}", []).append(look_at(process))

    def watch(self, until: float, restart_every_s: float, seed: int) -> None:
        """Sample, and restart a random worker at intervals (0: never). Runs on the main thread."""
        dice = random.Random(seed)
        next_restart = time.monotonic() + restart_every_s if restart_every_s else until
        while time.monotonic() < until:
            self.sample()
            time.sleep(SAMPLE_S)
            if next_restart <= time.monotonic() < until:
                roll(dice.choice(self.fleet.workers()), DRAIN_S + UNUSED_S)
                self.fleet.wait_until_whole()  # one at a time
                self.num_restarts += 1
                next_restart += restart_every_s


def roll(worker: Process, timeout_s: float) -> None:
    """Let a worker finish its work, and restart it on the same ports. Call on the main thread."""
    worker.terminate()
    code = worker.wait_exited(timeout_s)
    assert code == 0, f"{worker.name} ended with {code}:\n{worker.read_log()[-3000:]}"
    worker.restart()


def ask_badly(fleet: ProcessFleet, dice: random.Random) -> str:
    """A request that must be refused at once."""
    prompts: Sequence[Sequence[int]] = ([], [10**9], [-1], [7] * 5000)
    asking = Asking(fleet.grpc_address, dice.choice(prompts), dice.choice((5, 10**9))).finish()
    return "refused" if asking.code is grpc.StatusCode.INVALID_ARGUMENT else "not refused"


def look_at(process: Process) -> Sample:
    """Private memory only: touched pages of the KV pool count as shared memory."""
    folder = Path(f"/proc/{process.pid}")
    line = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("RssAnon"))
    return Sample(int(line.split()[1]) * 1024, len(list((folder / "fd").iterdir())))


def find_growth(samples: Sequence[Sample]) -> tuple[float, float]:
    """Growth in bytes and files from the mean of the second quarter, after warm-up, to that of the last."""
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    size = sum(one.private_bytes for one in late) / len(late) - sum(one.private_bytes for one in early) / len(early)
    files = sum(one.num_files for one in late) / len(late) - sum(one.num_files for one in early) / len(early)
    return size, files


def run(minutes: float, num_clients: int, restart_every_s: float, seed: int) -> int:
    drain = [f"--drain-s={DRAIN_S:g}"]
    with run_fleet(2, 2, {"prefill": drain, "decode": drain}, lease_s=10) as fleet:
        soak = Soak(fleet)
        for case in build_cases(fleet, 2 * num_clients, seed):
            soak.cases.put(case)
        until = time.monotonic() + 60 * minutes
        clients = [
            threading.Thread(target=soak.keep_asking, args=(until, seed + index), daemon=True)
            for index in range(num_clients)
        ]
        for client in clients:
            client.start()
        soak.watch(until, restart_every_s, seed)
        for client in clients:
            client.join(5 * HANG_S)
            if client.is_alive():
                soak.tally.count("hung")
        try:
            unused = f"0 after {fleet.wait_until_unused(UNUSED_S):.2f} s"
        except AssertionError as error:
            unused = str(error)
            soak.tally.count("leaked")
    return report(soak, unused, minutes)


def report(soak: Soak, unused: str, minutes: float) -> int:
    """Print a table; return the exit code."""
    print(
        f"{minutes:g} minutes; {soak.num_restarts} restarts; requests: {dict(soak.tally.outcomes)}; "
        f"used pages at the end: {unused}"
    )
    for complaint in soak.tally.complaints:
        print(complaint)
    print("| process | private memory at first | at the end | growth | MiB/h | files at first | growth |")
    is_flat = True
    for name, samples in soak.samples.items():
        if len(samples) < SHOWN_SAMPLES:
            continue
        growth, files = find_growth(samples)
        hours = len(samples) * SAMPLE_S / 3600 * 0.625  # between the middles of the second and the last quarter
        first, last = samples[len(samples) // 4], samples[-1]
        is_judged = len(samples) >= JUDGED_SAMPLES
        is_grown = growth > max(GROWTH * first.private_bytes, SLACK_BYTES) or files > SLACK_FILES
        is_flat &= not (is_judged and is_grown)
        begin_mib, end_mib, growth_mib = (size / 2**20 for size in (first.private_bytes, last.private_bytes, growth))
        print(
            f"| {name} | {begin_mib:.1f} MiB | {end_mib:.1f} MiB | {growth_mib:+.2f} MiB "
            f"| {growth_mib / hours:+.1f} | {first.num_files} | {files:+.1f} |"
        )
    return 0 if is_flat and set(soak.tally.outcomes) <= ALLOWED else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument(
        "--restart-every-s", type=float, default=0.0, help="drain and restart a random worker; 0: never"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return run(options.minutes, options.streams, options.restart_every_s, options.seed)


if __name__ == "__main__":
    sys.exit(main())
