"""Writes a run's checkpoints: when the next one is due, and on a GPU in a thread, so that training does not wait."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.atomic_files import write_tensors
from incvec.engine import events as ev

SAVE_INTERVAL = 20  # in durations of the last write: at most 5 % of the time is spent on saving


class CheckpointWriter:
    """Writes checkpoints to `path`, one at a time: on a GPU in a thread, on a CPU at once.

    `interval` is the time in seconds from one checkpoint to the next, at least. None: `SAVE_INTERVAL` times the
    duration of the last write.
    """

    def __init__(self, path: Path, device: torch.device, interval: float | None = None) -> None:
        self.path, self.interval = path, interval
        self.in_thread = device.type == "cuda"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = self._took = 0.0  # when the last write ended, and its duration

    def due(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return False
        interval = SAVE_INTERVAL * self._took if self.interval is None else self.interval
        return time.monotonic() - self._ended >= interval

    def save(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> ev.Saved:
        """Write the values of this moment. The error of a write in the thread is raised by the next call."""
        self.wait()
        began = time.monotonic()
        if self.in_thread:
            arguments = copy_to_host(tensors), json.loads(json.dumps(meta)), began
            self._thread = threading.Thread(target=self._write_in_thread, args=arguments, daemon=False)
            self._thread.start()
        else:
            write_tensors(self.path, tensors, meta)
            self._written(began)
        return ev.Saved(str(self.path), time.monotonic() - began)

    def _write_in_thread(self, receive: Callable[[], dict[str, Tensor]], meta: Mapping[str, Any], began: float) -> None:
        try:
            write_tensors(self.path, receive(), meta)
        except BaseException as error:
            self._error = error
        self._written(began)

    def _written(self, began: float) -> None:
        self._ended = time.monotonic()
        self._took = self._ended - began

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the error of a failed write."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def copy_to_host(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Queue copies of all tensors on the current stream, one transfer per dtype. The function returned waits for them.

    Those that are on the host already are copied at once.
    """
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items() if not tensor.is_cuda}
    groups: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            groups.setdefault(tensor.dtype, []).append(name)
    shapes = {name: tensors[name].shape for names in groups.values() for name in names}
    buffers: dict[torch.dtype, Tensor] = {}
    for dtype, names in groups.items():
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in names])
        buffers[dtype] = torch.empty(flat.shape, dtype=dtype, pin_memory=True)
        buffers[dtype].copy_(flat, non_blocking=True)
    copied = torch.cuda.Event() if groups else None
    if copied is not None:
        copied.record()

    def receive() -> dict[str, Tensor]:
        if copied is not None:
            copied.synchronize()
        for dtype, names in groups.items():
            pieces = buffers[dtype].split([shapes[name].numel() for name in names])
            copies.update({name: piece.view(shapes[name]) for name, piece in zip(names, pieces, strict=True)})
        return copies

    return receive
