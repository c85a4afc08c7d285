"""The one training loop. A run is a generator: it queues work and yields events.

A run's position is (task, stage, epoch), and means: all before is done. Epoch 0 of a stage: its begin hook has
not run; stage 0, epoch 0: the task has not begun. So begin hooks run once, and a run that was killed goes on
from its last checkpoint as if nothing had happened: every draw is seeded by what is being done.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.config import RunConfig, differences
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.build import Parts, build, code_version, pick_device
from incvec.engine.evaluate import correct_by_class
from incvec.engine.files import Writer, read_tensors, sweep_temporaries, write_bytes, write_tensors
from incvec.engine.ranks import ALONE, Ranks
from incvec.engine.restore import grow, restore
from incvec.engine.seeds import derive
from incvec.engine.shared import BaseFile, Lock, base_key
from incvec.engine.stage import StageLoop, capture
from incvec.errors import CheckpointError, ConfigError, TrainingError
from incvec.ivt.fisher import BatchFisher
from incvec.metrics import counts_by_task, matrix_from_counts, summarise
from incvec.records import FORMAT, environment, read_record

SAVING_SHARE = 20  # a checkpoint is due once 20 times the last write's duration has passed


@dataclass
class Progress:
    """What a run has to show so far; plain values, kept in the checkpoint's JSON."""

    correct: dict[str, list[list[int]]] = field(default_factory=dict)  # classifier -> task -> by class
    losses: list[dict[str, Any]] = field(default_factory=list)  # a row a stage
    facts: list[dict[str, Any]] = field(default_factory=list)  # a row a task, from the add-ons
    task_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    notices: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)  # whether the base task's weights came from another run
    ranks: list[int] = field(default_factory=list)  # over how many processes it ran; several where it went on with more


