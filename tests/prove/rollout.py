"""Upgrades to other weights and back under load, while workers are killed: each answer is of one revision."""

import shutil
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
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


@dataclass
class Found:
    """What became of all answers."""

    outcomes: Counter[str] = field(default_factory=Counter)  # old, new, and what must not be
    complaints: list[str] = field(default_factory=list)
    num_kills: int = 0


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


def run(minutes: float, num_workers: int = 2) -> Found:
    """`num_workers`: of each role and revision."""
    with tempfile.TemporaryDirectory() as folder:
        other = write_other_weights(Path(folder) / "other")
        names = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(2 * num_workers)]
        flags = {
            name: [f"--model={other}", "--revision=new"] if int(name[-1]) >= num_workers else ["--revision=old"]
            for name in names
        }
        flags["gateway"] = [f"--admin-key={ADMIN_KEY}"]
        found = Found()
        with run_fleet(
            2 * num_workers, 2 * num_workers, flags=flags, lease_s=10, patience_s=HANG_S, forks=True
        ) as fleet:
            cases = {}
            for name in ("old", "new"):
                share_out(fleet, {name: 1.0})
                cases[name] = build_cases(fleet, NUM_STREAMS, 1)
            if any(old.answer == new.answer for old, new in zip(*cases.values(), strict=True)):
                raise AssertionError("both weights give the same answer")
            clients, killed = Clients(fleet, cases), list[Counter[str]]()
            until = time.monotonic() + 60 * minutes
            shares = [
                {("new", "old")[upgrade % 2]: share} for upgrade in range(NUM_UPGRADES) for share in STAGES
            ]  # fmt: skip
            pause_s = 60 * minutes / len(shares)

            def upgrade() -> None:
                for one in shares:
                    share_out(fleet, one)
                    time.sleep(pause_s)

            upgrading = threading.Thread(target=upgrade, daemon=True)
            upgrading.start()
            killed.append(disturb(fleet, until, KILL_EVERY_S, 1))
            upgrading.join(TOO_LONG_S)
            tally = clients.finish()
            found.outcomes, found.complaints = tally.outcomes, tally.complaints
            found.num_kills = killed[0].total()
            share_out(fleet, {})
            fleet.wait_until_whole()
            fleet.wait_until_unused(UNUSED_S)
        return found


def prove_rollout(report: Report, minutes: float) -> str:
    """Returns what was done."""
    found = run(minutes)
    report.num_answers += found.outcomes.total()
    report.num_wrong += found.outcomes["wrong"]
    is_right = set(found.outcomes) == {"old", "new"}
    report.require(is_right, f"rollout: {dict(found.outcomes)}; {found.complaints[:3]}")
    return (
        f"{NUM_UPGRADES} upgrades to other weights and back under {NUM_STREAMS} streams, {found.num_kills} workers "
        f"killed: {found.outcomes['old']} answers of one revision, {found.outcomes['new']} of the other"
    )


if __name__ == "__main__":
    print(run(1.5))
