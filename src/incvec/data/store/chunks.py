"""The chunks of a store made from image files: decoded, brought to their side and written, on all cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import numpy as np
import torch

from incvec.data.decode import fitted, read_pixels
from incvec.data.store.disk import unwritten
from incvec.data.store.open import checksum
from incvec.data.store.plan import Chunk, Done, Plan
from incvec.errors import DataError

PIECE_BYTES = 1 << 20  # decoded, summed and written at a time: it stays in a core's cache


def cores() -> int:
    """The cores this process may use; the machine may have more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def made(plan: Plan, chunks: Sequence[Chunk], workers: int) -> Iterator[tuple[Chunk, Done]]:
    """Its files are looked at when a chunk is handed out: before they are decoded, and while others are."""
    root, jobs = str(plan.root), dict[Future[Done], Chunk]()
    if workers <= 1:
        for chunk in chunks:
            plan.chunk_key(chunk)
            yield chunk, make_chunk(root, chunk)
        return
    context = _Workers()
    context.set_forkserver_preload([__name__, "torchvision.io"])
    with ProcessPoolExecutor(workers, context, initializer=_watch_parent) as pool:
        try:
            for chunk in chunks:
                plan.chunk_key(chunk)
                jobs[pool.submit(make_chunk, root, chunk)] = chunk
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a packing process died, perhaps for want of memory; run the same command again, with fewer --workers. "
                "(A script of your own has to call pack() below `if __name__ == '__main__':`, or no process can start.)"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def make_chunk(root: str, chunk: Chunk) -> Done:
    """Decode a chunk's files and write its rows; a row without a readable image is zeros.

    Where a checksum is wanted, nothing is written before all of it is made and has that checksum.
    """
    path, bad, total, place = Path(root, chunk.shard), list[tuple[int, str]](), checksum(b""), chunk.offset
    pieces: Iterable[bytes | memoryview] = decoded(chunk, bad)
    if chunk.wanted is not None:
        pieces = [b"".join(map(bytes, pieces))]
        if (other := checksum(pieces[0])) != chunk.wanted:
            return Done(chunk.number, other, bad)
    try:
        handle = os.open(path, os.O_WRONLY | (0 if chunk.wanted is None else os.O_CREAT), 0o666)
        try:
            for piece in pieces:
                total, left = checksum(piece, total), memoryview(piece)
                while left:
                    written = os.pwrite(handle, left, place)
                    place, left = place + written, left[written:]
        finally:
            os.close(handle)
    except OSError as error:
        raise DataError(unwritten(path, error)) from error
    return Done(chunk.number, total, bad)


def decoded(chunk: Chunk, bad: list[tuple[int, str]]) -> Iterator[memoryview]:
    """Its rows, some at a time in the same place; tells `bad` of those without a readable image."""
    rows = np.empty((max(1, PIECE_BYTES // (3 * chunk.side**2)), 3, chunk.side, chunk.side), np.uint8)
    for first in range(0, len(chunk.files), len(rows)):
        files = chunk.files[first : first + len(rows)]
        for i, file in enumerate(files):
            try:
                rows[i] = fitted(read_pixels(file), chunk.side)
            except (DataError, MemoryError, RuntimeError) as error:
                rows[i] = 0
                told = isinstance(error, DataError)
                bad.append((first + i, str(error) if told else f"{file} cannot be brought to its side: {error}"))
        yield rows[: len(files)].data.cast("B")


def _watch_parent() -> None:
    """A worker ends with the process that started it, however that ended; to be asked to is for that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)  # the other cores have their own
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch(sentinel: int) -> None:
            wait([sentinel])
            os._exit(1)

        threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()


class _Worker(ForkServerProcess):
    """Ended for good where the pool ends it, after one of them died: it does not heed SIGTERM."""

    def terminate(self) -> None:
        self.kill()


class _Workers(ForkServerContext):
    """Not forked from here: a process with threads (a progress bar is one) must not be."""

    Process = _Worker
