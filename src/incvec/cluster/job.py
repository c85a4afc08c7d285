"""What a sweep on a cluster consists of, and how its failures are judged. Imports neither Ray nor torch."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from incvec.config import RunConfig, digest
from incvec.engine.sweep import Check
from incvec.errors import Busy, ConfigError, DataError, IncvecError, StorageError, user_message

Kind = Literal["run", "memory", "node", "busy"]
NODE_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE)
)


@dataclass(frozen=True)
class ClusterSweep:
    """The runs of a sweep, and what every node needs to train them. Paths are those of the nodes."""

    title: str
    runs: tuple[tuple[str, RunConfig], ...]  # folder, configuration
    storage: str  # a folder that all nodes see, or an fsspec address
    check: Check | None = None
    data_root: str | None = None
    download: bool = False
    data_source: str | None = None  # an fsspec address to copy the data root from
    plugins: tuple[str, ...] = ()
    per_worker: int | None = None  # runs at once; None: by the device's memory
    workers: int | None = None  # at most; None: one for each GPU, or core
    cores: int = 1  # of a worker without GPU
    versions: tuple[tuple[str, str], ...] = ()  # packages that all nodes must have alike

    @property
    def name(self) -> str:
        return sweep_name(self.title, self.storage)

    @property
    def identity(self) -> str:
        """A hash of the runs: a sweep of the same name with other ones is another sweep."""
        return digest([[folder, config.resolved()] for folder, config in self.runs])

    @property
    def needs_gpu(self) -> bool:
        """Whether GPUs are used if the cluster has any."""
        return any(config.device != "cpu" for _, config in self.runs)


def sweep_name(title: str, storage: str) -> str:
    """Identifies a sweep on its cluster."""
    return f"sweep-{digest([title, storage])}"


def check_devices(runs: Mapping[str, RunConfig]) -> None:
    """Refuse a device by number: each worker has its own GPU."""
    for folder, config in runs.items():
        if config.device.startswith("cuda:"):
            raise ConfigError(
                f"{folder} has device={config.device}; on a cluster every worker has a GPU of its own. Give "
                "device=cuda, device=cpu or device=auto."
            )


def classify(error: BaseException, out_of_memory: bool = False) -> Kind:
    """Why a run failed: by itself, for lack of memory, because of its node, or because another process has it."""
    if isinstance(error, Busy):
        return "busy"
    if out_of_memory:
        return "memory"
    if isinstance(error, DataError | StorageError):
        return "node"  # other nodes may have the data, or reach the storage
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in NODE_ERRORS:
            return "node"
        cause = cause.__cause__ or cause.__context__
    return "run"


def portable(error: Exception) -> Exception:
    """The error with its message alone, to be sent to another process."""
    if isinstance(error, IncvecError):
        return type(error)(str(error))
    message = user_message(error)
    return IncvecError(message) if message else RuntimeError(f"{type(error).__name__}: {error}")


def is_address(storage: str) -> bool:
    """Whether it is an fsspec address, not a folder."""
    return "://" in storage


def absolute(storage: str) -> str:
    """A folder as an absolute path; an fsspec address as it is."""
    return storage.rstrip("/") if is_address(storage) else str(Path(storage).expanduser().resolve())
