"""Lines beside live answers, against machines on which a line more costs something or nothing."""

from math import inf

import pytest

from gateway.batches.pace import COST, REST, Pace, count_room

TICK_S = 0.1


class Machine:
    """Live answers and lines in virtual time; each line makes every gap longer by `cost`."""

    def __init__(self, cost: float, line_s: float = 1.0, gap_s: float = 0.01) -> None:
        self.pace, self.gaps_s, self.num_gaps = Pace(), 0.0, 0
        self.cost, self.line_s, self.gap_s = cost, line_s, gap_s
        self.now = 0.0
        self.lines: list[float] = []  # when each began
        self.seen: list[int] = []  # lines, at each tick

    def run(self, seconds: float, num_live: int) -> "Machine":
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            gap_s = self.gap_s * (1 + self.cost * len(self.lines))
            num_gaps = int(num_live * TICK_S / gap_s)
            self.gaps_s, self.num_gaps = self.gaps_s + (num_gaps * gap_s if num_gaps else 0.0), self.num_gaps + num_gaps
            self.end([began for began in self.lines if self.now - began >= self.line_s - TICK_S / 2])
            most = int(min(self.pace.look(self.now, num_live, self.gaps_s, self.num_gaps), 20))
            self.end(self.lines[most:])
            for _ in range(most - len(self.lines)):
                self.lines.append(self.now)
                self.pace.begin()
            self.seen.append(len(self.lines))
        return self

    def end(self, lines: list[float]) -> None:
        for began in lines:
            self.lines.remove(began)
            self.pace.end()

    def share(self, seconds: float) -> float:
        """Of the last ticks, those with a line."""
        ticks = self.seen[-round(seconds / TICK_S) :]
        return sum(count > 0 for count in ticks) / len(ticks)


def test_without_live_requests_any_number_runs() -> None:
    assert Pace().look(0.0, 0, 0.0, 0) == inf
    assert Machine(1.0).run(10, 0).seen[-1] == 20


def test_lines_that_cost_nothing_become_more_and_more() -> None:
    machine = Machine(0.0).run(30, 4)
    assert machine.seen[0] <= 1, "the quiet gap is not known yet"
    assert machine.seen[-1] == 20


@pytest.mark.parametrize("cost", [0.003, 0.01, 0.02])
def test_as_many_lines_run_as_cost_little(cost: float) -> None:
    machine = Machine(cost, line_s=0.3)
    machine.run(30, 4)
    mean = sum(machine.seen[-200:]) / 200
    assert 0.25 * (COST - 1) / cost <= mean <= 1.5 * (COST - 1) / cost


@pytest.mark.parametrize("line_s", [0.6, 3.0])
def test_lines_that_cost_much_get_a_small_part_of_the_time_but_some(line_s: float) -> None:
    machine = Machine(0.3, line_s).run(20, 4).run(40 * line_s, 4)
    assert 0.5 / REST <= machine.share(40 * line_s) <= 2 / REST


def test_live_requests_that_come_back_find_few_lines() -> None:
    machine = Machine(0.3).run(20, 4).run(10, 0)
    assert machine.seen[-1] == 20
    machine.run(0.1, 4)
    assert machine.seen[-1] <= 1


def test_a_live_request_without_tokens_does_not_hold_lines_up() -> None:
    machine = Machine(0.3)
    machine.gap_s = inf
    assert machine.run(20, 1).seen[-1] == 1


def test_fewer_live_answers_are_measured_anew() -> None:
    """With half the live answers the gap is half as long: lines may not make it as long as before."""
    machine = Machine(0.02, line_s=0.3, gap_s=0.02).run(30, 8)
    machine.gap_s = 0.01
    machine.run(30, 4)
    assert sum(machine.seen[-100:]) / 100 <= 2 * (COST - 1) / 0.02


@pytest.mark.parametrize(
    ("places", "free", "waiting", "room"),
    [(64, 64, 0, 12), (64, 17, 0, 1), (64, 16, 0, 0), (64, 64, 1, 0), (1, 1, 0, 0), (2, 2, 0, 1), (0, 0, 0, 0)],
)
def test_places_are_left_for_live_requests(places: int, free: int, waiting: int, room: int) -> None:
    assert count_room(places, free, waiting) == room
