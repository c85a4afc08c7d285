"""Which run a worker gets: base tasks first and once, a fair share, runs of lost workers again."""

from __future__ import annotations

import pytest

from incvec.cluster.queue import MAX_ATTEMPTS, MAX_FAILURES, Queue


def queue(*groups: str | None, workers: int = 2, first: int | None = None) -> Queue:
    made = Queue(groups, first)
    for number in range(workers):
        made.join(f"w{number}", f"n{number}")
    return made


def test_others_of_a_group_wait_for_its_base() -> None:
    runs = queue("a", "a", "a")
    assert runs.take("w0", 0) == 0
    assert runs.take("w1", 0) is None
    runs.base_ready(0)
    assert runs.take("w1", 0) == 1


def test_base_tasks_that_most_runs_wait_for_come_first() -> None:
    runs = queue(None, "a", "b", "b", workers=4)
    assert [runs.take(f"w{n}", 0) for n in range(4)] == [2, 1, 0, None]
    runs.base_ready(2)
    assert runs.take("w3", 0) == 3


def test_a_lost_base_is_continued_before_anything_else_of_its_group() -> None:
    runs = queue("a", "a", "b", workers=3)
    assert (runs.take("w0", 0), runs.take("w1", 0)) == (0, 2)
    for run in runs.leave("w0"):
        assert runs.requeue(run)
    assert runs.take("w2", 0) == 0
    assert runs.take("w1", 0) is None  # again nobody else trains that base


@pytest.mark.parametrize(("workers", "expected", "share"), [(2, 0, 3), (4, 0, 1), (8, 0, 1), (1, 3, 2)])
def test_no_worker_takes_more_than_its_share(workers: int, expected: int, share: int) -> None:
    """Of six runs; also workers that have not joined yet have a share."""
    runs = queue(*[None] * 6, workers=workers)
    runs.expected = expected
    assert sum(runs.take("w0", 0) is not None for _ in range(7)) == share


def test_check_is_trained_before_all_others() -> None:
    runs = queue(None, None, first=1)
    assert runs.take("w0", 0) == 1
    assert runs.take("w1", 0) is None
    runs.finished(1)
    assert runs.take("w1", 0) == 0


def test_run_that_gets_no_further_is_given_up() -> None:
    runs = queue(None)
    for attempt in range(MAX_ATTEMPTS):
        assert runs.take("w0", 0) == 0
        runs.progressed(0, 0.3)  # the same place each time
        assert runs.requeue(0) == (attempt + 1 < MAX_ATTEMPTS)
    assert runs.jobs[0].state == "failed"
    assert runs.done


def test_run_that_gets_further_is_not_given_up() -> None:
    runs = queue(None)
    for attempt in range(3 * MAX_ATTEMPTS):
        assert runs.take("w0", 0) == 0
        runs.progressed(0, 0.01 * (attempt + 1))
        assert runs.requeue(0)


def test_run_that_failed_twice_is_trained_alone() -> None:
    """It may be what ends the process that it shares with others."""
    runs = queue(None, None, None, workers=1)
    assert runs.take("w0", 0) == 0
    runs.requeue(0)
    assert runs.take("w0", 0) == 0
    runs.requeue(0)
    assert [runs.take("w0", 0), runs.take("w0", 0)] == [0, None]
    runs.finished(0)
    assert [runs.take("w0", 0), runs.take("w0", 0)] == [1, 2]


def test_run_avoids_where_it_failed_while_there_is_another_place() -> None:
    runs = queue(None)
    assert runs.take("w0", 0) == 0
    runs.requeue(0, avoid="n0")
    assert runs.take("w0", 0) is None
    runs.leave("w1")
    assert runs.take("w0", 0) == 0


def test_worker_that_fails_again_and_again_gets_no_more_runs() -> None:
    runs = queue(*[None] * 8, workers=1)
    for _ in range(MAX_FAILURES - 1):
        runs.blame("w0", "full")
    runs.finished(runs.take("w0", 0) or 0)  # it works after all
    for _ in range(MAX_FAILURES):
        assert runs.take("w0", 0) is not None
        runs.blame("w0", "full")
    assert runs.take("w0", 0) is None
    assert runs.working() == []


def test_run_of_another_process_is_tried_later() -> None:
    runs = queue(None)
    assert runs.take("w0", 0) == 0
    assert runs.requeue(0, not_before=10, counts=False)
    assert runs.take("w0", 9) is None
    assert runs.take("w0", 11) == 0
    assert runs.jobs[0].attempts == 0


def test_last_worker_goes_on_after_runs_that_do_not_fit_into_its_memory() -> None:
    runs = queue(*[None] * 8)
    for worker in ("w0", "w1"):
        for _ in range(MAX_FAILURES):
            runs.blame(worker, "memory full", unless_last=True)
    assert [place.name for place in runs.working()] == ["w1"]


def test_run_that_failed_twice_does_not_join_others() -> None:
    runs = queue(*[None] * 4, workers=1)
    runs.requeue(0)
    runs.requeue(0)
    runs.jobs[1].started = True  # so that it goes first
    assert runs.take("w0", 0) == 1
    assert runs.take("w0", 0) == 2  # not 0
