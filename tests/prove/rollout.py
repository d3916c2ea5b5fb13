"""Upgrades to other weights and back under load, while workers are killed: each answer is of one revision.

python -m tests.prove.rollout --earlier FOLDER       the old revision runs the code of another checkout of Baton
"""

import argparse
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from demo.paths import TARGET_DIR
from tests.faults.chaos import HANG_S, TOO_LONG_S, UNUSED_S, Case, Tally, build_cases, disturb, judge
from tests.prove.report import Report
from tests.support.asking import Asking
from tests.support.fleet import ProcessFleet, run_fleet
from tests.support.live import HTTP_S

NUM_STREAMS, NUM_UPGRADES, KILL_EVERY_S = 32, 5, 6.0
ADMIN_KEY = "sixteen-characters-of-a-key"
STAGES = (0.0, 0.3, 1.0)  # shares of the revision that comes


def write_other_weights(folder: Path) -> Path:
    """The demo model, and other answers."""
    shutil.copytree(TARGET_DIR, folder)
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor
        + 0.3 * tensor.float().std().nan_to_num() * torch.randn(tensor.shape, generator=generator).to(tensor)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def share_out(fleet: ProcessFleet, shares: dict[str, float]) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    httpx.post(f"{fleet.url}/v1/revisions", json=shares, headers=headers, timeout=HTTP_S).raise_for_status()


class Clients:
    """Each sends one request after the other."""

    def __init__(self, fleet: ProcessFleet, cases: dict[str, list[Case]]) -> None:
        self._fleet, self._cases, self._tally = fleet, cases, Tally()
        self._next = 0
        self.is_over = threading.Event()
        self._threads = [threading.Thread(target=self._keep_asking, daemon=True) for _ in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def _keep_asking(self) -> None:
        while not self.is_over.is_set():
            with self._tally.lock:
                number, self._next = self._next % len(self._cases["old"]), self._next + 1
            pair = {name: cases[number] for name, cases in self._cases.items()}
            case = pair["old"]
            asking = Asking(self._fleet.grpc_address, case.prompt, len(case.answer), TOO_LONG_S).finish()
            judged = {name: judge(one, asking) for name, one in pair.items()}
            right = [name for name, outcome in judged.items() if outcome == "right"]
            if len(right) == 1:
                self._tally.count(right[0])
            else:
                self._tally.add(case, asking)

    def finish(self) -> Tally:
        self.is_over.set()
        for thread in self._threads:
            thread.join(TOO_LONG_S)
            if thread.is_alive():
                self._tally.count("hung")
        return self._tally


def run(minutes: float, num_workers: int = 2, earlier: Path | None = None) -> tuple[Tally, Counter[str]]:
    """Returns outcomes, `old` and `new` where nothing is wrong, and kills. `num_workers`: of each role and revision.

    `earlier`: the checkout whose code the old revision runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        other = write_other_weights(Path(folder) / "other")
        names = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(2 * num_workers)]
        flags = {
            name: [f"--model={other}", "--revision=new"] if int(name[-1]) >= num_workers else ["--revision=old"]
            for name in names
        }
        flags["gateway"] = [f"--admin-key={ADMIN_KEY}"]
        with run_fleet(
            2 * num_workers,
            2 * num_workers,
            flags=flags,
            lease_s=10,
            patience_s=HANG_S,
            forks=not earlier,
            starts=False,
        ) as fleet:
            if earlier is not None:
                for worker in [one for one in fleet.workers() if "--revision=old" in one.flags]:
                    worker.checkout = earlier
            fleet.start()
            cases = {}
            for name in ("old", "new"):
                share_out(fleet, {name: 1.0})
                cases[name] = build_cases(fleet, NUM_STREAMS, 1)
            if any(old.answer == new.answer for old, new in zip(*cases.values(), strict=True)):
                raise AssertionError("both weights give the same answer")
            clients = Clients(fleet, cases)
            upgrading = threading.Thread(target=upgrade, args=(fleet, 60 * minutes), daemon=True)
            upgrading.start()
            kills = disturb(fleet, time.monotonic() + 60 * minutes, KILL_EVERY_S, 1)
            upgrading.join(TOO_LONG_S)
            tally = clients.finish()
            share_out(fleet, {})
            fleet.wait_until_whole()
            fleet.wait_until_unused(UNUSED_S)
        return tally, kills


def upgrade(fleet: ProcessFleet, seconds: float) -> None:
    """To the new revision and back, in stages."""
    shares = [{("new", "old")[number % 2]: share} for number in range(NUM_UPGRADES) for share in STAGES]
    for one in shares:
        share_out(fleet, one)
        time.sleep(seconds / len(shares))


def prove_rollout(report: Report, minutes: float) -> str:
    """Returns what was done."""
    tally, kills = run(minutes)
    outcomes = tally.outcomes
    report.num_answers += outcomes.total()
    report.num_wrong += outcomes["wrong"]
    report.require(set(outcomes) == {"old", "new"}, f"rollout: {dict(outcomes)}; {tally.complaints[:3]}")
    return (
        f"{NUM_UPGRADES} upgrades to other weights and back under {NUM_STREAMS} streams, {kills.total()} workers "
        f"killed: {outcomes['old']} answers of one revision, {outcomes['new']} of the other"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--earlier", type=Path)
    options = parser.parse_args()
    tally, kills = run(options.minutes, earlier=options.earlier)
    print(f"{dict(tally.outcomes)}, {kills.total()} workers killed", *tally.complaints[:5], sep="\n")
    raise SystemExit(set(tally.outcomes) != {"old", "new"})


if __name__ == "__main__":
    main()
