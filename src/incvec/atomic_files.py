"""Files that survive a kill: written to a temporary file, synced, renamed. And locks that do not outlive their holder.

Tensor files are safetensors with one hash per tensor, since safetensors has no checksum of its own. It does not store
memory formats either: tensors are written as contiguous copies, and loading copies them into tensors that have the
right layout already.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from incvec.config import rename_settings, without_removed_settings
from incvec.errors import CheckpointError, IncvecError, shorten

FORMAT = 2  # 1 had British names of settings and tensors, and "facts" for "statistics"
READABLE_FORMATS = (1, FORMAT)
RENAMED_TENSORS = {"optimiser": "optimizer", "centre": "center", "epoch_finalised": "epoch_finalized"}
_FORMAT_1 = re.compile(rf"\b({'|'.join(RENAMED_TENSORS)})\b")
RERUN = "Earlier files are intact; free some space or choose another folder, then run the same command again."
START_AGAIN = "Move it away to start again."


# Writing files and locking ----------------------------------------------------------------------------------


def write_bytes(path: Path, content: bytes, error: type[IncvecError] = CheckpointError, remedy: str = RERUN) -> None:
    """Replace `path` atomically: after a kill it has the old content or the new one, never a part of it."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # temporary files are private; other users may share a base
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as cause:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        reason = cause.strerror or cause
        raise error(f"could not write {path} ({len(content) / 1e6:.1f} MB): {reason}. {remedy}") from cause
    for root, mirror in _mirrors.items():
        if path.is_relative_to(root):
            mirror.store(path)


class Mirror(Protocol):
    """A storage elsewhere that has the files of a folder of this machine."""

    def store(self, path: Path) -> None:
        """Copy a file, which was just written, to the storage."""

    def fetch(self, path: Path) -> None:
        """Copy the file from the storage if it has one."""


_mirrors: dict[Path, Mirror] = {}


@contextlib.contextmanager
def mirrored(folder: Path, mirror: Mirror) -> Iterator[None]:
    """Write the files of the folder through to the mirror, each after it was written atomically."""
    _mirrors[folder] = mirror
    try:
        yield
    finally:
        del _mirrors[folder]


def fetch(path: Path) -> None:
    """Copy the file from the mirror of its folder, if the folder has one and the file is not here."""
    for folder, mirror in _mirrors.items():
        if path.is_relative_to(folder) and not path.exists():
            mirror.fetch(path)


def remove_temporaries(folder: Path, *names: str) -> None:
    """Remove the temporary files that killed writes of these files (patterns) left. The caller holds their lock."""
    for leftover in [each for name in names for each in folder.glob(f".{name}.*")]:
        with contextlib.suppress(OSError):
            leftover.unlink()


class FileLock:
    """A lock file. The kernel holds the lock, so it is released when its holder dies.

    `with FileLock(path):` raises `error` if another process holds it; `acquire` returns False instead.
    """

    def __init__(self, path: Path, error: type[IncvecError] = CheckpointError) -> None:
        self.path, self.error = path, error
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Take the lock. Returns False, without waiting, if another process or object holds it."""
        if self._handle is not None:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self.error(
                f"could not write {self.path}: {error.strerror or error}. Choose a folder you may write to."
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError as error:
            os.close(handle)
            raise self.error(
                f"{self.path} cannot be locked ({error.strerror}): its file system does not support locks. Choose a "
                "folder on another file system."
            ) from error
        self._handle = handle
        return True

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        if not self.acquire():
            raise self.error(f"another process is working in {self.path.parent}. Wait for it, or use another folder.")
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# Tensor files -----------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write one safetensors file; `meta` is any JSON mapping."""
    on_host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    hashes = {name: _hash(tensor) for name, tensor in on_host.items()}
    text = json.dumps({"format": FORMAT, "hashes": hashes, **meta})
    write_bytes(path, save(on_host, metadata={"incvec": text, "hash": _hash_text(text)}))


def read_meta(path: Path) -> dict[str, Any]:
    """The `meta` of a file, without reading its tensors."""
    return _upgrade(*_read(path, False, START_AGAIN))[1]


def read_tensors(path: Path, remedy: str = START_AGAIN) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and `meta` of a file, with every hash checked. Names of earlier formats are translated.

    `remedy` is the end of the error message for a damaged file: what to do about it.
    """
    tensors, meta = _read(path, True, remedy)
    hashes = meta["hashes"]
    if set(hashes) != set(tensors):
        raise CheckpointError(f"{path} does not contain the tensors it lists. {remedy}")
    for name, tensor in tensors.items():
        if _hash(tensor) != hashes[name]:
            raise CheckpointError(f"{path} was modified: tensor {name!r} does not match its hash. {remedy}")
    return _upgrade(tensors, meta)


def check_fits(name: str, saved: Tensor, live: Tensor) -> None:
    """Refuse a saved tensor of another shape or type than the one that it is copied to."""
    if (saved.shape, saved.dtype) != (live.shape, live.dtype):
        raise CheckpointError(
            f"saved tensor {name!r} has shape {tuple(saved.shape)} and type {saved.dtype}, expected "
            f"{tuple(live.shape)} and {live.dtype}."
        )


def _read(path: Path, with_tensors: bool, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            text = header.get("incvec", "{}")
            if _hash_text(text) != header.get("hash"):
                raise ValueError("its metadata does not match its hash")
            meta = json.loads(text)
            if not isinstance(meta, dict) or not isinstance(meta.get("hashes"), dict):
                raise ValueError("its metadata lacks the hashes of its tensors")
            tensors = {name: file.get_tensor(name) for name in file.keys()} if with_tensors else {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): it is truncated or not a file of incvec. {remedy}"
        ) from None
    if meta.get("format") not in READABLE_FORMATS:
        raise CheckpointError(
            f"{path} has format {shorten(meta.get('format'), 40)}; this version of incvec reads up to {FORMAT}. Use a "
            "newer one."
        )
    return tensors, meta


def _upgrade(tensors: dict[str, Tensor], meta: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Translate the names of format 1, and leave out settings that no longer exist."""
    if meta["format"] == 1:
        tensors = {_FORMAT_1.sub(lambda word: RENAMED_TENSORS[word[0]], name): t for name, t in tensors.items()}
        if isinstance(meta.get("config"), dict):
            meta["config"] = rename_settings(meta["config"])
        if isinstance(progress := meta.get("progress"), dict) and "facts" in progress:
            progress["statistics"] = progress.pop("facts")
    if isinstance(meta.get("config"), dict):
        meta["config"] = without_removed_settings(meta["config"])
    return tensors, meta


def _hash(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def _hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
