"""What long calls show while they go on: the display, and a run on it, given its events."""

from __future__ import annotations

import io
import re
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from schedsearch import progress
from schedsearch.cli import render
from schedsearch.config import Config
from schedsearch.measurement import Outcome
from schedsearch.progress import Clock, Display, Log, Notebook, Terminal
from schedsearch.session.observer import ArmStart, Phase, PhaseName, RunStart, TaskStart, Trial
from schedsearch.session.progress import RunProgress
from schedsearch.session.summary import RunSummary, Shares
from schedsearch.space import SpaceSize
from schedsearch.workload import Workload

WORKLOADS = [Workload.conv2d(n=n, h=8, w=8, c=8, k=8, r=3, s=3) for n in range(1, 31)]
ARM = ArmStart("conv2d_cpu", SpaceSize(100, True), Config(x=1), 0)
START = RunStart(
    "run",
    "cpu:key",
    tuple(TaskStart(w, w.label, 1.0, (ARM,)) for w in WORKLOADS),
    90,
    None,
    resumed=0,
)
END = RunSummary("run", "t.db", "cpu:key", (), 1.0, Shares(0.5, 0.3, 0.1), "trials")


def trial(task: int, outcome: Outcome | None, time_ns: float | None, done: int) -> Trial:
    return Trial(
        task, WORKLOADS[task], "conv2d_cpu", Config(x=1), outcome, time_ns, "", outcome is not None, done,
        best_ns=1000.0, default_ns=2000.0, elapsed_s=1.0,
    )  # fmt: skip


