"""Many runs at once in one thread, and several processes that share the runs of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.run import finish
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.errors import Busy
from incvec.methods.podnet import PODNet
from tests.conftest import always_saving_run, make_run, quick, same_record


def test_closing_the_events_stops_all_runs(few: Dataset, tmp_path: Path) -> None:
    runs = [make_run(few, tmp_path / str(seed), quick("finetune", seed=seed)) for seed in (0, 1)]
    events = run_concurrently([lambda run=run: run for run in runs], 2)  # type: ignore[misc]
    seen = set()
    for number, event in events:
        seen.add(number) if isinstance(event, ev.EpochEnded) else None
        if len(seen) == 2:
            break
    events.close()
    for seed in (0, 1):  # their folders are unlocked at once
        finish(make_run(few, tmp_path / str(seed), quick("finetune", seed=seed)))


def test_concurrent_runs_end_like_single_runs(few: Dataset, tmp_path: Path) -> None:
    """Five runs on three bases, at most two at a time."""
    cases = [quick("podnet", *addons, seed=seed) for seed in (0, 1) for addons in ((), ("ivt",))]
    cases.append(quick("podnet", seed=2))
    bases = tmp_path / "bases"
    runs = [make_run(few, tmp_path / str(n), given, bases) for n, given in enumerate(cases)]
    working: set[int] = set()
    most, ended = 0, {}
    for number, event in run_concurrently([lambda run=run: run for run in runs], at_once=2):  # type: ignore[misc]
        if isinstance(event, ev.EpochEnded):
            working.add(number)
            most = max(most, len(working))
        elif isinstance(event, ev.Finished):
            working.discard(number)
            ended[number] = event.record
    assert most == 2
    for number, given in enumerate(cases):
        same_record(ended[number], finish(make_run(few, tmp_path / f"alone{number}", given)))


def test_two_processes_share_runs_that_wait_for_one_base(few: Dataset, tmp_path: Path) -> None:
    """The first process has started all runs, and all but one wait for the base. The second may take those over."""
    cases = [quick("podnet", *addons, oracle=oracle) for oracle in (False, True) for addons in ((), ("ivt",))]
    make = [partial(make_run, few, tmp_path / str(n), given, tmp_path / "bases") for n, given in enumerate(cases)]
    first = run_concurrently(make, 2)
    started: set[int] = set()
    while len(started) < len(cases):
        number, event = next(first)
        started.add(number) if isinstance(event, ev.Started) else None
    processes = {"first": first, "second": run_concurrently(make, 2)}
    did: dict[str, set[int]] = {"first": set(), "second": set()}
    while processes:
        for name, events in list(processes.items()):
            item = next(events, None)
            if item is None:
                del processes[name]
            elif isinstance(item[1], ev.Finished) and not item[1].already:
                did[name].add(item[0])
            elif isinstance(item[1], Failed):
                assert isinstance(item[1].error, Busy)
    assert did["first"] | did["second"] == set(range(len(cases)))
    assert did["first"]
    assert did["second"]
    assert not did["first"] & did["second"]
    assert len(list((tmp_path / "bases").glob("*.safetensors"))) == 1
    for number, given in enumerate(cases[:2]):
        same_record(finish(make[number]()), finish(make_run(few, tmp_path / f"alone{number}", given)))


def test_run_continues_from_a_checkpoint_written_while_it_waited_for_its_base(few: Dataset, tmp_path: Path) -> None:
    """Another process took over a waiting run and was stopped."""
    given, bases = quick("podnet"), tmp_path / "bases"
    trains = always_saving_run(few, tmp_path / "trains", given, bases).events()
    waits = always_saving_run(few, tmp_path / "run", given, bases)
    events = waits.events()
    while not isinstance(next(trains), ev.EpochEnded):
        pass
    while not (isinstance(event := next(events), ev.Tick) and event.blocked):
        pass
    other = always_saving_run(few, tmp_path / "run", given, tmp_path / "others")
    broken = other.events()
    while not isinstance(next(broken), ev.TaskEnded):
        pass
    broken.close()
    trains.close()
    rest = list(events)
    assert all(event.task > 0 for event in rest if isinstance(event, ev.EpochEnded))
    assert isinstance(rest[-1], ev.Finished)
    same_record(rest[-1].record, finish(always_saving_run(few, tmp_path / "alone", given)))


def test_run_of_another_process_is_tried_once_more_at_the_end(few: Dataset, tmp_path: Path) -> None:
    """That process is stopped before this one has ended, so this one finishes the run."""
    make = [partial(make_run, few, tmp_path / str(seed), quick("finetune", seed=seed)) for seed in (0, 1)]
    other = make[0]().events()
    next(other)
    ended = []
    for number, event in run_concurrently(make, 2):
        assert not isinstance(event, Failed)
        if isinstance(event, ev.Finished):
            other.close()
            ended.append(number)
    assert ended == [1, 0]


def test_one_failure_does_not_stop_the_others(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PODNet.end_task

    def failing(self: PODNet, task: object) -> None:
        if self.options.lr == 0.01:
            raise RuntimeError("broken")
        original(self, task)  # type: ignore[arg-type]

    monkeypatch.setattr(PODNet, "end_task", failing)
    runs = [
        make_run(few, tmp_path / "bad", quick("podnet", podnet={"lr": 0.01})),
        make_run(few, tmp_path / "good", quick("podnet")),
    ]
    events = list(run_concurrently([lambda run=run: run for run in runs], at_once=2))  # type: ignore[misc]
    assert [n for n, event in events if isinstance(event, Failed)] == [0]
    assert [n for n, event in events if isinstance(event, ev.Finished)] == [1]


def test_a_free_place_goes_to_a_run_whose_base_is_ready_before_the_queue() -> None:
    """Two places. Run 1 waits for the base of run 0; the others are short. When run 2 ends, run 1 is next."""
    ready = False
    started: list[int] = []

    class Scripted:
        def __init__(self, number: int, steps: int) -> None:
            self.number, self.steps = number, steps

        def events(self, others_running: object) -> Iterator[ev.Event]:
            nonlocal ready
            while self.number == 1 and not ready:
                yield ev.Tick(waiting=True, blocked=True)
            started.append(self.number)
            for step in range(self.steps):
                ready |= self.number == 0 and step == 2
                yield ev.Tick()

    steps = [20, 5, 5, 5, 5]
    runs: Any = [partial(Scripted, number, count) for number, count in enumerate(steps)]
    list(run_concurrently(runs, 2))
    assert started == [0, 2, 1, 3, 4]


def test_runs_may_come_while_others_are_in_training(few: Dataset, tmp_path: Path) -> None:
    """The source has nothing at first, and then again nothing until the first run has ended."""
    finished: list[int] = []

    def source() -> Iterator[Any]:
        yield None
        yield partial(make_run, few, tmp_path / "0", quick("finetune"))
        while not finished:
            yield None
        yield partial(make_run, few, tmp_path / "1", quick("finetune", seed=1))

    for number, event in run_concurrently(source(), 2):
        finished.append(number) if isinstance(event, ev.Finished) else None
    assert finished == [0, 1]


def test_run_of_another_process_is_reported_while_no_other_comes(few: Dataset, tmp_path: Path) -> None:
    """A source that waits for this run to end would otherwise wait for ever."""
    other = make_run(few, tmp_path / "0", quick("finetune")).events()
    next(other)
    failed: list[Exception] = []

    def source() -> Iterator[Any]:
        yield partial(make_run, few, tmp_path / "0", quick("finetune"))
        while not failed:
            yield None

    for _, event in run_concurrently(source(), 1):
        failed.append(event.error) if isinstance(event, Failed) else None
    assert isinstance(failed[0], Busy)
    other.close()
