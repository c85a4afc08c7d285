"""Sweeps on real Ray clusters of several nodes on this machine: the same runs as a local sweep, whatever happens."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from incvec.cluster.job import ClusterSweep
from incvec.presets import resolve
from tests.cluster.conftest import (
    BASES,
    RUNS,
    LocalCluster,
    bases,
    command,
    environment,
    same_sweep,
    start,
    sweep,
    trained_bases,
    until,
)
from tests.conftest import quick

ray = pytest.importorskip("ray")

from incvec.cluster import client  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cluster", [2, 3], indirect=True, ids=["two nodes", "three nodes"])
def test_sweep_equals_the_local_one(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """Bit for bit; every base task is trained once in the whole cluster."""
    out = tmp_path / "out"
    printed = sweep(*cluster.options(out))
    same_sweep(out, local)
    assert cluster.scratch() == []
    assert trained_bases(out) == trained_bases(local) == BASES
    assert printed.count("finished digits") == RUNS
    assert f"{len(cluster.nodes)} nodes, {len(cluster.nodes)} workers" in printed
    assert "images/s" in printed


def test_killed_node(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """SIGKILL for a node that has trained a base and is in an increment: its run continues on the other one.

    The coordinator is not lost with it: it is on the node of the driver, which has no cores here.
    """
    driver = start(tmp_path / "log", *cluster.options(tmp_path / "out"))
    out = tmp_path / "out"
    until(lambda: list(out.glob("*/checkpoint.safetensors")))
    node = until(lambda: next((name for name, _, runs in cluster.workers() if runs), None))
    cluster.kill_node(node.partition("(")[2].rstrip(")"))
    assert driver.wait(240) == 0, (tmp_path / "log").read_text()
    assert f"its worker on {node} was lost" in (tmp_path / "log").read_text()
    same_sweep(out, local)


def stop_within_a_run(cluster: LocalCluster) -> tuple[str, int] | None:
    """Suspend a worker that has a run. None if its report that the run has ended was on the way."""
    for node, pid, runs in cluster.workers():
        if runs:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1)
            if (node, pid, runs) in cluster.workers():
                return node, pid
            os.kill(pid, signal.SIGCONT)
    return None


def test_hanging_worker(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """A process that is stopped reports nothing more; another one takes its place."""
    out = tmp_path / "out"
    driver = start(tmp_path / "log", *cluster.options(out))
    until(lambda: list(out.glob("*/record.json")))
    module = "incvec.cluster.coordinator"
    ray.get(cluster.coordinator().__ray_call__.remote(lambda _: setattr(sys.modules[module], "HANG_TIMEOUT", 6.0)))
    node, pid = until(lambda: stop_within_a_run(cluster))
    assert driver.wait(240) == 0, (tmp_path / "log").read_text()
    assert f"its worker on {node} was lost (no report for" in (tmp_path / "log").read_text()
    until(lambda: not Path(f"/proc/{pid}").exists(), seconds=30)
    same_sweep(out, local)


def test_killed_driver(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """The sweep continues without its driver; the same command follows it again, and so does --attach."""
    out = tmp_path / "out"
    driver = start(tmp_path / "log", *cluster.options(out))
    until(lambda: list(out.glob("*/record.json")))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = len(list(out.glob("*/record.json")))
    workers = {pid for _, pid, _ in cluster.workers()}
    until(lambda: len(list(out.glob("*/record.json"))) > before)  # without any driver
    assert workers
    assert workers <= {pid for _, pid, _ in cluster.workers()}  # the same processes
    attached = sweep(*cluster.options(out), "--attach")
    assert attached.count("finished digits") == RUNS
    same_sweep(out, local)
    assert trained_bases(out) == BASES
    again = sweep(*cluster.options(out))  # nothing is left to do
    assert again.count("finished digits") == RUNS
    assert "no worker" not in again


def test_worker_out_of_memory(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """One worker may not allocate any more memory: its runs continue on the other node."""
    out = tmp_path / "out"
    driver = start(tmp_path / "log", *cluster.options(out))
    _, pid, _ = until(lambda: next((w for w in cluster.workers() if w[2]), None))
    until(lambda: bases(out))
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used, used))
    assert driver.wait(240) == 0, (tmp_path / "log").read_text()
    assert "queued again" in (tmp_path / "log").read_text()
    same_sweep(out, local)


def test_full_disk_on_one_node(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """One worker can write no more files: its runs continue on the other node, and it gets no more of them."""
    out = tmp_path / "out"
    driver = start(tmp_path / "log", *cluster.options(out))
    _, pid, _ = until(lambda: next((w for w in cluster.workers() if w[2]), None))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, 1000))
    assert driver.wait(240) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "queued again: digits-podnet" in log
    assert "File too large" in log
    same_sweep(out, local)


def test_command_given_twice_at_once(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one does not see the first one's coordinator yet, and cannot start another one."""
    sweep = ClusterSweep("sweep", (("run", resolve(quick("finetune"))),), str(tmp_path), workers=1)
    client.start(sweep)
    find, searches = client.find, iter([None])
    monkeypatch.setattr(client, "find", lambda name: next(searches, find(name)))
    second = client.start(sweep)
    (named,) = ray.util.list_named_actors()
    assert ray.get(second.coordinator.describe.remote())[1] == sweep.identity
    assert second.names == ["run"]
    assert named == sweep.name


