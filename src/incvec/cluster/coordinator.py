"""The coordinator of a sweep: a detached Ray actor that hands runs to workers and collects their events.

It outlives the terminal that started it. Everything durable is in the storage: a coordinator that is started again
reads there which runs are finished, and the others continue from their checkpoints.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from incvec.cluster.job import ClusterSweep, Kind, portable
from incvec.cluster.queue import Queue
from incvec.cluster.storage import Storage
from incvec.cluster.worker import STOP, Worker
from incvec.engine import events as ev
from incvec.engine.checkpoint import check_finished
from incvec.engine.scheduler import Failed, Requeued
from incvec.engine.sweep import base_group, data_key
from incvec.errors import IncvecError, StorageError, TrainingError
from incvec.registry import load_plugin

SUPERVISION_INTERVAL = 1.0  # seconds between two checks of the cluster
BUSY_DELAY = 10.0  # seconds until a run that another process works on is tried again
ENDING_TIME = 30.0  # seconds for a worker to end by itself
MAX_FAILED_STARTS = 6  # workers in a row that ended before they asked for a run
SUSPENDED = 30.0  # seconds between two checks after which this process must have been suspended, and perhaps others
HANG_TIMEOUT = 1800.0  # seconds without any report from a worker that has loaded its data


@dataclass
class Progress:
    """What has changed since a version: events, the last of each kind and run, and the state of the workers."""

    incarnation: str
    version: int
    events: list[tuple[int, ev.Event]]
    nodes: dict[str, tuple[int, float]]  # workers and images per second
    retired: list[str]
    done: bool


@dataclass
class Member:
    """A worker actor, from its creation on."""

    handle: Any
    joined: bool = False
    pid: int = 0
    rate: float = 0.0
    heard: float = 0.0  # when it last reported
    loaded: set[str] = field(default_factory=set)  # data sets
    hung: str = ""
    supervision: asyncio.Task[None] | None = field(default=None, repr=False)


class Coordinator:
    """An asynchronous actor: its methods do not run at the same time, unless they wait."""

    def __init__(self, sweep: ClusterSweep) -> None:
        self.sweep = sweep
        first = None if sweep.check is None else 0
        self.queue = Queue([base_group(config) for _, config in sweep.runs], first)
        self.members: dict[str, Member] = {}
        self.incarnation = uuid.uuid4().hex
        self.version = 0
        self.latest: dict[tuple[int, str], tuple[int, ev.Event]] = {}
        self.failed_starts, self.last_start = 0, ""
        self.last_check = time.monotonic()
        self.ready = asyncio.Event()  # finished runs are known
        self.main = asyncio.get_running_loop().create_task(self._main())

    # For the driver -------------------------------------------------------------------------------------

    async def describe(self) -> tuple[str, str, str, list[str], bool]:
        """Title, identity, storage, names of the runs, and whether the sweep has ended."""
        await self.ready.wait()
        sweep = self.sweep
        return sweep.title, sweep.identity, sweep.storage, [name for name, _ in sweep.runs], self.queue.done

    async def progress(self, since: int) -> Progress:
        """Everything that changed after the version `since`; 0: everything."""
        if not self.ready.is_set():  # with many runs, or a slow storage, this takes minutes
            return Progress(self.incarnation, 0, [], {}, [], done=False)
        changed = sorted((version, key[0], event) for key, (version, event) in self.latest.items() if version > since)
        nodes: dict[str, tuple[int, float]] = {}
        for name, place in self.queue.places.items():
            count, rate = nodes.get(place.node, (0, 0.0))
            nodes[place.node] = (count + 1, rate + self.members[name].rate)
        retired = [f"{place.node}: {place.retired}" for place in self.queue.retired()]
        events = [(run, event) for _, run, event in changed]
        return Progress(self.incarnation, self.version, events, nodes, retired, self.queue.done)

    async def ended(self) -> None:
        """Wait until the sweep and its workers have ended."""
        await self.main

    # For the workers ------------------------------------------------------------------------------------

    async def join(self, worker: str, node: str, pid: int) -> None:
        self.members[worker].joined, self.members[worker].pid = True, pid
        self.failed_starts = 0
        self.queue.join(worker, node)

    async def take(self, worker: str) -> int | None:
        """A run for the worker; None if there is none now, `STOP` if there will be none."""
        await self.ready.wait()
        if self.queue.done:
            return STOP
        return self.queue.take(worker, time.monotonic())

    async def report(self, worker: str, events: list[tuple[int, ev.Event]], images_per_second: float) -> None:
        if worker not in self.queue.places:
            return  # it was given up
        member = self.members[worker]
        member.rate, member.heard = images_per_second, time.monotonic()
        member.loaded.update(self._data(run) for run, _ in events)
        for run, event in events:
            if self.queue.jobs[run].worker != worker:
                continue
            self._publish(run, event)
            if is_base_stored(event):
                self.queue.base_ready(run)
            if isinstance(event, ev.EpochEnded):
                self.queue.progressed(run, event.fraction)
            elif isinstance(event, ev.Finished):
                self.queue.finished(run)
                self._judge(run, event)

    async def failed(self, worker: str, run: int, kind: Kind, error: Exception) -> None:
        if self.queue.jobs[run].worker != worker:
            return
        place = self.queue.places[worker]
        if kind == "run":
            self.queue.failed(run)
            self._publish(run, Failed(error))
            self._judge(run, None)
            return
        if kind != "busy":
            self.queue.blame(worker, str(error), unless_last=kind == "memory")
        delay = time.monotonic() + BUSY_DELAY if kind == "busy" else 0.0
        avoid = {"memory": worker, "node": place.node}.get(kind, "")
        self._requeue(run, f"on {place.node}: {error}", error, avoid, delay, counts=kind != "busy")

    # Supervision ----------------------------------------------------------------------------------------

    async def _main(self) -> None:
        try:
            await asyncio.to_thread(self._read_finished)
            self.ready.set()
            while not self.queue.done:
                self._create_workers()
                self._end_hung_workers()
                if reason := self._dead_end():
                    self._abort(reason)
                await asyncio.sleep(SUPERVISION_INTERVAL)
        except Exception as error:  # otherwise the sweep would never end
            self._abort(str(error) if isinstance(error, IncvecError) else f"{type(error).__name__}: {error}")
        self.ready.set()
        if ending := [member.supervision for member in self.members.values() if member.supervision is not None]:
            await asyncio.wait(ending, timeout=ENDING_TIME)
        for member in self.members.values():
            ray.kill(member.handle)

    def _dead_end(self) -> str:
        """Why none of the runs that are left will be trained; "" if they will be."""
        places = list(self.queue.places.values())
        if any(not place.retired or place.jobs for place in places):
            return ""
        if self.failed_starts >= MAX_FAILED_STARTS:
            return f"the workers do not start: {self.last_start}"
        if places and len(places) >= self._wanted():
            return f"no worker is left. {places[-1].node}: {places[-1].retired}"
        return ""

    def _read_finished(self) -> None:
        """Find the runs that have a record. A record of other settings is a failure of that run alone."""
        for file in self.sweep.plugins:
            load_plugin(Path(file))
        with tempfile.TemporaryDirectory() as scratch:
            storage = Storage(self.sweep.storage, Path(scratch))
            for run, (name, config) in enumerate(self.sweep.runs):
                path = storage.run_folder(name) / "record.json"
                try:
                    record = storage.read_record(name)
                    if record is None:
                        continue
                    check_finished(config, None, record, path)
                except StorageError:
                    raise  # it concerns all runs
                except IncvecError as error:
                    self.queue.failed(run)
                    self._publish(run, Failed(portable(error)))
                    continue
                summary = {"metrics": record["metrics"], "method": record["method"]}
                self.queue.finished(run)
                event = ev.Finished(summary, str(path), already=True)
                self._publish(run, event)
                self._judge(run, event)
        # A base may be missing although a run that trained it is finished: the first unfinished run checks for it.
        self.queue.ready.clear()

    def _slots(self) -> tuple[int, dict[str, float]]:
        """How many workers the cluster has room for, and what each of them takes."""
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(int(each.get("GPU", 0)) for each in resources)
        if self.sweep.needs_gpu and gpus:
            return gpus, {"num_gpus": 1, "num_cpus": 0}
        cores = self.sweep.cores
        return sum(int(each.get("CPU", 0) // cores) for each in resources), {"num_cpus": cores}

    def _wanted(self) -> int:
        slots, _ = self._slots()
        unfinished = sum(job.state in ("waiting", "running") for job in self.queue.jobs)
        places = unfinished + len(self.queue.retired())
        return min(places, slots if self.sweep.workers is None else self.sweep.workers)

    def _create_workers(self) -> None:
        wanted, (_, resources) = self._wanted(), self._slots()
        self.queue.expected = wanted - len(self.queue.retired())
        own = ray.get_runtime_context().current_actor
        while len(self.members) < wanted and self.failed_starts < MAX_FAILED_STARTS:
            name = uuid.uuid4().hex[:8]
            handle = ray.remote(Worker).options(**resources).remote(name, self.sweep, own)
            member = self.members[name] = Member(handle)
            member.supervision = asyncio.get_running_loop().create_task(self._supervise(name, member))

    def _data(self, run: int) -> str:
        return data_key(self.sweep.runs[run][1])

    def _end_hung_workers(self) -> None:
        """End workers that have stopped reporting. Loading data may take any time, so it is not counted."""
        now = time.monotonic()
        if now - self.last_check > SUSPENDED:
            for member in self.members.values():
                member.heard = now
        self.last_check = now
        for name, place in self.queue.places.items():
            member = self.members[name]
            silent = now - member.heard > HANG_TIMEOUT
            if silent and place.jobs and member.loaded.issuperset(map(self._data, place.jobs)) and not member.hung:
                member.hung = f"no report for {HANG_TIMEOUT / 60:.0f} minutes"
                ray.kill(member.handle)

    async def _supervise(self, name: str, member: Member) -> None:
        """Wait for the end of a worker. If it ends before the sweep, its runs are queued again."""
        try:
            await member.handle.work.remote()
            reason = "the worker has ended"
        except Exception as error:  # whatever Ray raises for a process or node that is gone
            reason = member.hung or describe_loss(error)
            if raised_by_worker(error) and self._retire(name, reason):
                return
        if member.joined:
            self.failed_starts = 0  # there was room for it, so there may be room for another one
        else:
            self.failed_starts += 1
            self.last_start = reason
        node = self.queue.places[name].node if name in self.queue.places else "?"
        del self.members[name]
        for run in self.queue.leave(name):
            text = f"its worker on {node} was lost ({reason})"
            self._requeue(run, text, TrainingError(text))
        ray.kill(member.handle)

    def _retire(self, name: str, reason: str) -> bool:
        """A worker that raised an error keeps its place on its node, so that no other one is started there."""
        if name not in self.queue.places:
            return False
        place = self.queue.places[name]
        place.retired = place.retired or reason
        for run in list(place.jobs):
            self._requeue(run, f"on {place.node}: {reason}", TrainingError(reason), place.node)
        return True

    # Events ---------------------------------------------------------------------------------------------

    def _requeue(
        self, run: int, text: str, error: Exception, avoid: str = "", delay: float = 0.0, counts: bool = True
    ) -> None:
        if self.queue.requeue(run, avoid, delay, counts):
            self._publish(run, Requeued(text))
        else:
            attempts = self.queue.jobs[run].attempts
            self._publish(run, Failed(type(error)(f"{error} (given up after {attempts} attempts)")))
            self._judge(run, None)

    def _publish(self, run: int, event: ev.Event) -> None:
        self.version += 1
        key = (run, type(event).__name__)
        self.latest[key] = (self.version, event)

    def _judge(self, run: int, event: ev.Finished | None) -> None:
        """The sweep's check: the result of its first run decides whether the others are trained."""
        if self.sweep.check is None or run != 0:
            return
        try:
            if event is None:
                raise TrainingError("the run that the sweep checks first has failed: nothing else of it was run.")
            self.sweep.check.judge(event.record)
        except IncvecError as error:
            self._abort(str(error))

    def _abort(self, reason: str) -> None:
        """Give up all runs that are not finished."""
        for job in self.queue.jobs:
            if job.state in ("waiting", "running"):
                self.queue.failed(job.number)
                self._publish(job.number, Failed(TrainingError(reason)))


def is_base_stored(event: ev.Event) -> bool:
    """Whether the event shows that the base task of its run is in the storage."""
    match event:
        case ev.Saved():
            return Path(event.path).parent.name == "bases"
        case ev.StageStarted():
            return event.task > 0
        case ev.TaskEnded() | ev.Finished():
            return True
    return False


def raised_by_worker(error: Exception) -> bool:
    """Whether a worker ended with an error of its own. A lost connection to the coordinator is none."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return False
    return not isinstance(error.cause, ray.exceptions.RayError)


def describe_loss(error: Exception) -> str:
    """One line about why an actor is gone."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in lines if "exit type" in line or "died" in line.lower()), lines[0] if lines else "")
    return text[:200] or type(error).__name__
