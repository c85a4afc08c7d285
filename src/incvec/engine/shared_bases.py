"""Shared base tasks: trained once, found by a key that is computed before training.

A base file is a checkpoint at the end of the base task's own stages, before `end_task`. It does not depend on add-ons,
on the oracle or on the number of increments. A lock keeps two runs from training the same base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from incvec.atomic_files import FileLock, fetch
from incvec.config import RunConfig, digest
from incvec.data import Dataset
from incvec.engine.build import RunParts
from incvec.engine.code_version import code_version
from incvec.engine.distributed import SINGLE_PROCESS, Distributed
from incvec.methods import base_settings


def base_key(config: RunConfig, dataset: Dataset, parts: RunParts, distributed: Distributed = SINGLE_PROCESS) -> str:
    """A hash of everything that determines the base task's weights."""
    task = parts.tasks[0]
    determinants: dict[str, Any] = {
        "code": code_version(config.method),
        "data": dataset.fingerprint,
        "views": [dataset.pad, dataset.flip, dataset.side, dict(dataset.normalizations)],
        "classes": parts.order[: task.n_seen],
        "method": config.method,
        "options": base_settings(config),
        "seed": config.seed,
        "torch": torch.__version__,
        "precision": parts.precision,
        "engine": parts.engine,
        "device": parts.world.device.type,
        "stages": [stage.describe() for stage in parts.method.stages(task)],
    }
    if config.last_batch != "drop":
        determinants["last_batch"] = config.last_batch
    if distributed.world_size > 1:
        determinants |= {"ranks": distributed.world_size, "sync_batchnorm": config.sync_batchnorm}
    return digest(determinants)


class BaseFile(FileLock):
    """The file and the lock of one key, in the folder of shared bases."""

    def __init__(self, folder: Path, key: str) -> None:
        super().__init__(folder / f"{key}.lock")
        self.key = key
        self.file = folder / f"{key}.safetensors"

    def exists(self) -> bool:
        fetch(self.file)
        return self.file.exists()