def test_killed_coordinator(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """Ray starts it again; it finds in the storage what is done. Each result is reported once."""
    out = tmp_path / "out"
    driver = start(tmp_path / "log", *cluster.options(out))
    until(lambda: "finished digits" in (tmp_path / "log").read_text())
    pid = ray.get(cluster.coordinator().__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    assert driver.wait(240) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().count("finished digits") == RUNS
    same_sweep(out, local)


def test_stopped_sweep(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """--stop ends the workers and the command that follows the sweep; the same command goes on."""
    out = tmp_path / "out"
    driver = start(tmp_path / "log", *cluster.options(out))
    until(lambda: list(out.glob("*/record.json")))
    workers = [pid for _, pid, _ in cluster.workers()]
    assert "has ended" in sweep(*cluster.options(out), "--stop")
    assert driver.wait(60) == 1
    assert "was stopped" in " ".join((tmp_path / "log").read_text().split())
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), seconds=30)
    assert len(list(out.glob("*/record.json"))) < RUNS
    sweep(*cluster.options(out))
    same_sweep(out, local)


def test_storage_at_an_address(cluster: LocalCluster, local: Path, tmp_path: Path) -> None:
    """Nodes without a common folder: everything goes through the address, and a killed node's run continues from it."""
    remote = tmp_path / "remote"
    driver = start(tmp_path / "log", *cluster.options(tmp_path / "out"), "--storage", f"file://{remote}")
    until(lambda: list(remote.glob("*/checkpoint.safetensors")))
    _, pid, _ = until(lambda: next((worker for worker in cluster.workers() if worker[2]), None))
    os.kill(pid, signal.SIGKILL)
    assert driver.wait(240) == 0, (tmp_path / "log").read_text()
    same_sweep(remote, local)
    assert cluster.scratch() == []  # also that of the killed worker
    copied = {path.parent.name for path in (tmp_path / "out").glob("*/record.json")}
    assert copied == {path.parent.name for path in remote.glob("*/record.json")}
    assert not list((tmp_path / "out").glob("*/snapshots"))


def test_failures_of_runs_are_reported_and_others_go_on(cluster: LocalCluster, tmp_path: Path) -> None:
    """A learning rate at which the loss is not finite; nothing is tried twice, and the exit code is 1."""
    file = tmp_path / "sweep.yaml"
    settings = "net: tiny, epochs: 2, weight_decay: 0"
    file.write_text(f"runs: [{{method: finetune, dataset: digits, finetune: {{{settings}, lr: [0.05, 1.0e+30]}}}}]")
    done = subprocess.run(
        command("sweep", file, "--on", "ray", "--address", cluster.address, "--out", tmp_path / "out"),
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "A smaller learning rate" in done.stdout
    assert "queued again" not in done.stdout
    assert len(list((tmp_path / "out").glob("*/record.json"))) == 1

    # The check of a sweep: its run is trained first, and nothing else if the result is another one.
    check = "check: {of: {seed: 1}, metric: LA, expected: 100.0, within: 1.0, hint: Look at it.}"
    run = f"{{method: finetune, dataset: digits, stop_after: 1, seed: [0, 1, 2], finetune: {{{settings}}}}}"
    file.write_text(f"{check}\nruns: [{run}]")
    done = subprocess.run(
        command("sweep", file, "--on", "ray", "--address", cluster.address, "--out", tmp_path / "checked"),
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "expected 100.0 within 1.0: nothing else of this sweep was run. Look at it." in done.stdout
    assert [path.parent.name.split("-")[3] for path in (tmp_path / "checked").glob("*/record.json")] == ["s1"]
