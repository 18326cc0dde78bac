"""What is shown of a run while it goes on."""

import re
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rabo.exchange.cost import Cost
from rabo.federation.ledger import Coverage
from rabo.federation.rounds import Round
from rabo.runs.live import BLOCKS, LiveView, PlainLines, Progress, sparkline, view_of
from rabo.runs.writers import Start


def start(rounds=10, history=(), falls=False, every=1):
    config = {"task": "digits", "algorithm": "rabo"}
    return Start(Path("run"), config, "accuracy", falls, rounds, history, every)


def done(number, **metrics):
    covered = Coverage(2, 30, 0.75, 0.1)
    return Round(
        number,
        metrics,
        Cost(10),
        {"x": covered, "y": covered},
        {0: 1.0, 1: 0.5},
        {2: "no submodel fits"},
        total=Cost(2_000_000, bytes_up=3000, bytes_down=1000),
        relative_cost={"multiply_adds": 0.25, "bytes_up": 0.5, "bytes_down": 0.5},
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(2, 50))
def test_a_sparkline_is_as_wide_as_asked_and_follows_the_order_of_numbers(values, width):
    drawn = sparkline(sorted(values), width)
    assert len(drawn) == min(width, len(values))
    heights = [BLOCKS.index(block) for block in drawn]
    assert heights == sorted(heights)
    if min(values) < max(values):
        assert (heights[0], heights[-1]) == (0, len(BLOCKS) - 1)


def test_what_is_no_number_leaves_a_gap_in_a_sparkline():
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([float("inf")]) == ""


@given(st.floats(0.1, 100), st.integers(3, 60), st.integers(0, 20))
def test_time_left_is_exact_where_rounds_take_equally_long(seconds, rounds, before):
    now = 0.0
    history = [done(i) for i in range(before)]
    progress = Progress(start(before + rounds, history), clock=lambda: now)
    now += 50.0  # a first round that also prepares
    progress.add(done(before))
    for i in range(1, rounds - 1):
        now += seconds
        progress.add(done(before + i))
    assert progress.seconds_left() == pytest.approx(seconds, rel=1e-6)


def test_time_left_is_that_of_the_mean_round_without_the_first():
    now = 0.0
    progress = Progress(start(10, []), clock=lambda: now)
    for i, seconds in enumerate([50.0, 1.0, 2.0, 6.0]):
        now += seconds
        progress.add(done(i))
    assert progress.seconds_left() == pytest.approx(6 * 3.0)


@given(st.integers(1, 9), st.integers(2, 40), st.data())
def test_time_left_counts_the_evaluations_to_come(every, rounds, data):
    plan, now = start(rounds, every=every), 0.0
    progress = Progress(plan, clock=lambda: now)
    seconds = [1.0 + 10.0 * plan.evaluates(i + 1) for i in range(rounds)]
    before = data.draw(st.integers(min(every, rounds - 1) + 1, rounds))
    for i in range(before):
        now += seconds[i]
        progress.add(done(i))
    left = progress.seconds_left() if before < rounds else 0.0
    assert left == pytest.approx(sum(seconds[before:]))


def drawn_by(view, *rounds, **options):
    view.begin(start(**options))
    for one in rounds:
        view.add(one)
    view.end("finished")


def test_the_live_view_shows_round_metric_hypergradient_coverage_cost_and_clients():
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=120, legacy_windows=False)
    [view] = view_of(console)
    assert isinstance(view, LiveView)
    drawn_by(
        view,
        done(0, accuracy=0.5, residual=0.125, hypergradient_norm=3.0),
        done(1, accuracy=0.75, residual=0.0625, hypergradient_norm=1.5),
    )
    last = screen.getvalue().rpartition("digits · rabo")[2]
    for shown in (
        "round 2 of 10",
        "0.75  ▁█  best 0.75",
        "1.5  █▁",
        "0.0625",
        "C*_x 2, 75% trained",
        "2 M multiply-adds (25% of the full model)",
        "4 kB (50% up, 50% down)",
        "2 took part · 1 sat out",
        "left",
    ):
        assert shown in last, shown


