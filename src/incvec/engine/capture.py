"""The fastest way a stage's step can go: compiled and captured, captured as it is, or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from incvec.engine.device_errors import account, free, is_out_of_memory, release_idle_memory
from incvec.engine.distributed import SINGLE_PROCESS, Ranks
from incvec.engine.stage import StageLoop, capture
from incvec.nets import kernels

Way = tuple[str, str]  # a stage's name, and an attempt at it
ATTEMPTS = ("compiled and captured", "captured")


def compile_and_capture(
    loop: StageLoop,
    live: Mapping[str, Tensor],
    quiet: Callable[[], None],
    renew: Callable[[], torch.Generator],
    failed: set[Way],
    crowded: Callable[[], bool] = lambda: False,
    ranks: Ranks = SINGLE_PROCESS,
) -> Iterator[str]:
    """Compile and capture the step; yields why, where it goes a slower way.

    `live` is what warm-up steps must leave as it was; `quiet` waits for writers, whose buffers are freed in a thread,
    which a capture must not see; `renew` puts fresh generators in the place of those a broken capture has left
    unusable, and returns that of the views. `failed` remembers what need not be tried again in a later task.

    What fails with our own kernels is tried without them before it goes a slower way. Where memory is full, the
    capture is tried once more with the warm-up's memory given back. If that does not do and other runs are at work
    (`crowded`), the error is theirs to deal with; a run alone goes on eagerly.
    """
    attempts = [attempt for attempt in ATTEMPTS if (loop.stage.name, attempt) not in failed]
    freed = False
    release_idle_memory(loop.world.device)
    while attempts:
        attempt, problem, full = attempts[0], "", False
        try:
            quiet()
            capture(loop, live, [loop.world.generator, loop.views_generator], compiled=attempt == ATTEMPTS[0])
        except Exception as error:  # whatever a compiler or driver throws, training goes on a slower way
            full = is_out_of_memory(error)
            if full and freed and crowded():
                raise
            problem = f"{type(error).__name__}: {error}"
        if not ranks.any(bool(problem)):  # all ranks go the same way
            return
        loop.replay = None
        loop.views_generator = renew()
        for parameter in loop.parameters.values():
            parameter.grad = None  # it may lie in the memory of the broken graph
        if ranks.any(full):
            free()
            if not freed:
                freed = True
                continue
            attempts = []  # what is captured without compilation needs no less
            problem = f"the memory {account(loop.world.device)} is full"
        elif kernels.available():
            kernels.enable(False)  # they may be to blame: once more without them, for every run of this process
            attempt += " with our own kernels"
        else:
            failed.add((loop.stage.name, attempts.pop(0)))
        yield f"stage {loop.stage.name!r} could not be {attempt}: {problem or 'not on every rank'}"[:500]
