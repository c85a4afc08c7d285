"""A run: its folder, its lock, where it resumes, and its tasks in order.

A run is a generator: it queues work and yields events. Its position is (task, stage, epoch), and begin hooks run once.
Every draw is seeded by what it is used for, so a run that was killed continues from its last checkpoint and ends with
the same bits as an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from incvec.atomic_files import FileLock, read_meta, read_tensors, remove_temporaries, write_bytes, write_tensors
from incvec.config import RunConfig
from incvec.data import Dataset
from incvec.engine import checkpoint as checkpoints
from incvec.engine import events as ev
from incvec.engine.build import RunParts, build, pick_device
from incvec.engine.checkpoint import Position
from incvec.engine.checkpoint_writer import CheckpointWriter
from incvec.engine.device_errors import gpu_problem, translate_device_errors
from incvec.engine.distributed import SINGLE_PROCESS, Distributed
from incvec.engine.loop import StageLoop
from incvec.engine.optimizer import check_learning_rates
from incvec.engine.record import Progress, make_record
from incvec.engine.shared_bases import BaseFile, base_key
from incvec.engine.stage import train_stage
from incvec.engine.state import RunState
from incvec.engine.task import begin_task, end_task, evaluate_task
from incvec.errors import Busy
from incvec.nets import BACKBONES, finer_backbone
from incvec.records import format_json, read_record


class Run:
    """One method, its add-ons, one data set and one seed, in one folder.

    `bases` is the folder of shared base tasks, if they are to be shared. `save_interval` is the least time in seconds
    between two checkpoints within a stage; by default saving takes at most 5 % of the time.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        out: Path,
        bases: Path | None = None,
        distributed: Distributed = SINGLE_PROCESS,
        save_interval: float | None = None,
    ) -> None:
        self.config, self.dataset, self.out, self.bases, self.distributed = config, dataset, out, bases, distributed
        self.name = " + ".join([config.method, *config.addons]) + (" oracle" if config.oracle else "")
        self.device = pick_device(config.device, distributed.local_rank)
        self.state: RunState | None = None  # built by `events`
        self._saver = CheckpointWriter(self.checkpoint_path, self.device, save_interval)
        self._lock = FileLock(out / ".lock")
        self._base: BaseFile | None = None

    # Files ----------------------------------------------------------------------------------------------

    @property
    def checkpoint_path(self) -> Path:
        return self.out / "checkpoint.safetensors"

    @property
    def record_path(self) -> Path:
        return self.out / "record.json"

    def snapshot_path(self, task: int) -> Path:
        return self.out / "snapshots" / f"task-{task:02d}.safetensors"

    # State ----------------------------------------------------------------------------------------------

    def _built(self) -> RunState:
        if self.state is None:
            raise RuntimeError(f"{self.name} has no state yet: it is built when `events` is first iterated")
        return self.state

    @property
    def parts(self) -> RunParts:
        return self._built().parts

    @property
    def position(self) -> Position:
        return self._built().position

    @property
    def progress(self) -> Progress:
        return self._built().progress

    @property
    def loop(self) -> StageLoop | None:
        """The loop of the stage in training, if any."""
        return None if self.state is None else self.state.loop

    # The whole run --------------------------------------------------------------------------------------

    def events(self, others_running: Callable[[], bool] = lambda: False) -> Generator[ev.Event, None, None]:
        """Train, evaluate and save; yields events on the way. On a GPU, all work is queued on a stream of its own.

        `others_running` returns whether other runs hold device memory that they will release. If so, a step that cannot
        be captured for lack of memory raises `DeviceMemoryError`; if not, the stage runs eagerly.
        """
        events = self._events(others_running)
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        try:
            while True:
                # The consumer of the events runs outside of these contexts.
                with translate_device_errors(self.device, self._activity()), torch.cuda.stream(stream):
                    event = next(events, None)
                if event is None:
                    return
                yield event
        finally:
            events.close()

    def _activity(self) -> str:
        if self.state is None:
            return f"while {self.name} was loaded"
        return f"in task {self.position.task + 1}, stage {self.position.stage + 1} of {self.name}"

    def _events(self, others_running: Callable[[], bool]) -> Generator[ev.Event, None, None]:
        if (finished := self._finished()) is not None:
            yield finished
            return
        try:
            if self.out.is_dir():  # check the folder before anything is loaded onto the device
                self._lock_folder()
                if self.checkpoint_path.exists():
                    meta = read_meta(self.checkpoint_path)
                    checkpoints.check_checkpoint(self.config, self.dataset, meta, self.checkpoint_path)
            state = self.state = self._build()
            self._lock_folder()  # a new folder is created only for valid settings
            resumed, changed = self._resume(state)
            for text in [changed, *self._notices(state)]:
                if text:
                    state.progress.add_notice(text)
                    yield ev.Notice(text, warning=True)
            yield ev.Started(self.name, len(state.parts.tasks), state.parts.engine, str(self.device), resumed)
            yield from self._load_or_lock_base(state)
            if (finished := self._finished()) is not None:  # by another process, while this one waited for its base
                yield finished
                return
            for task in state.parts.tasks[state.position.task :]:
                began = time.monotonic()
                if state.position == (task.index, 0, 0):
                    begin_task(state, task)
                for stage in state.parts.plan(task)[state.position.stage :]:
                    yield from self._publish_base(state)
                    yield from train_stage(state, task, stage, others_running)
                yield from self._publish_base(state)
                end_task(state, task)
                state.progress.task_seconds.append(round(time.monotonic() - began, 3))  # since the last resume
                write_snapshot = self.distributed.is_main and self.config.snapshots
                yield evaluate_task(state, task, self.snapshot_path(task.index) if write_snapshot else None)
                state.parts.world.base_fisher = None
                state.position = Position(task.index + 1)
                yield state.save()
            yield self._finish(state)
        finally:
            if self.state is not None:
                self.state.drop_loop()
            with contextlib.suppress(Exception):  # the run has ended, or fails for a reason of its own
                self._saver.wait()
            self._release_base()
            self._lock.release()

    def _finished(self) -> ev.Finished | None:
        """The event of a run that has a record already."""
        if not self.record_path.exists():
            return None
        record = read_record(self.record_path)
        checkpoints.check_finished(self.config, self.dataset, record, self.record_path)
        return ev.Finished(record, str(self.record_path), already=True)

    def _finish(self, state: RunState) -> ev.Finished:
        record = make_record(self.config, self.dataset, state.parts, state.progress, state.seconds())
        self._saver.wait()
        if self.distributed.is_main:
            write_bytes(self.record_path, (format_json(record) + "\n").encode())
            self.checkpoint_path.unlink(missing_ok=True)
        self.distributed.barrier()
        return ev.Finished(record, str(self.record_path))

    # The folder and where the run resumes ---------------------------------------------------------------

    def _lock_folder(self) -> None:
        if self.distributed.is_main and not self._lock.acquire():
            raise Busy(f"another process is working in {self.out}. Wait for it, or choose another --out.")

    def _build(self) -> RunState:
        parts = build(self.config, self.dataset, torch.Generator(self.device), self.device)
        stages = [stage for task in parts.tasks for stage in parts.plan(task)]
        check_learning_rates(stages, self.config.method)
        self.distributed.check_batch_sizes(stages)
        if parts.engine == "graph" and not self.distributed.supports_capture:
            parts.engine = "eager"
        return RunState(self.config, self.dataset, parts, self.distributed, self._saver)

    def _resume(self, state: RunState) -> tuple[str | None, str]:
        """Load the checkpoint, or the snapshot that `start` names. Returns what was loaded, and a notice or ""."""
        if self.distributed.is_main:
            remove_temporaries(self.out, "*.safetensors", "record.json")
            remove_temporaries(self.out / "snapshots", "*.safetensors")
        resumed, changed = None, ""
        if self.checkpoint_path.exists():
            tensors, meta = read_tensors(self.checkpoint_path)
            changed = checkpoints.check_checkpoint(self.config, self.dataset, meta, self.checkpoint_path)
            with checkpoints.restoring(self.checkpoint_path):
                state.load(tensors, meta)
            task, stage, epoch = state.position
            resumed = f"task {task + 1}, stage {stage + 1}, epoch {epoch}"
        elif self.config.start:
            self._load_start(state, Path(self.config.start))
            resumed = f"snapshot {self.config.start}"
        world_size = self.distributed.world_size
        if world_size not in state.progress.ranks:
            state.progress.ranks.append(world_size)
        if state.progress.ranks != [world_size]:
            self.bases = None  # a base trained on different numbers of processes is not shared
        self.distributed.barrier()
        return resumed, changed

    def _load_start(self, state: RunState, path: Path) -> None:
        tensors, meta = checkpoints.read_start(path)
        checkpoints.check_start(self.config, self.dataset, state.parts, tensors, meta)
        with checkpoints.restoring(path, "Give another snapshot, or leave start out."):
            state.load(checkpoints.trained_tensors(tensors), meta)
        shared = checkpoints.is_own_base(self.config, state.parts, meta)
        state.progress.base = {"snapshot": self.config.start, "code": meta["code"], "shared": shared}
        copy = self.snapshot_path(meta["grown"])  # the study looks for all snapshots of a run in its folder
        if self.distributed.is_main and self.config.snapshots and not copy.exists():
            adopted = {key: value for key, value in meta.items() if key not in ("format", "hashes")}
            write_tensors(copy, tensors, adopted | {"config": self.config.resolved()})

    def _notices(self, state: RunState) -> Iterator[str]:
        """Warnings before training starts."""
        if self.config.device == "auto" and (problem := gpu_problem()):
            yield f"training on the CPU, since the GPU cannot be used: {problem}"
        method = state.parts.method
        net = None if method.pretrained else getattr(method.options, "net", None)
        side = state.parts.world.image_shape[-1]
        if net is not None and (other := finer_backbone(net, side)):
            last = BACKBONES[net].last_side(side)
            yield (
                f"for images of {side} x {side} the last feature maps of {net} are {last} x {last}; {other} is made "
                f"for smaller images (--set {self.config.method}.net={other})"
            )
        yield from filter(None, (addon.notice() for addon in state.parts.addons))

    # The shared base ------------------------------------------------------------------------------------

    def _base_end(self, state: RunState) -> Position:
        """The position at which the base task's own stages are trained."""
        return Position(0, len(state.parts.method.stages(state.parts.tasks[0])))

    def _load_or_lock_base(self, state: RunState) -> Iterator[ev.Event]:
        """Load the shared base if it exists, wait while another run trains it, or take its lock to train it.

        A run that has begun its base continues with its own. One that has not releases its folder while it waits, so
        that another process may take the run over.
        """
        distributed = self.distributed
        while self.bases is not None and state.position <= self._base_end(state):
            base = self._base = BaseFile(self.bases, base_key(self.config, self.dataset, state.parts, distributed))
            while not distributed.broadcast_bool(distributed.is_main and base.acquire()):
                if state.position == Position() and distributed.world_size == 1:
                    self._lock.release()
                yield ev.Tick(waiting=True, blocked=True)
            self._lock_folder()
            if state.position == Position() and self.checkpoint_path.exists():  # another process has begun the run
                self._release_base()
                self._resume(state)
                continue
            if distributed.is_main:
                remove_temporaries(self.bases, base.file.name)
            if distributed.broadcast_bool(base.exists()) and state.position == Position():
                tensors, meta = checkpoints.read_base(base.file)
                with checkpoints.restoring(base.file, checkpoints.REMOVE_BASE):
                    state.load(tensors, meta, addons=False)
                state.progress.base = {"key": base.key, "shared": True}
                self._release_base()
                yield ev.Notice(f"base task loaded from {base.file}")
            return

    def _publish_base(self, state: RunState) -> list[ev.Event]:
        """Write the shared base and release its lock, once the base task's own stages are trained."""
        base = self._base
        if base is None or state.position != self._base_end(state):
            return []
        events: list[ev.Event] = []
        if self.distributed.is_main and not base.exists():
            began = time.monotonic()
            write_tensors(base.file, state.tensors(addons=False), state.meta("base"))
            events.append(ev.Saved(str(base.file), time.monotonic() - began))
        self._release_base()
        return events

    def _release_base(self) -> None:
        if self._base is not None:
            self._base.release()
            self._base = None


def drain(events: Iterator[ev.Event]) -> dict[str, Any]:
    """Drive a run to its end without a display; notices that are warnings become Python warnings."""
    record: dict[str, Any] = {}
    for event in events:
        if isinstance(event, ev.Tick) and event.waiting:
            time.sleep(0.001)
        elif isinstance(event, ev.Notice) and event.warning:
            warnings.warn(event.text, stacklevel=2)
        elif isinstance(event, ev.Finished):
            record = event.record
    return record


def finish(run: Run) -> dict[str, Any]:
    """Run to the end and return the record."""
    return drain(run.events())
