"""Many runs in one thread, a CUDA stream each: their kernels are small, so together they fill the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from incvec.engine import events as ev
from incvec.engine.device_errors import free
from incvec.engine.run import Run
from incvec.errors import Busy, DeviceMemoryError


@dataclass(frozen=True)
class Failed(ev.Event):
    """A run broke; the others go on."""

    error: Exception


def run_concurrently(make: Sequence[Callable[[], Run]], at_once: int) -> Generator[tuple[int, ev.Event], None, None]:
    """Turn the runs, at most `at_once` of them at work at a time; yields each event with its run's number.

    A run that waits for a base which another one trains takes no place. One that finds the device's memory full
    gives way and is started again, from its checkpoint, when others have ended. One that another process is at work
    on is asked for once more when all others have ended: that process may have been stopped.
    """
    queue = list(range(len(make)))
    elsewhere: list[int] = []
    last = False  # whether those are being asked for once more
    active: dict[int, Generator[ev.Event, None, None]] = {}
    blocked: set[int] = set()
    try:
        while queue or active or elsewhere:
            if not queue and not active:
                queue, elsewhere, last = elsewhere, [], True
            while queue and len(active) - len(blocked) < at_once:
                number = queue.pop(0)
                try:
                    run = make[number]()
                except Exception as error:
                    yield number, Failed(error)
                    continue
                run.crowded = lambda: len(active) - len(blocked) > 1
                active[number] = run.events()
                del run
            idle = True
            for number, events in list(active.items()):
                if number in blocked and len(active) - len(blocked) >= at_once:
                    continue  # its place is taken; it asks for its base again when there is one
                try:
                    event = next(events)
                except StopIteration:
                    del active[number]
                    blocked.discard(number)
                    continue
                except Exception as error:  # one run's trouble is not another's
                    del active[number], events
                    blocked.discard(number)
                    working = len(active) - len(blocked)
                    if isinstance(error, DeviceMemoryError) and working:  # blocked runs will not give theirs back
                        queue.append(number)
                        at_once = min(at_once, working)
                        del error
                        free()
                        yield number, ev.Notice(f"the device's memory is full: {at_once} at once from now on")
                        continue
                    if isinstance(error, Busy) and not last:
                        elsewhere.append(number)
                        yield number, ev.Notice("another process is at work on it")
                        continue
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
        for events in active.values():  # whoever stops listening stops the runs, now
            events.close()
