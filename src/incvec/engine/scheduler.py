"""Many runs in one thread, one CUDA stream each: their kernels are small, so together they fill the device."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from incvec.engine import events as ev
from incvec.engine.device_errors import release_memory
from incvec.engine.run import Run
from incvec.errors import Busy, DeviceMemoryError


@dataclass(frozen=True)
class Failed(ev.Event):
    """A run failed; the others continue."""

    error: Exception


@dataclass(frozen=True)
class Requeued(ev.Event):
    """A run was interrupted and will continue from its last checkpoint, in another process."""

    reason: str


def _clear_frames(error: BaseException | None) -> None:
    """Drop the variables that tracebacks refer to: the tensors of a run, which lives as long as its error otherwise."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def run_concurrently(
    make_runs: Iterable[Callable[[], Run] | None], at_once: int
) -> Generator[tuple[int, ev.Event], None, None]:
    """Alternate between the runs, at most `at_once` at a time; yields each event with the number of its run.

    `make_runs` is read when a place is free. It may yield None: no run at present, perhaps later.
    A run that waits for a base which another one trains does not count; when a place becomes free, waiting runs check
    for their base before further runs are started. A run that finds the device's memory full
    stops, and resumes from its checkpoint when others have ended. A run that another process is working on is tried
    once more when all others have ended: that process may have been stopped.
    """
    source, exhausted = iter(make_runs), False
    makers: list[Callable[[], Run]] = []
    queue: list[int] = []  # runs to be started again
    busy: list[int] = []  # runs of other processes
    last_attempt = False  # whether `busy` runs are being tried once more
    active: dict[int, Generator[ev.Event, None, None]] = {}
    blocked: set[int] = set()
    unchecked: set[int] = set()  # blocked runs that have not checked for their base since a place became free

    def working() -> int:
        return len(active) - len(blocked)

    def next_run() -> int | None:
        nonlocal exhausted
        if not exhausted:
            try:
                make = next(source)
            except StopIteration:
                exhausted = True
            else:
                if make is not None:
                    makers.append(make)
                    return len(makers) - 1
        return queue.pop(0) if queue else None

    try:
        while not exhausted or queue or active or busy:
            unchecked &= blocked
            while working() < at_once and not unchecked:
                following = next_run()
                if following is None:
                    if not busy or active:
                        break
                    queue, busy, last_attempt = busy, [], True
                    continue
                try:
                    active[following] = makers[following]().events(others_running=lambda: working() > 1)
                except Exception as error:
                    yield following, Failed(error)
            idle = True
            for number, events in list(active.items()):
                if number in blocked and working() >= at_once:
                    unchecked.add(number)
                    continue  # all places are taken; it checks for its base when one is free
                unchecked.discard(number)
                try:
                    event = next(events)
                except StopIteration:
                    del active[number]
                    blocked.discard(number)
                    continue
                except Exception as error:  # the other runs continue
                    del active[number], events
                    blocked.discard(number)
                    _clear_frames(error)
                    if isinstance(error, DeviceMemoryError) and working():  # blocked runs will not release memory
                        queue.append(number)
                        at_once = min(at_once, working())
                        release_memory()
                        yield number, ev.Notice(f"the device's memory is full: {at_once} at once from now on")
                    elif isinstance(error, Busy) and not last_attempt:
                        busy.append(number)
                        yield number, ev.Notice("another process is working on it")
                    else:
                        yield number, Failed(error)
                    continue
                if isinstance(event, ev.Tick):
                    (blocked.add if event.blocked else blocked.discard)(number)
                if not (isinstance(event, ev.Tick) and event.waiting):
                    idle = False
                yield number, event
            if idle:
                time.sleep(0.0005)
    finally:
        for events in active.values():  # when the consumer stops, the runs stop at once
            events.close()
