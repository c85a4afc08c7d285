"""The one training loop. A run is a generator: it queues work and yields events.

A run's position is (task, stage, epoch), and means: all before is done. Epoch 0 of a stage: its begin hook has
not run; stage 0, epoch 0: the task has not begun. So begin hooks run once, and a run that was killed goes on
from its last checkpoint as if nothing had happened: every draw is seeded by what is being done.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.atomic_files import FileLock, read_meta, read_tensors, sweep_temporaries, write_bytes, write_tensors
from incvec.config import RunConfig
from incvec.contracts import Stage, Task, no_probe
from incvec.data import Dataset
from incvec.engine import checkpoint as checkpoints
from incvec.engine import events as ev
from incvec.engine.build import Parts, build, pick_device
from incvec.engine.capture import Way, compile_and_capture
from incvec.engine.checkpoint import Position, Saver
from incvec.engine.device_errors import explained, gpu_problem
from incvec.engine.distributed import SINGLE_PROCESS, Ranks
from incvec.engine.estimate import Estimate
from incvec.engine.evaluate import correct_by_class, deployed
from incvec.engine.losses import History, check_weights, fetch_history, read_terms
from incvec.engine.record import Progress, accuracy_matrix, make_record, task_counts
from incvec.engine.restore import grow, restore
from incvec.engine.seeds import derive
from incvec.engine.shared_bases import BaseFile, base_key
from incvec.engine.stage import StageLoop, check_rates
from incvec.errors import Busy, CheckpointError, TrainingError
from incvec.ivt.fisher import BatchFisher
from incvec.metrics import weighted_mean
from incvec.nets import BACKBONES, finer_backbone
from incvec.records import read_record


class Run:
    """One method, its add-ons, one data set, one seed, in one folder."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, out: Path, bases: Path | None = None, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        self.config, self.dataset, self.out, self.bases, self.ranks = config, dataset, out, bases, ranks
        self.name = " + ".join([config.method, *config.addons]) + (" oracle" if config.oracle else "")
        self.device = pick_device(config.device, ranks.local)
        self._new_generators()
        self.shuffle_generator = torch.Generator(self.device)
        self.position: Position = (0, 0, 0)
        self.progress = Progress()
        self.loop: StageLoop | None = None
        self.parts: Parts
        self.estimate: Estimate
        self.base: BaseFile | None = None
        self._saver = Saver(self.checkpoint_path, self.device)
        self._clock = time.monotonic()
        self._later_notice = ""
        self._lock = FileLock(out / ".lock")
        self._slower: set[Way] = set()  # what could not be compiled or captured
        self._encoded: list[Tensor] = []  # test images, of a method whose encoder rests
        self.crowded: Callable[[], bool] = lambda: False  # whether other runs hold memory that will come free

    def _new_generators(self) -> torch.Generator:
        """Those that a step draws from; returns that of the views."""
        self.generator = torch.Generator(self.device)
        self.views_generator = torch.Generator(self.device)
        if hasattr(self, "parts"):
            self.parts.world.generator = self.generator
        return self.views_generator

    # Files ----------------------------------------------------------------------------------------------

    @property
    def checkpoint_path(self) -> Path:
        return self.out / "checkpoint.safetensors"

    @property
    def record_path(self) -> Path:
        return self.out / "record.json"

    def snapshot_path(self, task: int) -> Path:
        return self.out / "snapshots" / f"task-{task:02d}.safetensors"

    # The whole run --------------------------------------------------------------------------------------

    def events(self) -> Generator[ev.Event, None, None]:
        """Train, evaluate, save; yields as it goes. On a GPU all its work goes through a stream of its own."""
        inner = self._events()
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        try:
            while True:
                with explained(self.device, self._where()), torch.cuda.stream(stream):  # none on a CPU
                    event = next(inner, None)
                if event is None:
                    return
                yield event
        finally:
            inner.close()

    def _where(self) -> str:
        task, stage, _ = self.position
        return f"in task {task + 1}, stage {stage + 1} of {self.name}"

    def _events(self) -> Generator[ev.Event, None, None]:
        if self.record_path.exists():
            record = read_record(self.record_path)
            checkpoints.check_finished(self.config, self.dataset, record, self.record_path)
            yield ev.Finished(record, str(self.record_path), already=True)
            return
        try:
            if self.out.is_dir():  # what was done there before is looked at before the device is filled
                self._take_folder()
                if self.checkpoint_path.exists():
                    meta = read_meta(self.checkpoint_path)
                    checkpoints.check_checkpoint(self.config, self.dataset, meta, self.checkpoint_path)
            self._build()
            self._take_folder()  # a new one is made only for settings that are possible
            resumed = self._resume()
            self._join()
            for text in self._notices():
                self.progress.note(text)
                yield ev.Notice(text)
            yield ev.Started(self.name, len(self.parts.tasks), self.parts.engine, str(self.device), resumed)
            yield from self._reach_base()
            if self.record_path.exists():  # another process has done it while this one waited for its base
                record = read_record(self.record_path)
                checkpoints.check_finished(self.config, self.dataset, record, self.record_path)
                yield ev.Finished(record, str(self.record_path), already=True)
                return
            while self.position[0] < len(self.parts.tasks):
                yield from self._task(self.parts.tasks[self.position[0]])
            record = make_record(self.config, self.dataset, self.parts, self.progress, self._seconds())
            self._saver.wait()
            if self.ranks.is_main:
                write_bytes(self.record_path, (json.dumps(record, indent=1) + "\n").encode())
                self.checkpoint_path.unlink(missing_ok=True)
            self.ranks.wait()
            yield ev.Finished(record, str(self.record_path))
        finally:
            self._drop_loop()
            with contextlib.suppress(CheckpointError):
                self._saver.wait()
            if self.base is not None:
                self.base.release()
            self._lock.release()

    def _take_folder(self) -> None:
        if self.ranks.is_main and not self._lock.acquire():
            raise Busy(f"another process is at work in {self.out}. Wait for it, or choose another --out.")

    def _build(self) -> None:
        self.parts = build(self.config, self.dataset, self.generator, self.device)
        per_class = len(self.parts.world.train.labels) / len(self.parts.order)
        self.estimate = Estimate(self.parts.tasks, self._plan, per_class)
        stages = [stage for task in self.parts.tasks for stage in self._plan(task)]
        check_rates(stages, self.config.method)
        self.ranks.check(stages)
        if self.parts.engine == "graph" and not self.ranks.captures:
            self.parts.engine = "eager"  # the ranks share a GPU, so their messages go through the host

    def _join(self) -> None:
        """All ranks are at the same place; what they write from here on is the first one's."""
        size = self.ranks.size
        if size not in self.progress.ranks:
            self.progress.ranks.append(size)
        if self.progress.ranks != [size]:
            self.bases = None  # a base that several numbers of ranks have trained is nobody else's
        self.ranks.wait()

    def _drop_loop(self) -> None:
        """With all that hangs on it: a captured graph's memory, the optimizer's state."""
        if self.loop is not None:
            self.loop.world.probe = no_probe
            self.loop = None

    def _settle(self, **more: Tensor) -> None:
        """Every rank has run the same hook; where their devices differ in the last bit, the first one is right."""
        if self.ranks.size > 1:
            method = self.parts.method
            self.ranks.broadcast({**method.state_dict(keep_vars=False), **method.store, **more})

    def _resume(self) -> str | None:
        if self.ranks.is_main:
            sweep_temporaries(self.out, "*.safetensors", "record.json")
            sweep_temporaries(self.out / "snapshots", "*.safetensors")
        if self.checkpoint_path.exists():
            tensors, meta = read_tensors(self.checkpoint_path)
            self._later_notice = checkpoints.check_checkpoint(self.config, self.dataset, meta, self.checkpoint_path)
            self._load(tensors, meta)
            task, stage, epoch = self.position
            return f"task {task + 1}, stage {stage + 1}, epoch {epoch}"
        if self.config.start:
            tensors, meta = checkpoints.read_start(Path(self.config.start))
            checkpoints.check_start(self.config, self.dataset, self.parts, tensors, meta)
            self._load(checkpoints.trained_of(tensors), meta)
            shared = checkpoints.is_own_base(self.config, self.parts, meta)
            self.progress.base = {"snapshot": self.config.start, "code": meta["code"], "shared": shared}
            own = self.snapshot_path(meta["grown"])  # the lab looks for a run's beginning among its own
            if self.ranks.is_main and self.config.snapshots and not own.exists():
                write_tensors(own, tensors, checkpoints.taken_over(self.config, meta))
            return f"snapshot {self.config.start}"
        return None

    def _notices(self) -> Iterator[str]:
        """What is to be said before anything is trained."""
        if self._later_notice:
            yield self._later_notice
        if self.config.device == "auto" and (trouble := gpu_problem()):
            yield f"training on the CPU, since the GPU cannot be used: {trouble}"
        net = None if self.parts.method.pretrained else getattr(self.parts.method.options, "net", None)
        side = self.parts.world.image_shape[-1]
        if net is not None and (other := finer_backbone(net, side)):
            left = BACKBONES[net].last_side(side)
            yield (
                f"of images of {side} x {side} the last maps of {net} are {left} x {left}; {other} is for smaller "
                f"images (--set {self.config.method}.net={other})"
            )
        yield from filter(None, (addon.notice() for addon in self.parts.addons))

    def _reach_base(self) -> Iterator[ev.Event]:
        """Load the shared base where there is one, wait where another run trains it, or take its lock.

        A run that has begun its base goes on with its own: loading is for runs that have nothing yet. These leave
        their folder free while they wait, so that another process may take them.
        """
        own = len(self.parts.method.stages(self.parts.tasks[0]))
        if self.bases is None or self.position > (0, own, 0):
            return
        self.base = BaseFile(self.bases, base_key(self.config, self.dataset, self.parts, self.ranks))
        while not self.ranks.agree(self.ranks.is_main and self.base.acquire()):
            if self.position == (0, 0, 0) and self.ranks.size == 1:
                self._lock.release()
            yield ev.Tick(waiting=True, blocked=True)
        self._take_folder()
        if self.position == (0, 0, 0) and self.checkpoint_path.exists():  # begun and left by another process
            self.base.release()
            self.base = None
            self._resume()
            self._join()
            yield from self._reach_base()
            return
        if self.ranks.is_main:
            sweep_temporaries(self.bases, self.base.file.name)
        if self.ranks.agree(self.base.exists()) and self.position == (0, 0, 0):
            tensors, meta = read_tensors(self.base.file)
            self._load(tensors, meta, addons=False)
            self.progress.base = {"key": self.base.file.stem, "shared": True}
            self.base.release()
            yield ev.Notice(f"base task taken from {self.base.file}")

    # A task ---------------------------------------------------------------------------------------------

    def _plan(self, task: Task) -> list[Stage]:
        return self.parts.plan(task)

    def _listeners(self, task: Task, stage: Stage | None = None) -> list[Any]:
        """Add-ons that hear of this: all of them, except in the base task's own stages."""
        if task.index == 0 and (stage is None or stage.owner is None):
            return []
        return self.parts.addons

    def _reseed(self, *purpose: object) -> None:
        self.generator.manual_seed(derive(self.config.seed, *purpose))

    def _task(self, task: Task) -> Iterator[ev.Event]:
        method, addons = self.parts.method, self.parts.addons
        began = time.monotonic()
        if self.position == (task.index, 0, 0):
            grow(self.parts, task, self.config.seed)
            self._reseed(task.index, "begin_task")
            method.begin_task(task)
            for addon in self._listeners(task):
                self._reseed(task.index, "begin_task", addon.name)
                addon.begin_task(task)
            self._settle()
        stages = self._plan(task)
        own = len(method.stages(task))
        while self.position[1] < len(stages):
            if task.index == 0 and self.position == (0, own, 0):
                yield from self._publish_base()
            yield from self._stage(task, stages[self.position[1]])
        if task.index == 0 and self.position == (0, own, 0):
            yield from self._publish_base()
        for addon in addons:
            self._reseed(task.index, "end_task", addon.name)
            addon.end_task(task)
        self._reseed(task.index, "end_task")
        method.end_task(task)
        self._settle()
        self.progress.statistics.append({addon.name: addon.statistics() for addon in addons})
        self.progress.task_seconds.append(round(time.monotonic() - began, 3))  # of this life, without evaluation
        yield from self._evaluate(task)
        if task.index == 0:
            self.parts.world.base_fisher = None
        self.position = (task.index + 1, 0, 0)
        yield self._save()

    def _publish_base(self) -> Iterator[ev.Event]:
        if self.base is not None and self.ranks.is_main and not self.base.exists():
            began = time.monotonic()
            write_tensors(self.base.file, self._tensors(addons=False), self._meta("base"))
            yield ev.Saved(str(self.base.file), time.monotonic() - began)
        if self.base is not None:
            self.base.release()

    def _evaluate(self, task: Task) -> Iterator[ev.Event]:
        """Fill one row, from the deployed weights where an add-on deploys others than it trains."""
        method = self.parts.method
        with deployed(method, self.parts.addons, task) as kept:
            self._reseed(task.index, "evaluation")
            method.begin_evaluation(task)
            self._settle()
            rows = self.parts.test.rows_of(0, task.n_seen)
            known = self._encoded if method.frozen_encoder and not self.parts.addons else None  # add-ons may move it
            found = correct_by_class(method, self.parts.world, self.parts.test, rows, task, self.ranks, known)
            for name, counts in found.items():
                self.progress.correct.setdefault(name, []).append(counts)
            if self.ranks.is_main and self.config.snapshots:
                trained = {f"trained/{name}": weight for name, weight in kept.items()}  # where training goes on from
                snapshot = {**checkpoints.snapshot_of(self.parts), **trained}
                write_tensors(self.snapshot_path(task.index), snapshot, self._meta("snapshot", (task.index + 1, 0, 0)))
        matrix = self.matrix()
        totals = task_counts(self.parts)
        yield ev.TaskEnded(task.index, weighted_mean(matrix[-1], totals), matrix[-1])

    # A stage --------------------------------------------------------------------------------------------

    def _stage(self, task: Task, stage: Stage) -> Iterator[ev.Event]:
        parts = self.parts
        number = self.position[1]
        listeners = self._listeners(task, stage)
        if self.loop is None:
            self._reseed(task.index, stage.name, "begin_stage")
            rows = parts.method.begin_stage(task, stage) if stage.owner is None else None
            for addon in listeners:
                self._reseed(task.index, stage.name, "begin_stage", addon.name)
                given = addon.begin_stage(task, stage)
                if stage.owner == addon.name:
                    rows = given
            if rows is None:
                raise TrainingError(f"stage {stage.name!r} was given no rows by {stage.owner or parts.method.name}.")
            self._settle(rows=rows)
            self.loop = self._make_loop(task, stage, rows)
        loop = self.loop
        parts.world.probe = loop.probe
        loop.set_mode(self.config.sync_batchnorm)
        lane = (f"rank {self.ranks.rank} of {self.ranks.size}",) if loop.sharded else ()  # its samples, its draws
        log = self.progress.losses_of(task, stage)
        began = time.monotonic()
        yield from self._speed_up(loop)
        log["capture_seconds"] = round(log.get("capture_seconds", 0.0) + time.monotonic() - began, 3)
        self.estimate.saw(task, stage, len(loop.rows))
        yield ev.StageStarted(task.index, stage.name, stage.epochs, self.position[2], len(loop.rows), loop.steps)
        pending: History | None = None
        began = time.monotonic()
        for epoch in range(self.position[2], stage.epochs):
            where = (task.index, stage.name, epoch)
            self._reseed(*where, "loss", *lane)
            self.views_generator.manual_seed(derive(self.config.seed, *where, "views", *lane))
            self.shuffle_generator.manual_seed(derive(self.config.seed, *where, "shuffle"))
            loop.prepare(epoch, self.shuffle_generator)
            if loop.fisher is not None:
                loop.fisher.zero_()
            for addon in listeners:
                addon.begin_epoch(task, stage, epoch + 1)
            for _ in loop.epoch():
                yield ev.Tick()
            self.ranks.average_statistics(parts.method)
            for addon in listeners:
                addon.end_epoch(task, stage, epoch + 1, loop.optimizer)
            if loop.probed:  # weights were made from what each rank saw
                loop.probed = False
                self._settle()
            current = fetch_history(loop, self.ranks, epoch)
            if pending is not None:
                yield from self._read_history(task, stage, loop, log, pending)
            pending = current
            if self._save_due() and epoch + 1 < stage.epochs:
                yield from self._read_history(task, stage, loop, log, pending)
                pending = None
                self.position = (task.index, number, epoch + 1)
                yield self._save()
        if pending is not None:
            yield from self._read_history(task, stage, loop, log, pending)
        log["seconds"] = round(log["seconds"] + time.monotonic() - began, 3)
        check_weights(loop.parameters, task, stage)
        if loop.fisher is not None:
            parts.world.base_fisher = {
                name.removeprefix("model."): value
                for name, value in loop.fisher.mean().items()
                if name.startswith("model.")
            }
        for addon in listeners:
            self._reseed(task.index, stage.name, "end_stage", addon.name)
            addon.end_stage(task, stage)
        self._reseed(task.index, stage.name, "end_stage")
        if stage.owner is None:
            parts.method.end_stage(task, stage)
        self._settle()
        self._drop_loop()
        self.position = (task.index, number + 1, 0)
        if self._save_due():
            yield self._save()

    def _make_loop(self, task: Task, stage: Stage, rows: Tensor) -> StageLoop:
        parts = self.parts
        listeners = self._listeners(task, stage)
        loop = StageLoop(parts.method, listeners, parts.world, stage, rows, self.views_generator, self.ranks)
        if task.index == 0 and stage.role == "main":
            loop.fisher = BatchFisher(loop.parameters)
        return loop

    def _speed_up(self, loop: StageLoop) -> Iterator[ev.Event]:
        """Compile and capture the step, or say why it stays eager."""
        if self.parts.engine != "graph":
            return
        if loop.stage.eager:
            self.progress.note(f"stage {loop.stage.name!r} runs eagerly: {loop.stage.eager}")
            return
        for addon in loop.addons:
            addon.begin_epoch(self.parts.method.task, loop.stage, self.position[2] + 1)
        live = {**self._tensors(addons=False), **loop.parameters}
        quiet, renew = self._saver.wait, self._new_generators
        for text in compile_and_capture(loop, live, quiet, renew, self._slower, self.crowded, self.ranks):
            self.progress.note(text)
            yield ev.Notice(text)

    def _read_history(
        self, task: Task, stage: Stage, loop: StageLoop, log: dict[str, Any], history: History
    ) -> Iterator[ev.Event]:
        while not history.arrived():
            yield ev.Tick(waiting=True)
        terms = read_terms(history, loop.terms, f"task {task.index + 1}, stage {stage.name!r}", self._last_good)
        for name, value in terms.items():
            log["terms"].setdefault(name, []).append(float(f"{value:.5g}"))
        fraction, left = self.estimate.at(task, stage, history.epoch + 1)
        yield ev.EpochEnded(task.index, stage.name, history.epoch + 1, stage.epochs, terms, fraction, left)

    # State ----------------------------------------------------------------------------------------------

    def _tensors(self, addons: bool = True) -> dict[str, Tensor]:
        return checkpoints.live_tensors(self.parts, self.parts.world.base_fisher, self.loop, addons)

    def _meta(self, kind: str, position: Position | None = None) -> dict[str, Any]:
        progress = dict(vars(self.progress), seconds=self._seconds())
        return checkpoints.describe(kind, position or self.position, self.config, self.dataset, self.parts, progress)

    def _load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], addons: bool = True) -> None:
        """Grow the structure the file was written with, then fill in the values."""
        self._drop_loop()
        groups = restore(self.parts, tensors, meta, self.config.seed, addons)
        if "fisher" in groups:
            self.parts.world.base_fisher = {name: t.to(self.device, copy=True) for name, t in groups["fisher"].items()}
        self.position = tuple(meta["position"])
        self.progress = Progress(**meta["progress"])
        self._clock = time.monotonic()
        if "loop" in groups:
            task = self.parts.tasks[self.position[0]]
            stage = self._plan(task)[self.position[1]]
            self.loop = self._make_loop(task, stage, groups["loop"]["rows"].to(self.device))
            self.loop.load_state(groups["loop"])

    def _seconds(self) -> float:
        return round(self.progress.seconds + time.monotonic() - self._clock, 3)

    def _last_good(self) -> str:
        self._saver.wait()
        known = self.checkpoint_path.exists()
        return f"the last good checkpoint is {self.checkpoint_path}" if known else "nothing had been saved yet"

    def _save_due(self) -> bool:
        return self.ranks.is_main and self._saver.due()

    def _save(self) -> ev.Saved:
        if not self.ranks.is_main:
            return ev.Saved(str(self.checkpoint_path), 0.0)
        return self._saver.save(self._tensors(), self._meta("checkpoint"))

    def matrix(self, classifier: str | None = None) -> list[list[float]]:
        """Rows of the accuracy matrix so far, in percent."""
        return accuracy_matrix(self.progress, self.parts, classifier)


def finish(run: Run) -> dict[str, Any]:
    """Turn a run to its end and return its record."""
    record: dict[str, Any] = {}
    for event in run.events():
        if isinstance(event, ev.Tick) and event.waiting:
            time.sleep(0.001)
        elif isinstance(event, ev.Finished):
            record = event.record
    return record
