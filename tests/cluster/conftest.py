"""A sweep of twelve runs on the digits, trained on this machine, and Ray clusters of several nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from incvec.records import read_record
from tests.conftest import same_record, weights

TWELVE = [
    *("digits", "--seeds", "0-3", "--set", "podnet.net=tiny", "--set", "podnet.epochs=8"),
    *("--set", "podnet.balance_epochs=2", "--set", "ivt.interval=1"),
]
RUNS = 12
BASES = 4  # one for each seed


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "200", **more}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "incvec", *map(str, arguments)]


def sweep(*arguments: str | Path, **more: str) -> str:
    """Run `incvec sweep` to its end; returns what it printed."""
    done = subprocess.run(command("sweep", *arguments), env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def start(log: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start `incvec sweep` in the background."""
    with log.open("wb") as file:
        return subprocess.Popen(command("sweep", *arguments), env=environment(), stdout=file, stderr=subprocess.STDOUT)


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the sweep, trained on this machine without Ray."""
    out = tmp_path_factory.mktemp("local")
    sweep(*TWELVE, "--out", out)
    return out


def same_sweep(out: Path, local: Path) -> None:
    """Assert that two folders have the same runs: records, and the weights of all snapshots, bit for bit."""
    folders = sorted(path.parent.name for path in local.glob("*/record.json"))
    assert len(folders) == RUNS
    assert sorted(path.parent.name for path in out.glob("*/record.json")) == folders
    for name in folders:
        same_record(read_record(out / name), read_record(local / name))
        snapshots = sorted(path.name for path in (local / name / "snapshots").glob("*.safetensors"))
        assert len(snapshots) > 2
        assert sorted(path.name for path in (out / name / "snapshots").glob("*.safetensors")) == snapshots
        for file in snapshots:
            first, second = weights(out / name / "snapshots" / file), weights(local / name / "snapshots" / file)
            assert first.keys() == second.keys()
            assert all((first[key] == second[key]).all() for key in first), f"{name}/{file}"
    assert not list(out.glob("*/checkpoint.safetensors"))
    assert bases(out) == bases(local)
    assert len(bases(out)) == BASES


def bases(out: Path) -> set[str]:
    return {path.name for path in (out / "bases").glob("*.safetensors")}


def trained_bases(out: Path) -> int:
    """How many runs trained their base task themselves."""
    return sum(not json.loads(path.read_text())["base"].get("shared") for path in out.glob("*/record.json"))


class LocalCluster:
    """A Ray cluster on this machine: a head without workers, and nodes with one core each."""

    def __init__(self, nodes: int, scratch: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        quick_detection = {
            "health_check_initial_delay_ms": 500,
            "health_check_period_ms": 500,
            "health_check_timeout_ms": 500,
            "health_check_failure_threshold": 3,
        }
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick_detection}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [
            self.cluster.add_node(num_cpus=1, env_vars={"INCVEC_SCRATCH": str(scratch)}) for _ in range(nodes)
        ]
        self.scratch_folder = scratch
        self.address = self.cluster.address
        ray.init(self.address, namespace="incvec", log_to_driver=False, logging_level="ERROR")

    def options(self, out: Path) -> list[str | Path]:
        return [*TWELVE, "--on", "ray", "--address", self.address, "--out", out]

    def coordinator(self) -> Any:
        """The coordinator of the sweep that is running, as soon as there is one."""
        import ray

        name = until(lambda: next(iter(ray.util.list_named_actors()), None))
        return ray.get_actor(name)

    def scratch(self) -> list[Path]:
        """What sweeps have left on the disk of the nodes."""
        return list(self.scratch_folder.glob("*/*"))

    def workers(self) -> list[tuple[str, int, list[int]]]:
        """Node, process and runs of every worker."""
        import ray

        def describe(coordinator: Any) -> list[tuple[str, int, list[int]]]:
            places = coordinator.queue.places
            return [(places[name].node, coordinator.members[name].pid, list(places[name].jobs)) for name in places]

        found: list[tuple[str, int, list[int]]] = ray.get(self.coordinator().__ray_call__.remote(describe))
        return found

    def kill_node(self, node_id: str) -> None:
        """SIGKILL for the raylet of the node, and for its workers."""
        (node,) = (node for node in self.nodes if node.node_id.startswith(node_id))
        pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
        workers = [pid for name, pid, _ in self.workers() if f"({node_id}" in name]
        for pid in (*pids, *workers):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


def until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait until the condition holds; returns its value."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"it did not happen within {seconds} seconds")


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalCluster]:
    pytest.importorskip("ray")
    made = LocalCluster(getattr(request, "param", 2), tmp_path / "scratch")
    yield made
    made.close()
