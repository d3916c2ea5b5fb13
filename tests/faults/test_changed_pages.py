"""Pages whose bytes change on their way. Row 28 of the fault list."""

from pathlib import Path

from tests.support.fault_answers import Truth, ask, failed_attempts, read_events
from tests.support.fleet import run_fleet


def test_row_28_pages_that_changed_on_their_way_are_not_used(truth: Truth, tmp_path: Path) -> None:
    """The request goes on in another attempt; the next ones are handed over as ever."""
    changes = tmp_path / "prefill-0"
    programs = {"prefill-0": ("tests.faults.corrupting_worker", str(changes))}
    with run_fleet(flags={"decode": ["--verify-transfers"]}, programs=programs) as fleet:
        truth.check_canary(fleet)
        changes.touch()
        stream = ask(fleet)
        truth.check(stream)
        assert not changes.exists(), "no offer was changed"
        assert fleet.count("decode", "offers_refused_total", {"reason": "checksum"}) == 1
        assert fleet.count("prefill", "offers_refused_total", {"reason": "checksum"}) == 1
        (failure,) = failed_attempts(fleet.gateway.read_log())
        assert "refused the offer (checksum): page " in failure
        (refused,) = read_events(fleet["decode-0"].read_log(), "offer refused")
        assert refused["level"] == "error" and refused["reason"] == "checksum"
        accepted = fleet.count("decode", "offers_accepted_total")
        truth.check_canary(fleet)
        assert fleet.count("decode", "offers_accepted_total") == accepted + 1
        fleet.wait_until_unused()
        print(f"row 28, changed pages: the client's longest pause was {stream.longest_pause_s:.1f} s")