class Run:
    """One method, its add-ons, one data set, one seed, in one folder."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, out: Path, bases: Path | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.config, self.dataset, self.out, self.bases, self.ranks = config, dataset, out, bases, ranks
        self.name = " + ".join([config.method, *config.addons]) + (" oracle" if config.oracle else "")
        self.device = pick_device(config.device, ranks.local)
        self._new_generators()
        self.shuffle_generator = torch.Generator(self.device)
        self.position = (0, 0, 0)
        self.progress = Progress()
        self.base_fisher: dict[str, Tensor] | None = None
        self.loop: StageLoop | None = None
        self.parts: Parts
        self.base: BaseFile | None = None
        self._plans: dict[int, list[Stage]] = {}
        self._last_write = (0.0, 0.0)  # when, and how long it took
        self._writer = Writer()
        self._clock = time.monotonic()
        self._later_notice = ""
        self._lock = Lock(out / ".lock")
        self._work_start: tuple[float, float] | None = None
        self._rows_seen: dict[tuple[bool, str], float] = {}

    def _new_generators(self) -> None:
        self.generator = torch.Generator(self.device)
        self.views_generator = torch.Generator(self.device)
        if hasattr(self, "parts"):
            self.parts.world.generator = self.generator

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

    def events(self) -> Iterator[ev.Event]:
        """Train, evaluate, save; yields as it goes. On a GPU all its work goes through a stream of its own."""
        inner = self._events()
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        try:
            while True:
                with torch.cuda.stream(stream):  # does nothing where there is none
                    event = next(inner, None)
                if event is None:
                    return
                yield event
        finally:
            inner.close()

    def _events(self) -> Generator[ev.Event, None, None]:
        if self.record_path.exists():
            record = read_record(self.record_path)
            self._same_config(record["config"], self.record_path)
            yield ev.Finished(record, str(self.record_path), already=True)
            return
        self.parts = build(self.config, self.dataset, self.generator, self.device)
        self._check_ranks()
        if self.ranks.is_first and not self._lock.acquire():
            raise CheckpointError(f"another process is at work in {self.out}. Wait for it, or choose another --out.")
        try:
            resumed = self._resume()
            self._join()
            if self._later_notice:
                self._note(self._later_notice)
                yield ev.Notice(self._later_notice)
            yield ev.Started(self.name, len(self.parts.tasks), self.parts.engine, str(self.device), resumed)
            yield from self._reach_base()
            while self.position[0] < len(self.parts.tasks):
                yield from self._task(self.parts.tasks[self.position[0]])
            record = self._record()
            self._writer.wait()
            if self.ranks.is_first:
                write_bytes(self.record_path, (json.dumps(record, indent=1) + "\n").encode())
                self.checkpoint_path.unlink(missing_ok=True)
            self.ranks.wait()
            yield ev.Finished(record, str(self.record_path))
        finally:
            self.loop = None
            with contextlib.suppress(CheckpointError):
                self._writer.wait()
            if self.base is not None:
                self.base.release()
            self._lock.release()

    def _check_ranks(self) -> None:
        """Before anything is trained: each rank takes an equal part of every batch."""
        size = self.ranks.size
        for stage in [s for task in self.parts.tasks for s in self._plan(task)] if size > 1 else []:
            if stage.optimiser is not None and stage.batch_size % size:
                raise ConfigError(
                    f"stage {stage.name!r} of {stage.owner or self.config.method} has batches of {stage.batch_size}, "
                    f"which {size} ranks cannot share equally. Choose a batch size that divides by {size}."
                )
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

    def _settle(self, **more: Tensor) -> None:
        """Every rank has run the same hook; where their devices differ in the last bit, the first one is right."""
        if self.ranks.size > 1:
            method = self.parts.method
            self.ranks.broadcast({**method.state_dict(keep_vars=False), **method.store, **more})

    def _resume(self) -> str | None:
        if self.ranks.is_first:
            sweep_temporaries(self.out)
            sweep_temporaries(self.out / "snapshots")
        if self.checkpoint_path.exists():
            tensors, meta = read_tensors(self.checkpoint_path)
            self._same_config(meta["config"], self.checkpoint_path)
            if meta["fingerprint"] != self.dataset.fingerprint:
                raise CheckpointError(f"{self.checkpoint_path} was made with other images; move it away to start anew.")
            if meta["code"] != code_version(self.config.method):
                self._later_notice = "the program has changed since the checkpoint this run goes on from"
            self._load(tensors, meta)
            task, stage, epoch = self.position
            return f"task {task + 1}, stage {stage + 1}, epoch {epoch}"
        if self.config.start:
            tensors, meta = read_tensors(Path(self.config.start))
            self._check_start(tensors, meta)
            trained = {name.removeprefix("trained/"): t for name, t in tensors.items() if name.startswith("trained/")}
            plain = {name: t for name, t in tensors.items() if not name.startswith("trained/")}
            self._load(plain | {f"method/model.{name}": t for name, t in trained.items()}, meta)
            return f"snapshot {self.config.start}"
        return None

    def _check_start(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """A run may begin at another's snapshot where both have the same past: network, classes, add-ons."""
        where = f"{self.config.start} cannot be begun at"
        if meta.get("kind") != "snapshot":
            raise CheckpointError(f"{where}: it is not a snapshot of a task.")
        other, seen = meta["config"], self.parts.tasks[meta["grown"]].n_seen
        net, method = self.config.sections[self.config.method].get("net"), self.config.method
        if (other["method"], other.get(other["method"], {}).get("net")) != (method, net):
            raise CheckpointError(f"{where}: it is of {other['method']}, this run is {method} with {net}.")
        if meta["class_order"][:seen] != self.parts.order[:seen] or meta["fingerprint"] != self.dataset.fingerprint:
            raise CheckpointError(f"{where}: its classes so far, or their images, are not this run's.")
        lacking = [name for name in self.config.addons if name not in other["addons"]]
        if lacking:
            raise CheckpointError(
                f"{where}: its run had no add-on {', '.join(lacking)}, whose memory of the tasks so far is missing. "
                f"Begin at a snapshot of a run with {', '.join(self.config.addons)}."
            )
        kept = {name.split("/")[1] for name in tensors if name.startswith("addon/")}
        bare = [addon.name for addon in self.parts.addons if addon.state() and addon.name not in kept]
        if bare:
            raise CheckpointError(
                f"{where}: what {bare[0]} remembers of the tasks so far was not kept in it. Train that run with "
                f"--set {bare[0]}.snapshot_fisher=true."
            )

    def _same_config(self, saved: Mapping[str, Any], where: Path) -> None:
        rows = differences(self.config.resolved(), saved)
        if rows:
            raise CheckpointError(
                f"{where} belongs to another configuration ({'; '.join(rows[:6])}). Choose another --out, or "
                "give the settings it was made with."
            )

    def _reach_base(self) -> Iterator[ev.Event]:
        """Load the shared base where there is one, wait where another run trains it, or take its lock.

        A run that has begun its base goes on with its own: loading is for runs that have nothing yet.
        """
        own = len(self.parts.method.stages(self.parts.tasks[0]))
        if self.bases is None or self.position > (0, own, 0):
            return
        self.base = BaseFile(self.bases, base_key(self.config, self.dataset, self.parts, self.ranks))
        while not self.ranks.agree(self.ranks.is_first and self.base.acquire()):
            yield ev.Tick(waiting=True, blocked=True)
        if self.ranks.is_first:
            sweep_temporaries(self.bases)
        if self.ranks.agree(self.base.exists()) and self.position == (0, 0, 0):
            tensors, meta = read_tensors(self.base.file)
            self._load(tensors, meta, addons=False)
            self.progress.base = {"key": self.base.file.stem, "shared": True}
            self.base.release()
            yield ev.Notice(f"base task taken from {self.base.file}")

    # A task ---------------------------------------------------------------------------------------------

    def _plan(self, task: Task) -> list[Stage]:
        if task.index not in self._plans:
            own = self.parts.method.stages(task)
            stages = own
            for addon in self.parts.addons:
                stages = addon.plan(task, list(stages))
            if task.index == 0 and stages[: len(own)] != own:
                raise TrainingError("an add-on changed the base task's own stages; it may only append to them.")
            self._plans[task.index] = stages
        return self._plans[task.index]

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
            addon.end_task(task, self.base_fisher if task.index == 0 else None)
        self._reseed(task.index, "end_task")
        method.end_task(task)
        self._settle()
        self.progress.facts.append({addon.name: addon.facts() for addon in addons})
        self.progress.task_seconds.append(round(time.monotonic() - began, 3))  # of this life, without evaluation
        yield from self._evaluate(task)
        if task.index == 0:
            self.base_fisher = None
        self.position = (task.index + 1, 0, 0)
        yield self._save()

    def _publish_base(self) -> Iterator[ev.Event]:
        if self.base is not None and self.ranks.is_first and not self.base.exists():
            began = time.monotonic()
            write_tensors(self.base.file, self._tensors(addons=False), self._meta("base"))
            yield ev.Saved(str(self.base.file), time.monotonic() - began)
        if self.base is not None:
            self.base.release()

    def _evaluate(self, task: Task) -> Iterator[ev.Event]:
        """Fill one row, from the deployed weights where an add-on deploys others than it trains."""
        method = self.parts.method
        deployed = [weights for addon in self.parts.addons if (weights := addon.deployed(task)) is not None]
        state = method.model.state_dict(keep_vars=False)
        kept = {name: state[name].clone() for name in deployed[-1]} if deployed else {}
        with torch.no_grad():
            for name, weight in deployed[-1].items() if deployed else ():
                state[name].copy_(weight)
        self._reseed(task.index, "evaluation")
        method.begin_evaluation(task)
        self._settle()
        rows = self.parts.test.rows_of(0, task.n_seen)
        found = correct_by_class(method, self.parts.world, self.parts.test, rows, task, self.ranks)
        for name, counts in found.items():
            self.progress.correct.setdefault(name, []).append(counts)
        if self.ranks.is_first and self.config.snapshots:
            trained = {f"trained/{name}": weight for name, weight in kept.items()}  # where training goes on from
            snapshot = {**self._snapshot(), **trained}
            write_tensors(self.snapshot_path(task.index), snapshot, self._meta("snapshot", task.index + 1))
        with torch.no_grad():
            for name, weight in kept.items():
                state[name].copy_(weight)
        matrix = self.matrix()
        totals = self._test_counts()
        weighted = sum(a * n for a, n in zip(matrix[-1], totals, strict=False))
        yield ev.TaskEnded(task.index, weighted / sum(totals[: task.index + 1]), matrix[-1])

    # A stage --------------------------------------------------------------------------------------------

    def _stage(self, task: Task, stage: Stage) -> Iterator[ev.Event]:
        parts = self.parts
        number = self.position[1]
        listeners = self._listeners(task, stage)
        main_of_base = task.index == 0 and stage.role == "main"
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
        loop.set_mode(self.config.sync_batchnorm)
        lane = (f"rank {self.ranks.rank} of {self.ranks.size}",) if loop.sharded else ()  # its samples, its draws
        yield from self._speed_up(loop)
        self._rows_seen[(task.index == 0, stage.name)] = float(len(loop.rows))
        yield ev.StageStarted(task.index, stage.name, stage.epochs, self.position[2], len(loop.rows), loop.steps)
        log = self._loss_log(task, stage)
        pending: tuple[int, Tensor, Any] | None = None
        began = time.monotonic()
        for epoch in range(self.position[2], stage.epochs):
            where = (task.index, stage.name, epoch)
            self._reseed(*where, "loss", *lane)
            self.views_generator.manual_seed(derive(self.config.seed, *where, "views", *lane))
            self.shuffle_generator.manual_seed(derive(self.config.seed, *where, "shuffle"))
            loop.prepare(epoch, self.shuffle_generator)
            if main_of_base and loop.fisher is not None:
                loop.fisher.zero_()
            for addon in listeners:
                addon.begin_epoch(task, stage, epoch + 1)
            for _ in loop.epoch():
                yield ev.Tick()
            self.ranks.average_statistics(parts.method)
            for addon in listeners:
                addon.end_epoch(task, stage, epoch + 1, loop.optimiser)
            current = (epoch, *self._fetch_history(loop))
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
        self._check_finite(task, stage, loop)
        if main_of_base and loop.fisher is not None:
            self.base_fisher = {
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
        self.loop = None
        self.position = (task.index, number + 1, 0)
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
            self._note(f"stage {loop.stage.name!r} runs eagerly: {loop.stage.eager}")
            return
        for addon in loop.addons:
            addon.begin_epoch(self.parts.method.task, loop.stage, self.position[2] + 1)
        live = {**self._tensors(addons=False), **loop.parameters}
        for attempt in ("compiled and captured", "captured"):
            try:
                self._writer.wait()  # its buffers are freed in a thread, which a capture must not see
                capture(loop, live, [self.generator, self.views_generator], compiled=attempt != "captured")
                problem = ""
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler or driver throws, training goes on a slower way
                problem = f"{type(error).__name__}: {error}"
            if not self.ranks.any(bool(problem)):  # all ranks go the same way
                return
            loop.replay = None
            self._new_generators()  # a broken capture leaves its generators unusable
            loop.views_generator = self.views_generator
            text = f"stage {loop.stage.name!r} could not be {attempt}: {problem or 'not on every rank'}"[:500]
            self._note(text)
            yield ev.Notice(text)

    def _note(self, text: str) -> None:
        if text not in self.progress.notices:
            self.progress.notices.append(text)

    def _fetch_history(self, loop: StageLoop) -> tuple[Tensor, Any]:
        """Queue a copy of the epoch's loss terms, those of all ranks averaged, to the host; nothing waits here."""
        self.ranks.average_([loop.history])
        if self.device.type != "cuda":
            return loop.history.clone(), None
        host = torch.empty(loop.history.shape, pin_memory=True)
        host.copy_(loop.history, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return host, done

    def _read_history(
        self, task: Task, stage: Stage, loop: StageLoop, log: dict[str, Any], pending: tuple[int, Tensor, Any]
    ) -> Iterator[ev.Event]:
        epoch, history, done = pending
        while done is not None and not done.query():
            yield ev.Tick(waiting=True)
        bad = (~history.isfinite()).nonzero()
        if len(bad):
            step, term = bad[0].tolist()
            self._writer.wait()
            saved = (
                f"the last good checkpoint is {self.checkpoint_path}"
                if self.checkpoint_path.exists()
                else ("nothing had been saved yet")
            )
            raise TrainingError(
                f"loss term {loop.terms[term]!r} became {history[step, term].item()} in task {task.index + 1}, "
                f"stage {stage.name!r}, epoch {epoch + 1}, step {step + 1}; {saved}. A smaller learning rate or "
                "--set precision=fp32 may help."
            )
        means = history.mean(0).tolist()
        terms = dict(zip(loop.terms, means, strict=True))
        for name, value in terms.items():
            log["terms"].setdefault(name, []).append(float(f"{value:.5g}"))
        fraction, left = self._estimate(task, stage, epoch + 1)
        yield ev.EpochEnded(task.index, stage.name, epoch + 1, stage.epochs, terms, fraction, left)

    def _check_finite(self, task: Task, stage: Stage, loop: StageLoop) -> None:
        """The last step's update has been seen by no loss: look at the weights themselves before they are saved."""
        if not loop.parameters:
            return
        norms = torch.stack(torch._foreach_norm([p.detach() for p in loop.parameters.values()]))
        if not bool(norms.isfinite().all()):
            names = [n for n, norm in zip(loop.parameters, norms.tolist(), strict=True) if not math.isfinite(norm)]
            raise TrainingError(
                f"weights are no longer finite after task {task.index + 1}, stage {stage.name!r}: "
                f"{', '.join(names[:3])}; they were not saved. A smaller learning rate may help."
            )

    def _loss_log(self, task: Task, stage: Stage) -> dict[str, Any]:
        for row in self.progress.losses:
            if row["task"] == task.index and row["stage"] == stage.name:
                return row
        row = {"task": task.index, "stage": stage.name, "terms": {}, "seconds": 0.0}
        self.progress.losses.append(row)
        return row

    def _estimate(self, task: Task, stage: Stage, epochs_done: int) -> tuple[float, float | None]:
        """Share of the whole run's work done, and the seconds left at the rate so far."""
        total = done = 0.0
        labels = self.parts.world.train.labels
        per_class = len(labels) / self.parts.tasks[-1].n_seen
        for t in self.parts.tasks:
            for s in self._plan(t):
                rows = self._rows_seen.get((t.index == 0, s.name), per_class * t.n_new)
                total += rows * s.epochs
                here = (t.index, self._plan(t).index(s))
                now = (task.index, self._plan(task).index(stage))
                if here < now:
                    done += rows * s.epochs
                elif here == now:
                    done += rows * epochs_done
        clock = time.monotonic()
        if self._work_start is None:
            self._work_start = (clock, done)
            return done / total, None
        began, at = self._work_start
        rate = (done - at) / max(clock - began, 1e-9)
        return done / total, (total - done) / rate if rate > 0 else None

    # State ----------------------------------------------------------------------------------------------

    def _tensors(self, addons: bool = True) -> dict[str, Tensor]:
        """Every live tensor needed to go on; the names never clash."""
        method = self.parts.method
        found = {f"method/{name}": tensor for name, tensor in method.state_dict(keep_vars=False).items()}
        found |= {f"store/{name}": tensor for name, tensor in method.store.items()}
        if addons:
            for addon in self.parts.addons:
                found |= {f"addon/{addon.name}/{name}": tensor for name, tensor in addon.state().items()}
        if self.base_fisher is not None:
            found |= {f"fisher/{name}": tensor for name, tensor in self.base_fisher.items()}
        if self.loop is not None:
            found |= {f"loop/{name}": tensor for name, tensor in self.loop.state().items()}
        return found

    def _snapshot(self) -> dict[str, Tensor]:
        """A task's model, with what a run needs to begin there: no teacher, no optimiser."""
        left_out = ("method/teacher.", "loop/", "fisher/")
        found = {name: t for name, t in self._tensors(addons=False).items() if not name.startswith(left_out)}
        for addon in self.parts.addons:
            found |= {f"addon/{addon.name}/{name}": tensor for name, tensor in addon.snapshot().items()}
        return found

    def _meta(self, kind: str, tasks_done: int | None = None) -> dict[str, Any]:
        position = list(self.position) if tasks_done is None else [tasks_done, 0, 0]
        progress = dict(vars(self.progress), seconds=self._seconds())
        return {
            "kind": kind,
            "position": position,
            "grown": (position[0] - 1) if position[1:] == [0, 0] else position[0],
            "config": self.config.resolved(),
            "class_order": self.parts.order,
            "fingerprint": self.dataset.fingerprint,
            "code": code_version(self.config.method),
            "progress": progress,
            "engine": self.parts.engine,
        }

    def _load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], addons: bool = True) -> None:
        """Grow the structure the file was written with, then fill in the values."""
        self.loop = None
        groups = restore(self.parts, tensors, meta, self.config.seed, addons)
        if "fisher" in groups:
            self.base_fisher = {name: t.to(self.device, copy=True) for name, t in groups["fisher"].items()}
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

    def _save_due(self) -> bool:
        if not self.ranks.is_first:
            return False
        if self.device.type == "cuda":
            writer = self._writer
            return not writer.busy() and time.monotonic() - writer.finished > SAVING_SHARE * writer.took
        when, took = self._last_write
        return time.monotonic() - when > SAVING_SHARE * took

    def _save(self) -> ev.Saved:
        began = time.monotonic()
        if not self.ranks.is_first:
            return ev.Saved(str(self.checkpoint_path), 0.0)
        if self.device.type == "cuda":
            self._writer.submit(self.checkpoint_path, self._tensors(), self._meta("checkpoint"))
            return ev.Saved(str(self.checkpoint_path), time.monotonic() - began)
        write_tensors(self.checkpoint_path, self._tensors(), self._meta("checkpoint"))
        now = time.monotonic()
        self._last_write = (now, now - began)
        return ev.Saved(str(self.checkpoint_path), now - began)

    # The record -----------------------------------------------------------------------------------------

    def _test_counts(self) -> list[int]:
        return counts_by_task(self._class_counts(), self.parts.tasks)

    def _class_counts(self) -> list[int]:
        counts: list[int] = self.parts.test.counts().tolist()
        return counts[: self.parts.tasks[-1].n_seen]

    def matrix(self, classifier: str | None = None) -> list[list[float]]:
        """Rows of the accuracy matrix so far, in percent."""
        name = classifier or next(iter(self.progress.correct))
        return matrix_from_counts(self.progress.correct[name], self._class_counts(), self.parts.tasks)

    def _record(self) -> dict[str, Any]:
        config = self.config
        counts = self._test_counts()
        classifiers = {
            name: {
                "accuracy": self.matrix(name),
                "metrics": summarise(
                    self.matrix(name), counts, correct_by_class=correct, class_counts=self._class_counts()
                ),
            }
            for name, correct in self.progress.correct.items()
        }
        first = next(iter(classifiers.values()))
        return {
            "format": FORMAT,
            "method": config.method,
            "addons": list(config.addons),
            "dataset": config.dataset,
            "tasks": config.tasks,
            "oracle": config.oracle,
            "seed": config.seed,
            "order_seed": config.order_seed,
            "metrics": first["metrics"],
            "accuracy": first["accuracy"],
            "test_counts": counts,
            "classifier": next(iter(classifiers)),
            "classifiers": classifiers,
            "correct": self.progress.correct,
            "class_counts": self._class_counts(),
            "class_order": self.parts.order,
            "config": config.resolved(),
            "seconds": self._seconds(),
            "task_seconds": self.progress.task_seconds,
            "losses": self.progress.losses,
            "facts": self.progress.facts,
            "base": self.progress.base,
            "engine": {
                "kind": self.parts.engine,
                "precision": self.parts.precision,
                "notices": self.progress.notices,
                "ranks": self.progress.ranks,
            },
            "environment": environment(self.device),
            "data_fingerprint": self.dataset.fingerprint,
            "data": dict(self.dataset.about),
        }


def finish(run: Run) -> dict[str, Any]:
    """Turn a run to its end and return its record."""
    record: dict[str, Any] = {}
    for event in run.events():
        if isinstance(event, ev.Tick) and event.waiting:
            time.sleep(0.001)
        elif isinstance(event, ev.Finished):
            record = event.record
    return record
