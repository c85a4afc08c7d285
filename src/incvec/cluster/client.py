"""The driver's side of a sweep on Ray: connect, start or find the coordinator, follow its events."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from incvec.cluster.job import ClusterSweep, sweep_name
from incvec.engine import events as ev
from incvec.engine.scheduler import Failed, Requeued
from incvec.errors import ConfigError, TrainingError

NAMESPACE = "incvec"
POLL_INTERVAL = 0.5  # seconds
RESTART_TIMEOUT = 120.0  # seconds for a coordinator to be started again on another node
CONNECT_TIMEOUT = 10.0  # seconds for the head of the cluster to accept a connection


def connect(address: str | None) -> bool:
    """Connect to the cluster at the address, or that of RAY_ADDRESS. Returns True if it started one on this machine."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is None and "ray" not in sys.modules:  # Ray reads these when it is imported
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            token = secrets.token_hex(32)  # for this cluster alone, in no file
            os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("--on ray needs Ray: install it with pip install 'incvec[cluster]'.") from None
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.WARNING}
    if ray.is_initialized():
        return False
    if address is None:
        ray.init(address="local", include_dashboard=False, **options)
        return True
    try:
        check_reachable(address)
        ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:  # also for a wrong token
        raise ConfigError(
            f"cannot connect to a Ray cluster at {address!r} ({error}). Start one with `ray start --head`, or leave "
            "out --address and RAY_ADDRESS to use this machine alone."
        ) from None
    return False


def check_reachable(address: str) -> None:
    """Connect to HOST:PORT once: Ray would try for minutes. Other addresses are left to Ray."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), port), CONNECT_TIMEOUT).close()


@dataclass
class Sweep:
    """A sweep that a coordinator is working on."""

    coordinator: Any
    title: str
    storage: str
    names: list[str]
    nodes: str = ""  # workers and images per second of each node, and what has failed

    def events(self) -> Iterator[tuple[int, ev.Event]]:
        """The events of all runs, until the sweep has ended. The coordinator may be restarted meanwhile."""
        import ray

        version, incarnation, unavailable_since = 0, "", 0.0
        training: set[int] = set()
        finished: set[int] = set()
        while True:
            try:
                progress = ray.get(self.coordinator.progress.remote(version), timeout=RESTART_TIMEOUT)
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                unavailable_since = unavailable_since or time.monotonic()
                if time.monotonic() - unavailable_since > RESTART_TIMEOUT:
                    raise TrainingError(LOST) from None
                time.sleep(POLL_INTERVAL)
                continue
            except ray.exceptions.RayError:
                raise TrainingError(LOST) from None
            unavailable_since = 0.0
            if incarnation not in ("", progress.incarnation):
                version, incarnation = 0, progress.incarnation
                yield from ((run, Requeued(RESTARTED)) for run in sorted(training))
                training.clear()
                continue
            version, incarnation = progress.version, progress.incarnation
            self.nodes = describe_nodes(progress.nodes, progress.retired)
            for run, event in progress.events:
                if run in finished:  # a coordinator that was started again reports it once more
                    continue
                if isinstance(event, ev.Finished):
                    finished.add(run)
                (training.discard if isinstance(event, ev.Finished | Failed) else training.add)(run)
                yield run, event
            yield 0, ev.Tick(waiting=True)
            if progress.done:
                return
            time.sleep(POLL_INTERVAL)

    def close(self) -> None:
        """End the coordinator of a sweep that has ended, once its workers have removed their scratch folders."""
        import ray

        with suppress(ray.exceptions.RayError):
            ray.get(self.coordinator.ended.remote(), timeout=RESTART_TIMEOUT)
        ray.kill(self.coordinator, no_restart=True)


RESTARTED = "the coordinator of the sweep was lost, and Ray has started it again"
LOST = (
    "the coordinator of the sweep is lost, or the sweep was stopped. Give the same command again to go on: finished "
    "runs and checkpoints are kept."
)


def start(sweep: ClusterSweep) -> Sweep:
    """Start a sweep, or follow it if it is running already."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from incvec.cluster.coordinator import Coordinator

    running = find(sweep.name)
    if running is not None:
        title, identity, storage, names, done = describe(running)
        if not done:
            if identity != sweep.identity:
                raise ConfigError(
                    f"the sweep {title!r} is running in {storage} with other runs or settings. Follow it with "
                    "--attach, end it with --stop, or choose another --out."
                )
            return Sweep(running, title, storage, names)
        ray.kill(running, no_restart=True)  # it has ended, and this is another attempt
        wait_until_gone(sweep.name)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(Coordinator).options(
        name=sweep.name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        memory=1,  # one byte, since Ray places actors without any resources at random
        max_restarts=-1,
        scheduling_strategy=here,
    )
    try:
        coordinator = actor.remote(sweep)
    except ValueError:  # the name is taken: the same command was given elsewhere at the same time
        if find(sweep.name) is None:
            raise
        return start(sweep)
    return Sweep(coordinator, sweep.title, sweep.storage, [name for name, _ in sweep.runs])


def attach(title: str, storage: str) -> Sweep:
    """Follow a sweep that is running, or has ended since it was last followed."""
    running = find_running(title, storage)
    title, _, storage, names, _ = describe(running)
    return Sweep(running, title, storage, names)


def stop(title: str, storage: str) -> None:
    """End a running sweep. Its checkpoints remain."""
    import ray

    ray.kill(find_running(title, storage), no_restart=True)  # the workers belong to it
    wait_until_gone(sweep_name(title, storage))


def describe(coordinator: Any) -> tuple[str, str, str, list[str], bool]:
    """See `Coordinator.describe`."""
    import ray

    try:
        description: tuple[str, str, str, list[str], bool] = ray.get(coordinator.describe.remote())
    except ray.exceptions.RayError:
        raise TrainingError(LOST) from None
    return description


def find_running(title: str, storage: str) -> Any:
    running = find(sweep_name(title, storage))
    if running is None:
        raise ConfigError(
            f"no sweep {title!r} with the storage {storage} is running on this cluster. Give the options --out or "
            "--storage it was started with; the same command without --attach or --stop starts or resumes it."
        )
    return running


def find(name: str) -> Any:
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def wait_until_gone(name: str) -> None:
    limit = time.monotonic() + RESTART_TIMEOUT
    while find(name) is not None and time.monotonic() < limit:
        time.sleep(0.1)


def describe_nodes(nodes: dict[str, tuple[int, float]], retired: list[str]) -> str:
    """`2 nodes, 3 workers: 10.0.0.1 1,200 images/s, ...`."""
    workers = sum(count for count, _ in nodes.values())
    if not nodes:
        return "waiting for workers: each needs a free GPU, or the number of free cores given with --cores"
    rates = ", ".join(f"{node} {rate:,.0f} images/s" for node, (_, rate) in sorted(nodes.items()))
    text = f"{len(nodes)} node{'s' * (len(nodes) > 1)}, {workers} worker{'s' * (workers > 1)}: {rates}"
    return "; ".join([text, *(f"no more runs on {each}" for each in retired)])
