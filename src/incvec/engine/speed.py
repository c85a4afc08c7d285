"""The fastest way a stage's step can go: compiled and captured, captured as it is, or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from incvec.engine.ranks import ALONE, Ranks
from incvec.engine.stage import StageLoop, capture


def speed_up(
    loop: StageLoop,
    live: Mapping[str, Tensor],
    quiet: Callable[[], None],
    renew: Callable[[], torch.Generator],
    ranks: Ranks = ALONE,
) -> Iterator[str]:
    """Compile and capture the step; yields why, where it goes a slower way.

    `live` is what warm-up steps must leave as it was; `quiet` waits for writers, whose buffers are freed in a thread,
    which a capture must not see; `renew` puts fresh generators in the place of those a broken capture has left
    unusable, and returns that of the views.
    """
    for attempt in ("compiled and captured", "captured"):
        try:
            quiet()
            generators = [loop.world.generator, loop.views_generator]
            capture(loop, live, generators, compiled=attempt != "captured")
            problem = ""
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or driver throws, training goes on a slower way
            problem = f"{type(error).__name__}: {error}"
        if not ranks.any(bool(problem)):  # all ranks go the same way
            return
        loop.replay = None
        loop.views_generator = renew()
        yield f"stage {loop.stage.name!r} could not be {attempt}: {problem or 'not on every rank'}"[:500]