def test_the_best_of_a_metric_that_falls_is_its_least():
    progress = Progress(start(falls=True, history=[done(0, accuracy=0.5), done(1, accuracy=0.75)]))
    assert progress.lines()["accuracy"].endswith("best 0.5")


def test_without_a_terminal_about_ten_plain_lines_tell_the_same():
    text = StringIO()
    [view] = view_of(Console(file=text, force_terminal=False))
    assert isinstance(view, PlainLines)
    drawn_by(view, *(done(i, accuracy=i / 100) for i in range(95)), rounds=95)
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [*(f"{i}/95" for i in range(9, 95, 9)), "95/95"]
    assert "accuracy 0.94" in lines[-1]
    assert "\x1b" not in text.getvalue()


@pytest.mark.parametrize(
    ("rounds", "every", "told"),
    [
        (25, 5, [*range(2, 25, 2), 5, 15, 25]),
        (95, 4, [*range(12, 95, 12), 95]),
        (7, 50, range(1, 8)),
    ],
)
def test_plain_lines_are_there_for_evaluations(rounds, every, told):
    text = StringIO()
    [view] = view_of(Console(file=text, force_terminal=False))
    plan = start(rounds, every=every)
    judged = [{"accuracy": 0.5} if plan.evaluates(i + 1) else {} for i in range(rounds)]
    drawn_by(view, *(done(i, **judged[i]) for i in range(rounds)), rounds=rounds, every=every)
    lines = {int(line.split()[1].split("/")[0]): line for line in text.getvalue().splitlines()}
    assert sorted(lines) == sorted(told)
    assert all(("accuracy 0.5" in line) == plan.evaluates(i) for i, line in lines.items())


def test_quiet_shows_nothing():
    assert view_of(Console(), quiet=True) == []


class Terminal(StringIO):
    """Lines on a screen that wraps them when it becomes narrower, as most terminals do."""

    def __init__(self):
        super().__init__()
        self.rows, self.row, self.column = [""], 0, 0

    def write(self, text):
        for part in re.split("(\x1b\\[[0-9;?]*[A-Za-z]|\r|\n)", text):
            number = int((re.findall(r"\d+", part) or ["1"])[0])
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part == "\r":
                self.column = 0
            elif part.endswith("A") and part.startswith("\x1b"):
                self.row = max(0, self.row - number)
            elif part.endswith("K") and part.startswith("\x1b"):
                self.rows[self.row] = ""
            elif part and not part.startswith("\x1b"):
                kept = self.rows[self.row][: self.column].ljust(self.column)
                self.rows[self.row] = kept + part
                self.column += len(part)
        return len(text)

    def narrow(self, width):
        wrapped = []
        for i, row in enumerate(self.rows):
            wrapped += [row[j : j + width] for j in range(0, max(1, len(row)), width)]
            if i == self.row:
                cursor = len(wrapped) - 1
        self.rows, self.row, self.column = wrapped, cursor, len(wrapped[cursor])


def test_a_narrower_terminal_shows_the_live_view_once():
    screen = Terminal()
    console = Console(file=screen, force_terminal=True, width=120, legacy_windows=False)
    console.print("a line above")
    view = LiveView(console)
    view.begin(start())
    view.add(done(0, accuracy=0.5, hypergradient_norm=3.0))
    view.refresh()
    for width in (90, 60, 45):
        console.width = width
        screen.narrow(width)
        view.refresh()
    view.end("interrupted")
    shown = "\n".join(screen.rows)
    assert screen.rows[0] == "a line above"
    assert shown.count("digits ·") == 1
    assert shown.count("hypergradient") == 1
    assert shown.count("cost so far") == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_run_whose_first_round_is_given_up_is_shown(is_terminal):
    text = StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100, legacy_windows=False)
    [view] = view_of(console)
    nobody = Coverage(0, 0, 0.0, 0.0)
    covered = {"x": nobody, "y": nobody}
    skipped = Round(0, {}, Cost(), covered, {}, {0: "its node is gone"}, skipped="nobody came")
    drawn_by(view, skipped, rounds=3)
    assert "1 of 3" in text.getvalue() or "1/3" in text.getvalue()
    if is_terminal:
        assert "round given up" in text.getvalue()
