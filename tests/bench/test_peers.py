"""`bench.peers`: ratios of rounds, tables, commands, and servers that are started and stopped; no peer is needed."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from bench.load.processes import find_tree, read_cpu_s, read_pss_bytes
from bench.peers.__main__ import choose, read_result
from bench.peers.documents import describe_group
from bench.peers.figures import build_cell, build_table, find_ratios, put_between, read_row
from bench.peers.processes import start, stop
from bench.peers.session import Places, build_command
from bench.peers.systems import SYSTEMS, Group, System
from bench.peers.turns import run_group
from runtime.settings import ConfigError
from tests.support.live import wait_until

ROUNDS: dict[str, list[dict[str, float]]] = {
    "a": [{"ttft_ms": 100}, {"ttft_ms": 400}, {"ttft_ms": 200}],
    "b": [{"ttft_ms": 50}, {}, {"ttft_ms": 300}],
}


class TestFigures:
    def test_ratios_are_of_one_round(self) -> None:
        assert find_ratios(ROUNDS, "b", "a", "ttft_ms") == [0.5, 1.5]  # without the round in which b failed
        assert find_ratios(ROUNDS, "c", "a", "ttft_ms") == []

    def test_cells(self) -> None:
        assert build_cell(ROUNDS, "a", "a", "ttft_ms") == "200 ms"
        assert build_cell(ROUNDS, "b", "a", "ttft_ms") == "175 ms (1.00x, 0.50-1.50)"
        assert build_cell(ROUNDS, "c", "a", "ttft_ms") == "-"

    @pytest.mark.parametrize(
        ("figure", "theirs", "cell"),
        [
            ("tpot_ms", 150, "150 ms (1.50x: worse)"),
            ("tpot_ms", 50, "50.0 ms (0.50x: better)"),
            ("tokens_per_s", 150, "150/s (1.50x: better)"),
            ("tokens_per_s", 50, "50.0/s (0.50x: worse)"),
        ],
    )
    def test_a_cell_says_which_side_is_better(self, figure: str, theirs: float, cell: str) -> None:
        assert build_cell({"a": [{figure: 100}], "b": [{figure: theirs}]}, "b", "a", figure) == cell

    def test_markers(self) -> None:
        once = put_between("# Head\n", "x", "one")
        assert once == "# Head\n\n<!-- bench-peers: x -->\none\n<!-- /bench-peers: x -->\n"
        assert put_between(once + "tail\n", "x", "two") == once.replace("one", "two") + "tail\n"

    def test_a_row_is_read_from_a_table(self) -> None:
        text = put_between("", "x", build_table({"r": ROUNDS}, ["a", "b"]))
        assert read_row(text, "x", "r: ttft") == {"a": 200, "b": 175}
        with pytest.raises(ValueError, match="'r: none' between the markers of x"):
            read_row(text, "x", "r: none")


class TestChoice:
    @pytest.mark.parametrize("wrong", [("x", "", ""), ("bf16", "x", ""), ("bf16", "", "x")])
    def test_unknown_names(self, wrong: tuple[str, str, str]) -> None:
        with pytest.raises(ConfigError, match="x is not known"):
            choose(*wrong)

    def test_commands(self, tmp_path: Path) -> None:
        places = Places(tmp_path / "model", tmp_path / "peers", tmp_path, 2)
        with pytest.raises(ConfigError, match="install vllm"):
            build_command(SYSTEMS["vllm"], places, 1)
        (tmp_path / "peers" / "vllm" / "bin").mkdir(parents=True)
        (tmp_path / "peers" / "vllm" / "bin" / "python").touch()
        command, variables = build_command(SYSTEMS["vllm-ngram"], places, 1234)
        assert json.loads(command[-1])["method"] == "ngram"
        assert {"--port", "1234", str(tmp_path / "model")} <= set(command)
        assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
        assert build_command(SYSTEMS["baton"], places, 1)[0][:4] == [sys.executable, "-m", "cli.main", "serve"]


class TestProcesses:
    def test_a_tree_is_measured_and_ended(self, tmp_path: Path) -> None:
        child = "import time; data = b'x' * (32 << 20); print('up', flush=True); time.sleep(600)"
        parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
        started = start([sys.executable, "-c", parent], {}, tmp_path / "log")
        try:
            wait_until(lambda: "up" in started.read_end())
            pids = find_tree(started.process.pid)
            assert len(pids) == 2
            assert read_pss_bytes(started.process.pid) > 32 << 20
            assert read_cpu_s(started.process.pid) > 0
        finally:
            stop(started)
        assert started.has_ended
        wait_until(lambda: not any(map(_is_running, pids)))


def _is_running(pid: int) -> bool:
    """A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_group_whose_servers_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.session.IDLE_S", 0.0)
    monkeypatch.setattr("bench.peers.turns.SYSTEMS", {"a": System("{python} -c 'raise SystemExit(\"no room\")'")})
    places, out = Places(tmp_path / "model", tmp_path, tmp_path, 2), tmp_path / "r.json"
    result = read_result(out)
    group = Group("t", ("a",), ("tpot",))
    asyncio.run(run_group("g", group, places, 1, result, out))
    assert read_result(out) == result
    assert "no room" in result["groups"]["g"]["missing"]["a"]
    assert "Not measured: a (a ended at its start: no room" in describe_group(group, result["groups"]["g"])
