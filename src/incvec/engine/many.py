"""Many runs in one thread, a CUDA stream each: their kernels are small, so together they fill the device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from incvec.engine import events as ev
from incvec.engine.run import Run


@dataclass(frozen=True)
class Failed(ev.Event):
    """A run broke; the others go on."""

    error: Exception


def turn(runs: Sequence[Run], at_once: int) -> Iterator[tuple[int, ev.Event]]:
    """Turn the runs, at most `at_once` of them at a time; yields each event with its run's number."""
    waiting = list(range(len(runs)))
    active: dict[int, Iterator[ev.Event]] = {}
    while waiting or active:
        while waiting and len(active) < at_once:
            number = waiting.pop(0)
            active[number] = runs[number].events()
        idle = True
        for number, events in list(active.items()):
            try:
                event = next(events)
            except StopIteration:
                del active[number]
                continue
            except Exception as error:  # one run's trouble is not another's
                del active[number]
                yield number, Failed(error)
                continue
            if not (isinstance(event, ev.Tick) and event.waiting):
                idle = False
            yield number, event
        if idle:
            time.sleep(0.0005)
