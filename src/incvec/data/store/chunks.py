"""Decoding and writing the chunks of a store, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from incvec.data.image_files import load_square, quiet_pillow
from incvec.data.store.open import checksum
from incvec.data.store.plan import Chunk
from incvec.errors import DataError

PIECE_BYTES = 1 << 20  # decoded and written at a time: stays in the cache of a core


class ChunkResult(NamedTuple):
    key: str
    checksum: str
    unreadable: list[tuple[int, str]]  # row in the chunk, and the error


def cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_error(path: Path, error: OSError) -> DataError:
    return DataError(
        f"could not write {path}: {error.strerror or error}. What is packed so far is kept; make sure that the disk "
        "works and has space, then run the same command again."
    )


def write_chunks(root: Path, chunks: Sequence[Chunk], workers: int) -> Iterator[tuple[Chunk, ChunkResult]]:
    """Write the chunks in any order; yields each when it is written."""
    if workers <= 1:
        yield from ((chunk, write_chunk(root, chunk)) for chunk in chunks)
        return
    context = _Context()
    context.set_forkserver_preload([__name__])
    # Ctrl-C is for the parent. The fork server inherits the mask, and its children do, before they can run any code.
    resource_tracker.ensure_running()  # first: it would unblock the signal again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with ProcessPoolExecutor(workers, context, initializer=_initialize_worker) as pool:
        try:
            jobs = {pool.submit(write_chunk, root, chunk): chunk for chunk in chunks}
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a packing process died, possibly because memory ran out; run the same command again, with fewer "
                "--workers. (A script has to call pack() below `if __name__ == '__main__':`, or no process can start.)"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def write_chunk(root: Path, chunk: Chunk) -> ChunkResult:
    """Decode the files of a chunk and write its rows; the row of an unreadable image is zeros."""
    key = chunk.key()  # before decoding: a file that is replaced meanwhile is packed again
    path, offset, total, unreadable = root / chunk.shard, chunk.offset, checksum(b""), list[tuple[int, str]]()
    try:
        handle = os.open(path, os.O_WRONLY)
        try:
            for piece in _decode(chunk, unreadable):
                total = checksum(piece, total)
                while piece:
                    written = os.pwrite(handle, piece, offset)
                    offset, piece = offset + written, piece[written:]
        finally:
            os.close(handle)
    except OSError as error:
        raise write_error(path, error) from error
    return ChunkResult(key, total, unreadable)


def _decode(chunk: Chunk, unreadable: list[tuple[int, str]]) -> Iterator[memoryview]:
    """The rows of a chunk in pieces, which share one buffer; unreadable images are added to the list."""
    files, rows = (
        chunk.files(),
        np.empty((max(1, PIECE_BYTES // (3 * chunk.side**2)), 3, chunk.side, chunk.side), np.uint8),
    )
    for first in range(0, len(files), len(rows)):
        piece = files[first : first + len(rows)]
        with quiet_pillow():
            for i, file in enumerate(piece):
                try:
                    rows[i] = load_square(file, chunk.side)
                except DataError as error:
                    rows[i] = 0
                    unreadable.append((first + i, str(error)))
        yield rows[: len(piece)].data.cast("B")


def _initialize_worker() -> None:
    """Leave SIGTERM to the parent, as Ctrl-C, and exit when the parent is gone, however it ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def exit_after(sentinel: int) -> None:
            wait([sentinel])
            os._exit(1)

        threading.Thread(target=exit_after, args=(parent.sentinel,), daemon=True).start()


class _Process(ForkServerProcess):
    """Killed when the pool terminates it, since it ignores SIGTERM."""

    def terminate(self) -> None:
        self.kill()


class _Context(ForkServerContext):
    """A fork server: a process with threads, such as a progress bar, must not be forked."""

    Process = _Process
