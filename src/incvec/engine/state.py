"""The state of a run: everything that a checkpoint saves, shared by run.py, task.py and stage.py."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from incvec.config import RunConfig
from incvec.contracts import AddOn, Stage, Task, no_probe
from incvec.data import Dataset
from incvec.engine import checkpoint as checkpoints
from incvec.engine import events as ev
from incvec.engine.build import RunParts, describe_preprocessing
from incvec.engine.checkpoint import Position
from incvec.engine.checkpoint_writer import CheckpointWriter
from incvec.engine.code_version import code_version
from incvec.engine.distributed import Distributed
from incvec.engine.estimate import Estimate
from incvec.engine.loop import StageLoop
from incvec.engine.record import Progress, check_counts
from incvec.engine.seeds import derive
from incvec.errors import CheckpointError


class RunState:
    """The method and add-ons of a run, the position in it and the results so far."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, parts: RunParts, distributed: Distributed, saver: CheckpointWriter
    ) -> None:
        self.config, self.dataset, self.parts, self.distributed, self.saver = config, dataset, parts, distributed, saver
        self.position = Position()
        self.progress = Progress()
        self.loop: StageLoop | None = None  # of the stage in training
        self.estimate = Estimate(parts.tasks, parts.plan, len(parts.world.train.labels) / len(parts.order))
        self.failed_captures: set[tuple[str, bool, str]] = set()  # see `capture_with_fallback`
        self.encoded_test_images: list[Tensor] = []  # of a method with a frozen encoder
        self._started = time.monotonic()

    def listeners(self, task: Task, stage: Stage | None = None) -> Sequence[AddOn]:
        """The add-ons whose hooks are called: all, except in the base task's own stages, which all runs share."""
        return [] if task.index == 0 and (stage is None or stage.owner is None) else self.parts.addons

    def reseed(self, *purpose: object) -> None:
        """Seed the generator that hooks and losses draw from."""
        self.parts.world.generator.manual_seed(derive(self.config.seed, *purpose))

    def synchronize(self, **tensors: Tensor) -> None:
        """Broadcast rank 0's weights after a hook: on other devices the last bit may differ."""
        if self.distributed.world_size > 1:
            method = self.parts.method
            self.distributed.broadcast({**method.state_dict(keep_vars=False), **method.store, **tensors})

    def make_loop(self, task: Task, stage: Stage, rows: Tensor) -> StageLoop:
        parts = self.parts
        collect_fisher = task.index == 0 and stage.role == "main"
        listeners = self.listeners(task, stage)
        keep_last = self.config.last_batch == "keep"
        return StageLoop(parts.method, listeners, parts.world, stage, rows, self.distributed, collect_fisher, keep_last)

    def drop_loop(self) -> None:
        """Release the loop, with its captured graph and its optimizer state."""
        self.parts.world.probe = no_probe
        self.loop = None

    # Saving and loading ---------------------------------------------------------------------------------

    def tensors(self, addons: bool = True) -> dict[str, Tensor]:
        return checkpoints.live_tensors(self.parts, self.loop, addons)

    def meta(self, kind: str, position: Position | None = None) -> dict[str, Any]:
        """The JSON part of a file: which run the tensors belong to, and their position in it."""
        task, stage, epoch = position or self.position
        config, parts = self.config, self.parts
        return {
            "kind": kind,
            "position": [task, stage, epoch],
            "grown": task - 1 if (stage, epoch) == (0, 0) else task,
            "config": config.resolved(),
            "class_order": parts.order,
            "classes": list(parts.world.class_names),  # by label
            "task_sizes": [task.n_new for task in parts.world.tasks],
            "preprocessing": describe_preprocessing(parts),
            "fingerprint": self.dataset.fingerprint,
            "code": code_version(config.method),
            "progress": dict(vars(self.progress), seconds=self.seconds()),
            "engine": parts.engine,
            "precision": parts.precision,
        }

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], addons: bool = True) -> None:
        """Continue from a checkpoint, a shared base (`addons=False`) or a snapshot."""
        self.drop_loop()
        position, progress = Position(*meta["position"]), Progress(**meta["progress"])
        self._check_position(position)
        check_counts(progress, self.parts, position.task)
        namespaces = checkpoints.restore(self.parts, tensors, meta, self.config.seed, addons)
        device = self.parts.world.device
        if "fisher" in namespaces:
            self.parts.world.base_fisher = {n: t.to(device, copy=True) for n, t in namespaces["fisher"].items()}
        self.position, self.progress = position, progress
        self._started = time.monotonic()
        if "loop" in namespaces:
            task = self.parts.tasks[self.position.task]
            stage = self.parts.plan(task)[self.position.stage]
            self.loop = self.make_loop(task, stage, namespaces["loop"]["rows"].to(device))
            self.loop.load_state(namespaces["loop"])

    def _check_position(self, position: Position) -> None:
        """Refuse a position that this run never has; it would continue behind its end."""
        tasks, plan = self.parts.tasks, self.parts.plan
        stages = plan(tasks[position.task]) if position.task < len(tasks) else []
        epochs = stages[position.stage].epochs if position.stage < len(stages) else 0
        if position.task > len(tasks) or position.stage > len(stages) or position.epoch > epochs:
            raise CheckpointError(f"its position {tuple(position)} is behind the end of this run.")

    def save_due(self) -> bool:
        return self.distributed.is_main and self.saver.due()

    def save(self) -> ev.Saved:
        if not self.distributed.is_main:
            return ev.Saved(str(self.saver.path), 0.0)
        return self.saver.save(self.tensors(), self.meta("checkpoint"))

    def last_checkpoint(self) -> str:
        """For error messages: what can be resumed from."""
        self.saver.wait()
        path = self.saver.path
        return f"the last good checkpoint is {path}" if path.exists() else "nothing had been saved yet"

    def seconds(self) -> float:
        """The run's duration so far, including earlier processes."""
        return round(self.progress.seconds + time.monotonic() - self._started, 3)
