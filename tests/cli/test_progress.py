"""Displays of a run, fed with events."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from incvec.cli import progress
from incvec.cli.progress import LiveDisplay, LogDisplay, RunStatus, TotalEstimate, follow, follow_sweep, short_names
from incvec.engine import events as ev
from incvec.engine.scheduler import Requeued


def run_events() -> Iterator[ev.Event]:
    yield ev.Started("podnet", 2, "eager", "cpu", "task 1, stage 1, epoch 3")
    yield ev.StageStarted(0, "main", 100, 3, 576, 9)
    for epoch in range(4, 101):
        yield ev.Tick()
        yield ev.EpochEnded(0, "main", epoch, 100, {"nca": 1.0, "flat": 0.25}, epoch / 200, 65.0)
    yield ev.Tick(waiting=True)
    yield ev.Notice("[bold]a notice[/bold]")
    yield ev.TaskEnded(0, 91.234, [91.234])
    yield ev.Finished({"answer": 42}, "record.json")


def test_log_has_one_line_per_stage_and_task() -> None:
    text = io.StringIO()
    assert follow(run_events(), Console(file=text, width=40)) == {"answer": 42}
    lines = text.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[9:] for line in lines] == [
        "podnet: 2 tasks, eager engine on cpu, resuming from task 1, stage 1, epoch 3",
        "task 1/2 main: 576 images, 100 epochs of 9 steps, 3 of them done",
        "[bold]a notice[/bold]",
        "task 1/2 finished: accuracy 91.23 % on all classes seen (by task: 91.2)",
        "record written to record.json",
    ]


def test_log_prints_epochs_after_an_interval() -> None:
    text = io.StringIO()
    display = LogDisplay(Console(file=text, width=40), interval=0.0)
    for event in run_events():
        display.show(event)
    lines = [line for line in text.getvalue().splitlines() if "main epoch" in line]
    assert len(lines) == 97
    assert lines[-1].endswith("epoch 100/100: loss 1.25 (nca 1, flat 0.25), 50% of the run, 1 min 05 s left")


def test_live_display_shows_the_bar_and_keeps_task_results() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True, color_system=None)
    display = LiveDisplay(console)

    def rendered() -> str:
        with console.capture() as captured:
            console.print(display.render())
        return captured.get()

    for event in run_events():
        display.show(event)
        if isinstance(event, ev.EpochEnded) and event.epoch == 50:
            shown = rendered()
            for part in (
                "podnet",
                " 25%",
                "1 min 05 s left",
                "task 1/2 main",
                "epoch 50/100",
                "loss 1.25",
                "flat 0.25",
            ):
                assert part in shown
    assert "accuracy 91.2 %" in rendered()
    display.close()
    assert "task 1/2 finished: accuracy 91.23 %" in text.getvalue()
    assert follow(run_events(), console) == {"answer": 42}


def test_interrupted_run_is_closed_at_once() -> None:
    closed = []

    def events() -> Iterator[ev.Event]:
        try:
            yield from run_events()
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        follow(events(), Console(file=io.StringIO()))
    assert closed == [True]


def test_sweep_has_an_estimate_for_each_run_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs, one of them finished before: after 20 s the first has done half of what it had left."""
    clock = iter(range(0, 10_000, 5))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(progress, "SWEEP_INTERVAL", 0.0)

    def epoch(fraction: float) -> ev.EpochEnded:
        return ev.EpochEnded(0, "main", 1, 2, {"ce": 1.0}, fraction, 33.0)

    record = {"metrics": {"AA": 1.0, "LA": 2.0, "FM": None}}
    events: list[tuple[int, ev.Event]] = [
        (0, ev.Finished(record, "record.json", already=True)),
        (1, ev.Notice("ivt changes nothing in this run", warning=True)),
        (1, ev.Notice("base task loaded")),
        (1, epoch(0.2)),  # resumed: 0.2 was done before
        (1, epoch(0.6)),
    ]
    text = io.StringIO()
    follow_sweep(["a", "b", "c"], events, "three", Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    assert "b: ivt changes nothing in this run" in lines
    assert not any("base task loaded" in line for line in lines if line.startswith("b:"))
    estimates = [line for line in lines if "left in all" in line]
    assert len(estimates) == 1  # only after some work was measured
    # 0.4 of a run took 35 s by this clock, 0.4 of b and the whole of c are left: 1.4 / 0.4 * 35 s.
    found = re.fullmatch(
        r"1/3 finished; about 2 min (\d\d) s left in all; b task 1 main 1/2 60 %, 33 s left", estimates[0]
    )
    assert found is not None, estimates[0]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["digits-podnet-3-s0-net-small-b2de", "digits-podnet+ivt-3-s1-net-small-b2de"],
            ["podnet-s0", "podnet+ivt-s1"],
        ),
        (["digits-podnet-3-s0", "digits-podnet-3-s0-interval5"], ["digits-podnet-3-s0", "interval5"]),
        (["digits-podnet-3-s0"], ["digits-podnet-3-s0"]),
        (["a-b-c", "a-c-b", "a-b-d-c"], ["a-b-c", "a-c-b", "a-b-d-c"]),  # short ones would be the same
    ],
)
def test_short_names_have_what_differs(names: list[str], expected: list[str]) -> None:
    assert short_names(names) == expected


def test_failed_runs_do_not_count_as_work_that_is_left() -> None:
    runs = [
        RunStatus("a", "training", fraction=0.5),
        RunStatus("b", "failed"),
        RunStatus("c", "finished", fraction=1.0),
    ]
    estimate = TotalEstimate(runs)
    estimate.began -= 15.0
    assert estimate.text() == "about 5 s left in all"


def test_sweep_on_several_machines_shows_them_and_runs_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SWEEP_INTERVAL", 0.0)
    events: list[tuple[int, ev.Event]] = [
        (0, ev.Started("a", 1, "eager", "cpu")),
        (0, ev.EpochEnded(0, "main", 1, 4, {"loss": 1.0}, 0.25, 60.0)),
        (0, Requeued("its worker on n1 was lost")),
    ]
    text = io.StringIO()
    runs = follow_sweep(["a"], events, "one", Console(file=text, width=200), lambda: "2 nodes")
    assert (runs[0].state, runs[0].seconds_left, runs[0].fraction) == ("queued again", None, 0.25)
    lines = text.getvalue().splitlines()
    assert "queued again: a: its worker on n1 was lost" in lines
    assert any(line.startswith("0/1 finished; ") and "2 nodes" in line for line in lines)