class Still(Clock):
    """Real time, in which a display draws only when it is told something."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait()


class Frozen(Still):
    seconds = 0.0

    def now(self) -> float:
        return self.seconds


def terminal(width: int) -> tuple[Display, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, height=60)
    return Display(lambda: Terminal(console), Still()), screen


@pytest.fixture(autouse=True)
def draw_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    monkeypatch.setattr(Terminal, "every_s", 0.0)


def named(start: RunStart, names: dict[int, str]) -> RunStart:
    tasks = [replace(task, name=names.get(index, task.name)) for index, task in enumerate(start.tasks)]
    return replace(start, tasks=tuple(tasks))


def test_the_live_table_shows_the_tasks_that_changed_last() -> None:
    display, screen = terminal(160)
    live = RunProgress(display)
    live.on_start(named(START, {2: "the [third] task"}))
    live.on_trial(trial(2, Outcome.OK, 1000.0, 1))
    live.on_trial(trial(29, Outcome.WRONG_ANSWER, None, 2))
    live.on_trial(trial(29, None, 1500.0, 2))
    screen.truncate(0)
    live.on_trial(trial(29, Outcome.WRONG_ANSWER, None, 3))
    text = screen.getvalue()
    live.on_end(END)
    display.close()
    assert "3 of 90 trials" in text and "left" in text
    assert "the [third] task" in text and "2 wrong_answer" in text
    assert "2.00x" not in text, "single measurements do not compare"
    assert "14 tasks more" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_digit_and_no_unit_is_ever_cut(width: int) -> None:
    display, screen = terminal(width)
    live = RunProgress(display)
    live.on_start(named(START, {n: f"stage {n} of a network with a long name" for n in range(len(WORKLOADS))}))
    live.on_trial(replace(trial(2, Outcome.OK, 9163.0, 1), best_ns=9163.0, default_ns=12345.0))
    for done, outcome in enumerate(Outcome, 2):
        live.on_trial(replace(trial(2, outcome, 9163.0 if outcome is Outcome.OK else None, done), best_ns=9163.0))
    screen.truncate(0)
    screen.seek(0)
    live.on_trial(replace(trial(3, Outcome.OK, 104.25e6, 40), best_ns=104.25e6, default_ns=2.125e9))
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in screen.getvalue().splitlines()]
    display.close()
    assert max(map(len, lines)) <= width
    (header,) = [line for line in lines if line.startswith("task")]
    (row,) = [line for line in lines if "104.2 ms" in line]
    assert {"trials", "best"} <= set(header.split())
    assert "stage 3" in row and "..." not in row
    assert ("2.125 s" in row) == ("default" in header)
    assert width < 120 or "default" in header


@pytest.mark.parametrize(
    ("phase", "text"),
    [("building", "compiling the first candidates"), ("preparing", "preparing inputs"), ("measuring", "measuring")],
)
def test_until_the_first_result_the_live_view_describes_the_run(phase: PhaseName, text: str) -> None:
    display, screen = terminal(80)
    display.stage("planning 2 tasks")
    assert "planning 2 tasks" in screen.getvalue()
    screen.truncate(0)
    live = RunProgress(display)
    live.on_start(START)
    assert "starting" in screen.getvalue() and "planning" not in screen.getvalue()
    live.on_phase(Phase(phase, 0.1))
    display.close()
    assert text in screen.getvalue() and "0 of 90" not in screen.getvalue()


def test_lines_of_a_log_come_now_and_then() -> None:
    lines: list[str] = []
    display = Display(lambda: Log(lines.append), Still())
    live = RunProgress(display)
    live.on_start(START)
    assert lines == ["0 s: starting"]
    for done in range(1, 50):
        live.on_trial(trial(0, Outcome.OK, 1000.0, done))
    display.close()
    assert len(lines) == 1, "all of that took less than five seconds"
    assert live.line().startswith("0 s: 49 of 90 trials") and live.line().endswith("best 1 us")


@pytest.mark.parametrize(
    ("trials", "time_s", "sizes", "text"),
    [
        (90, None, 100, "10 of 90 trials, 2.0 trials/s, at most 40 s left"),
        (90, None, 1, "10 of 30 trials, 2.0 trials/s, at most 10 s left"),  # a space of one configuration for each task
        (None, 12.0, 100, "10 trials, 2.0 trials/s, at most 7 s left"),
        (90, 12.0, 100, "10 of 90 trials, 2.0 trials/s, at most 7 s left"),
        (None, 4.0, 100, "10 trials, 2.0 trials/s"),
    ],
)
def test_the_time_that_is_left_is_that_of_the_rest_of_the_budget(
    trials: int | None, time_s: float | None, sizes: int, text: str
) -> None:
    clock = Frozen()
    display = Display(lambda: Log(lambda line: None), clock)
    live = RunProgress(display)
    arms = (replace(ARM, size=SpaceSize(sizes, True)),)
    tasks = tuple(replace(task, arms=arms) for task in START.tasks)
    live.on_start(replace(START, trials=trials, time_s=time_s, tasks=tasks))
    clock.seconds = 5.0
    live.on_trial(trial(0, Outcome.OK, 1000.0, 10))
    assert live.headline() == f"5 s: {text}"
    display.close()


def test_a_notebook_draws_in_one_place_and_ends_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            shown[-1] = html

    def display(html: str, display_id: bool) -> Handle:
        assert display_id
        shown.append(html)
        return Handle()

    module = SimpleNamespace(HTML=lambda html: html, display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    notebook = Notebook()
    notebook.draw(lambda width: ["0 s: a <b>"])
    notebook.draw(lambda width: ["1 s: a <b>"])
    assert shown == ["<pre>1 s: a &lt;b&gt;</pre>"]
    notebook.close()
    assert shown == [""]


@pytest.mark.parametrize(
    ("time_ns", "text"), [(None, "-"), (12.3456, "12.35 ns"), (4310.0, "4.31 us"), (2_500_000.0, "2.5 ms"), (3e9, "3 s")]
)
def test_times_are_given_in_the_unit_that_reads_best(time_ns: float | None, text: str) -> None:
    assert render.duration(time_ns) == text


@pytest.mark.parametrize(("time_s", "text"), [(0.2, "1 s"), (59, "59 s"), (125, "2 min 5 s"), (4800, "1 h 20 min")])
def test_waits(time_s: float, text: str) -> None:
    assert render.seconds(time_s) == text


def test_shares_add_up_to_one() -> None:
    shares = Shares(device=0.5, build=0.25, tuner=0.1, preparing=0.05)
    assert str(shares) == "device busy 50%, preparing 5%, waiting for a build 25%, for the tuner 10%, other 10%"
