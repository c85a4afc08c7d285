"""When a coordinator gives up. It runs in this process: as long as it has no workers, it needs no cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from incvec.cluster.job import ClusterSweep
from incvec.cluster.queue import MAX_FAILURES
from incvec.engine.scheduler import Failed
from incvec.errors import ConfigError, StorageError
from incvec.presets import resolve
from tests.conftest import quick

ray = pytest.importorskip("ray")

from incvec.cluster import coordinator as module  # noqa: E402
from incvec.cluster import worker as worker_module  # noqa: E402
from incvec.cluster.coordinator import Coordinator, Progress, raised_by_worker  # noqa: E402
from incvec.cluster.storage import Storage  # noqa: E402
from incvec.cluster.worker import Worker  # noqa: E402

RUNS = tuple((f"run-{seed}", resolve(quick("finetune", seed=seed))) for seed in range(3))


def outcome(sweep: ClusterSweep) -> Progress:
    """What the driver gets when the sweep has ended."""

    async def work() -> Progress:
        coordinator = Coordinator(sweep)
        assert not (await coordinator.progress(0)).done  # does not wait for the storage
        await coordinator.ended()
        return await coordinator.progress(0)

    return asyncio.run(work())


def errors(progress: Progress) -> list[str]:
    return [str(event.error) for _, event in progress.events if isinstance(event, Failed)]


def test_plugin_that_is_missing_on_the_node_is_named(tmp_path: Path) -> None:
    ended = outcome(ClusterSweep("sweep", RUNS, str(tmp_path), plugins=("/missing/plugin.py",)))
    assert ended.done
    assert [error.startswith("the plug-in /missing/plugin.py does not exist") for error in errors(ended)] == [True] * 3


def test_storage_out_of_reach_is_tried_for_one_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(_: Storage, name: str) -> None:
        tried.append(name)
        raise StorageError("the storage cannot be used")

    monkeypatch.setattr(Storage, "read_record", refuse)
    ended = outcome(ClusterSweep("sweep", RUNS, str(tmp_path)))
    assert tried == ["run-0"]
    assert errors(ended) == ["the storage cannot be used"] * 3


def test_worker_that_does_not_see_the_storage_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    sweep = ClusterSweep("sweep", RUNS, str(tmp_path / "missing"), cores=torch.get_num_threads())
    coordinator = SimpleNamespace(join=SimpleNamespace(remote=lambda name, *_: joined.append(name)))
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(worker_module, "node_name", lambda: "node")
    monkeypatch.setenv("INCVEC_SCRATCH", str(tmp_path))
    with pytest.raises(StorageError, match="does not exist on this node"):
        Worker("w", sweep, coordinator).work()
    assert joined == ["w"]
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_error_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Coordinator) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(Coordinator, "_create_workers", fail)
    ended = outcome(ClusterSweep("sweep", RUNS, str(tmp_path)))
    assert ended.done
    assert errors(ended) == ["RuntimeError: unexpected"] * 3


@pytest.mark.parametrize("suspended", [False, True])
def test_a_suspended_sweep_ends_no_worker(suspended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the whole job was stopped, the workers had no chance to report."""
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)

    async def work() -> None:
        coordinator = Coordinator(ClusterSweep("sweep", RUNS, str(tmp_path)))
        coordinator.main.cancel()
        long_ago = time.monotonic() - 2 * module.HANG_TIMEOUT
        coordinator.queue.join("w0", "node")
        run = coordinator.queue.take("w0", 0)
        assert run is not None
        coordinator.members["w0"] = module.Member("handle", heard=long_ago, loaded={coordinator._data(run)})
        if suspended:
            coordinator.last_check = long_ago
        coordinator._end_hung_workers()

    asyncio.run(work())
    assert killed == ([] if suspended else ["handle"])


def dead_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Coordinator], None]) -> str:
    """Why a coordinator with two working workers gives up after the change."""

    async def work() -> str:
        coordinator = Coordinator(ClusterSweep("sweep", RUNS, str(tmp_path)))
        coordinator.main.cancel()
        for name in ("w0", "w1"):
            coordinator.queue.join(name, f"node of {name}")
        change(coordinator)
        return coordinator._dead_end()

    monkeypatch.setattr(Coordinator, "_wanted", lambda _: 2)
    return asyncio.run(work())


def fail_starts(coordinator: Coordinator) -> None:
    coordinator.failed_starts, coordinator.last_start = module.MAX_FAILED_STARTS, "no module named incvec"


def retire(coordinator: Coordinator) -> None:
    for name in ("w0", "w1"):
        for _ in range(MAX_FAILURES):
            coordinator.queue.blame(name, "disk full")


def retire_while_training(coordinator: Coordinator) -> None:
    assert coordinator.queue.take("w0", 0) is not None
    retire(coordinator)


def leave(coordinator: Coordinator) -> None:
    for name in ("w0", "w1"):
        coordinator.queue.leave(name)
    fail_starts(coordinator)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fail_starts, ""),  # another node goes on
        (leave, "the workers do not start: no module named incvec"),
        (retire, "no worker is left. node of w1: disk full"),
        (retire_while_training, ""),
    ],
)
def test_a_sweep_ends_early_only_if_nothing_is_trained(
    change: Callable[[Coordinator], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dead_end(tmp_path, monkeypatch, change) == reason


def test_a_worker_that_lost_its_connection_is_replaced() -> None:
    def task_error(cause: Exception) -> Exception:
        return ray.exceptions.RayTaskError("work", "traceback", cause)

    assert raised_by_worker(task_error(ConfigError("other versions")))
    assert not raised_by_worker(task_error(ray.exceptions.ActorUnavailableError("unavailable", b"0" * 16)))
    assert not raised_by_worker(ray.exceptions.RayError("lost"))
