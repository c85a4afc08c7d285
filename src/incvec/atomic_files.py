"""Tensor files that survive a kill: safetensors with a hash for each tensor, written aside, synced, renamed.

safetensors has no checksum of its own, and a memory format does not survive in it: tensors are stored as
contiguous clones, and loading copies into tensors that already have the layout they should have.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from incvec.errors import CheckpointError, IncvecError

FORMAT = 1


def _hash(tensor: Tensor) -> str:
    plain = tensor.detach().contiguous().cpu().flatten()
    return hashlib.blake2b(plain.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def _text_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_bytes(path: Path, content: bytes, error_type: type[IncvecError] = CheckpointError) -> None:
    """Replace `path` whole or not at all."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # a temporary file is its owner's alone; others may share a base
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise error_type(
            f"could not write {path} ({len(content) / 1e6:.1f} MB): {error.strerror or error}. What was saved "
            "before is intact; free some space or choose another folder, then run the same command again."
        ) from error


class FileLock:
    """A lock file. The kernel holds the lock, so it is released when its holder dies.

    `with FileLock(path):` raises `error` if another process holds it; `acquire` returns False instead.
    """

    def __init__(self, path: Path, error: type[IncvecError] = CheckpointError) -> None:
        self.path, self.error = path, error
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Take the lock. False, without waiting, if another process or object holds it."""
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


def sweep_temporaries(folder: Path, *names: str) -> None:
    """Remove what killed writes of these files (by pattern) left behind. The caller holds their lock: what another
    writes in the same folder must be let be."""
    for leftover in [each for name in names for each in folder.glob(f".{name}.*")]:
        with contextlib.suppress(OSError):
            leftover.unlink()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """One safetensors file; `meta` is any JSON."""
    _write_plain(
        path, {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, meta
    )


def _write_plain(path: Path, plain: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    hashes = {name: _hash(tensor) for name, tensor in plain.items()}
    text = json.dumps({"format": FORMAT, "hashes": hashes, **meta})
    write_bytes(path, save(dict(plain), metadata={"incvec": text, "hash": _text_hash(text)}))


START_ANEW = "Move it away to start anew."


def read_meta(path: Path) -> dict[str, Any]:
    """What `write_tensors` was told beside the tensors, without reading those."""
    return _read(path, False, START_ANEW)[1]


def read_tensors(path: Path, remedy: str = START_ANEW) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote, every hash checked; `remedy` says what to do where the file is damaged."""
    tensors, meta = _read(path, True, remedy)
    hashes = meta["hashes"]
    if set(hashes) != set(tensors):
        raise CheckpointError(f"{path} does not hold the tensors it lists. {remedy}")
    for name, tensor in tensors.items():
        if _hash(tensor) != hashes[name]:
            raise CheckpointError(f"{path} was altered: tensor {name!r} does not match its hash. {remedy}")
    return tensors, meta


def _read(path: Path, whole: bool, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            text = header.get("incvec", "{}")
            if _text_hash(text) != header.get("hash"):
                raise ValueError("its metadata do not match their hash")
            meta = json.loads(text)
            tensors = {name: file.get_tensor(name) for name in file.keys()} if whole else {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): it is truncated or not one of ours. {remedy}"
        ) from None
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {meta.get('format')!r}, this version reads {FORMAT}.")
    return tensors, meta


class Writer:
    """Writes tensors of a CUDA device without making the caller wait: copies are queued on the current stream,
    and a thread hashes and writes them once they have arrived. One write at a time; errors surface at `wait`.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.finished = 0.0  # when the last write ended
        self.took = 0.0

    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.wait()
        began = time.monotonic()
        arrive = _stage_out(tensors)
        frozen = json.loads(json.dumps(meta))

        def work() -> None:
            try:
                _write_plain(path, arrive(), frozen)
            except BaseException as error:
                self._error = error
            self.finished = time.monotonic()
            self.took = self.finished - began

        self._thread = threading.Thread(target=work, daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written; raises what a write raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _stage_out(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Queue copies of all tensors to the host; the function returned waits for them. One transfer a type."""
    groups: dict[torch.dtype, list[str]] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            groups.setdefault(tensor.dtype, []).append(name)
        else:
            plain[name] = tensor.detach().clone().contiguous()
    hosts: dict[torch.dtype, Tensor] = {}
    for dtype, names in groups.items():
        flat = torch.cat([tensors[name].detach().contiguous().reshape(-1) for name in names])
        hosts[dtype] = torch.empty(flat.shape, dtype=dtype, pin_memory=True)
        hosts[dtype].copy_(flat, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    shapes = {name: tensors[name].shape for names in groups.values() for name in names}

    def arrive() -> dict[str, Tensor]:
        arrived.synchronize()
        for dtype, names in groups.items():
            pieces = hosts[dtype].split([shapes[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                plain[name] = piece.clone().reshape(shapes[name])
        return plain

    return arrive
