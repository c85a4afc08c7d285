"""A worker: one process with one GPU, or with a few cores, that trains runs as the coordinator hands them out."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from incvec.atomic_files import FileLock
from incvec.cluster.job import ClusterSweep, classify, is_address, portable
from incvec.cluster.storage import Storage, fetch_folder, scratch_folder
from incvec.cluster.versions import different_versions
from incvec.config import RunConfig, digest
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.build import pick_device
from incvec.engine.device_errors import is_out_of_memory
from incvec.engine.launch import load_on_device
from incvec.engine.run import Run
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.engine.sweep import data_key, default_at_once
from incvec.engine.threads import single_thread_for_small_images
from incvec.errors import ConfigError
from incvec.registry import load_plugin

REPORT_INTERVAL = 0.5  # seconds between two reports
ASK_INTERVAL = 0.25  # seconds until an answer of "no run at present" is questioned
RATE_EPOCHS = 100  # over which images per second are counted

STOP = -1  # the coordinator's answer when the sweep has ended


class Worker:
    """A Ray actor. `work` returns when the sweep has ended."""

    def __init__(self, name: str, sweep: ClusterSweep, coordinator: Any) -> None:
        self.name, self.sweep, self.coordinator = name, sweep, coordinator
        self.data: dict[str, Dataset] = {}
        self.taken: list[int] = []  # runs, in the order of `run_concurrently`
        self.active = 0
        self.next_ask = self.next_report = 0.0
        self.outbox: dict[tuple[int, str], ev.Event] = {}  # the latest event of each kind
        self.rate = ImageRate()

    def work(self) -> None:
        """Train until the coordinator has no more runs."""
        sweep = self.sweep
        ray.get(self.coordinator.join.remote(self.name, node_name(), os.getpid()))
        if problem := different_versions(sweep.versions):
            raise ConfigError(problem)
        for file in sweep.plugins:
            load_plugin(Path(file))
        self.device = pick_device(sweep.runs[0][1].device)
        if self.device.type == "cpu":
            torch.set_num_threads(sweep.cores)
        at_once = sweep.per_worker or default_at_once(self.device, [config for _, config in sweep.runs])
        with ExitStack() as self.stack:
            scratch = Path()  # only an address needs one
            if is_address(sweep.storage):
                scratch = self.stack.enter_context(scratch_folder(sweep.name, self.name))
            self.storage = Storage(sweep.storage, scratch)
            self.stack.enter_context(self.storage.mirrored())
            for place, event in run_concurrently(self.next_runs(), at_once):
                self.handle(self.taken[place], event)
            self.report()

    # Runs in --------------------------------------------------------------------------------------------

    def next_runs(self) -> Iterator[Callable[[], Run] | None]:
        """The runs that the coordinator hands out; None while it has none."""
        while True:
            if time.monotonic() < self.next_ask:
                if self.active == 0:
                    time.sleep(ASK_INTERVAL / 2)
                yield None
                continue
            if self.active == 0:
                self.report()
            answer = ray.get(self.coordinator.take.remote(self.name))
            if answer == STOP:
                return
            if answer is None:
                self.next_ask = time.monotonic() + ASK_INTERVAL
                yield None
                continue
            self.taken.append(answer)
            self.active += 1
            yield partial(self.make_run, *self.sweep.runs[answer])

    def make_run(self, folder: str, config: RunConfig) -> Run:
        key = data_key(config)
        if key not in self.data:
            self.data[key] = self.load(config)
            self.stack.enter_context(single_thread_for_small_images(self.data[key]))
        self.storage.prepare(folder)
        return Run(config, self.data[key], self.storage.run_folder(folder), self.storage.bases)

    def load(self, config: RunConfig) -> Dataset:
        """Open the data set. One worker of the node fetches it while the others wait."""
        sweep = self.sweep
        root = None if sweep.data_root is None else Path(sweep.data_root)
        if not (sweep.download or sweep.data_source):
            return load_on_device(config, root, self.device)
        name = f"incvec-data-{os.getuid()}-{digest([config.dataset, str(root)])}.lock"  # users cannot share one
        lock = FileLock(Path(tempfile.gettempdir()) / name)
        while not lock.acquire():
            time.sleep(ASK_INTERVAL)
        try:
            if sweep.data_source and root is not None:
                fetch_folder(sweep.data_source, root)
            return load_on_device(config, root, self.device, sweep.download)
        finally:
            lock.release()

    # Events out -----------------------------------------------------------------------------------------

    def handle(self, run: int, event: ev.Event) -> None:
        """Keep the event for the next report. The end of a run is reported at once."""
        self.rate.count(run, event)
        match event:
            case ev.Tick(blocked=False):
                pass
            case ev.Finished():
                self.storage.finish(self.sweep.runs[run][0])
                summary = {"metrics": event.record["metrics"], "method": event.record["method"]}
                self.outbox[run, "Finished"] = ev.Finished(summary, event.path, event.already)
                self.active -= 1
                self.next_ask = 0.0
                self.report()
            case Failed():
                error = event.error
                traceback.print_exception(error)  # into the log of this worker
                kind = classify(error, is_out_of_memory(error))
                lost_device = isinstance(error.__cause__, torch.AcceleratorError)
                self.report()
                ray.get(
                    self.coordinator.failed.remote(self.name, run, "node" if lost_device else kind, portable(error))
                )
                self.active -= 1
                if lost_device:
                    ray.actor.exit_actor()  # a process whose device has failed cannot use it again
            case _:
                name = f"{type(event).__name__}{event.path if isinstance(event, ev.Saved) else ''}"
                self.outbox.pop((run, name), None)
                self.outbox[run, name] = event
        if time.monotonic() >= self.next_report:
            self.report()

    def report(self) -> None:
        events = [(run, event) for (run, _), event in self.outbox.items()]
        self.outbox.clear()
        ray.get(self.coordinator.report.remote(self.name, events, self.rate.per_second()))
        self.next_report = time.monotonic() + REPORT_INTERVAL


class ImageRate:
    """Images per second of all runs of a worker, over its last epochs."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}  # of the stage that each run is in
        self.epochs: deque[tuple[float, int]] = deque(maxlen=RATE_EPOCHS)

    def count(self, run: int, event: ev.Event) -> None:
        if isinstance(event, ev.StageStarted):
            self.rows[run] = event.rows
        elif isinstance(event, ev.EpochEnded):
            self.epochs.append((time.monotonic(), self.rows.get(run, 0)))

    def per_second(self) -> float:
        if len(self.epochs) < 2:
            return 0.0
        (began, _), *rest = self.epochs
        return sum(images for _, images in rest) / (time.monotonic() - began)


def node_name() -> str:
    """The address of this worker's node; with the beginning of its id, since a test has several at one address."""
    context = ray.get_runtime_context()
    return f"{ray.util.get_node_ip_address()} ({context.get_node_id()[:6]})"
