"""Common work is done once: the base task's trained weights, found by a key computed before training.

A base file is a checkpoint at the end of the base task's own stages, before `end_task`; it knows nothing of
add-ons, of the oracle or of the number of increments. A lock keeps two runs from training one key.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import torch

from incvec.config import RunConfig, digest
from incvec.contracts import Method, Task
from incvec.data import Dataset
from incvec.engine.build import Parts, code_version
from incvec.engine.distributed import SINGLE_PROCESS, Ranks
from incvec.errors import CheckpointError


def base_key(config: RunConfig, dataset: Dataset, parts: Parts, ranks: Ranks = SINGLE_PROCESS) -> str:
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
        "torch": torch.__version__,
        "precision": parts.precision,
        "engine": parts.engine,
        "device": parts.world.device.type,
        "stages": [stage.describe() for stage in method.stages(task)],
    }
    if ranks.size > 1:
        account |= {"ranks": ranks.size, "sync_batchnorm": config.sync_batchnorm}
    return digest(account)


class Lock:
    """A lock file. The lock is the kernel's, so it goes when its holder dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Take the lock, or return False at once when another run holds it."""
        if self._handle is not None:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"could not write {self.path}: {error.strerror or error}.") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError as error:
            os.close(handle)
            raise CheckpointError(
                f"{self.path} cannot be locked ({error.strerror}): its file system knows no locks. Choose another "
                "folder for --out and --bases."
            ) from error
        self._handle = handle
        return True

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class BaseFile(Lock):
    """One key's file and lock in the folder of shared bases."""

    def __init__(self, folder: Path, key: str) -> None:
        super().__init__(folder / f"{key}.lock")
        self.file = folder / f"{key}.safetensors"

    def exists(self) -> bool:
        return self.file.exists()
