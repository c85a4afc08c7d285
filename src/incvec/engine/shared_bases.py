"""Common work is done once: the base task's trained weights, found by a key computed before training.

A base file is a checkpoint at the end of the base task's own stages, before `end_task`; it knows nothing of
add-ons, of the oracle or of the number of increments. A lock keeps two runs from training one key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from incvec.atomic_files import FileLock
from incvec.config import RunConfig, digest
from incvec.contracts import Method, Task
from incvec.data import Dataset
from incvec.engine.build import Parts, code_version
from incvec.engine.distributed import SINGLE_PROCESS, Ranks


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


class BaseFile(FileLock):
    """One key's file and lock in the folder of shared bases."""

    def __init__(self, folder: Path, key: str) -> None:
        super().__init__(folder / f"{key}.lock")
        self.file = folder / f"{key}.safetensors"

    def exists(self) -> bool:
        return self.file.exists()
