"""Common work is done once: the base task's trained weights, found by a key computed before training.

A base file is a checkpoint at the end of the base task's own stages, before `end_task`; it knows nothing of
add-ons, of the oracle or of the number of increments. A lock keeps two runs from training one key: it is the
kernel's, so it goes when its holder dies.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from incvec.config import RunConfig, digest
from incvec.contracts import Method, Task
from incvec.data import Dataset
from incvec.engine.build import Parts, code_version


def base_key(config: RunConfig, dataset: Dataset, parts: Parts) -> str:
    """Everything that decides the base task's weights."""
    task: Task = parts.tasks[0]
    method: Method = parts.method
    account: dict[str, Any] = {
        "code": code_version(config.method),
        "data": dataset.fingerprint,
        "classes": parts.order[: task.n_seen],
        "method": config.method,
        "options": config.sections.get(config.method, {}),
        "seed": config.seed,
        "precision": parts.precision,
        "engine": parts.engine,
        "device": parts.world.device.type,
        "stages": [stage.describe() for stage in method.stages(task)],
    }
    return digest(account)


class BaseFile:
    """One key's file and lock in the folder of shared bases."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / f"{key}.safetensors"
        self._lock_path = folder / f"{key}.lock"
        self._handle: int | None = None

    def exists(self) -> bool:
        return self.path.exists()

    def acquire(self) -> bool:
        """Take the lock, or return False at once when another run trains this base."""
        if self._handle is not None:
            return True
        self._lock_path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
