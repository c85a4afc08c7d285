"""What the driver shows of a sweep whose coordinator is lost and started again."""

from __future__ import annotations

import time
from typing import Any

import pytest

from incvec.engine import events as ev
from incvec.engine.scheduler import Failed, Requeued
from incvec.errors import ConfigError, TrainingError

ray = pytest.importorskip("ray")

from incvec.cluster import client  # noqa: E402
from incvec.cluster.coordinator import Progress  # noqa: E402


class Coordinator:
    """Answers one after the other, as the handle of an actor would."""

    def __init__(self, *answers: Progress) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    @property
    def progress(self) -> Any:
        return self

    def remote(self, since: int) -> Progress:
        self.asked.append(since)
        return self.answers.pop(0)


@pytest.mark.parametrize("port", ["1", "99999999"])
def test_address_without_a_cluster_is_refused_at_once(port: str) -> None:
    """Ray itself would try for minutes."""
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"cannot connect to a Ray cluster at '127.0.0.1:{port}'.*ray start --head"):
        client.connect(f"127.0.0.1:{port}")
    assert time.monotonic() - began < 2 * client.CONNECT_TIMEOUT
    assert not ray.is_initialized()


def test_runs_of_a_lost_coordinator_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(run: int, already: bool = False) -> tuple[int, ev.Event]:
        return run, ev.Finished({"run": run}, already=already)

    started = ev.Started("a", 1, "eager", "cpu")
    failed = Failed(TrainingError("bad"))
    coordinator = Coordinator(
        Progress("a", 9, [(0, started), finished(0), (1, started), (2, started), (2, failed)], {}, [], False),
        Progress("b", 0, [], {}, [], False),  # it is reading the storage
        Progress("b", 0, [], {}, [], False),
        Progress("b", 5, [finished(0, already=True), finished(1), finished(2)], {}, [], True),
    )
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(client, "POLL_INTERVAL", 0.0)
    events = client.Sweep(coordinator, "sweep", "runs", ["a", "b", "c"]).events()
    shown = [(run, type(event)) for run, event in events if not isinstance(event, ev.Tick | ev.Started)]
    assert shown == [(0, ev.Finished), (2, Failed), (1, Requeued), (1, ev.Finished), (2, ev.Finished)]
    assert coordinator.asked == [0, 9, 0, 0]
