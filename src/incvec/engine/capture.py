"""CUDA graphs: capture any function, and capture a stage's step in the fastest way that works.

A step is compiled and captured; if that fails, captured as it is; if that fails too, it runs eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from incvec.engine.device_errors import account, free, is_out_of_memory, release_idle_memory
from incvec.engine.distributed import SINGLE_PROCESS, Ranks
from incvec.engine.stage import StageLoop
from incvec.fused import fusing
from incvec.nets import kernels

Way = tuple[str, str]  # a stage's name, and an attempt at it
ATTEMPTS = ("compiled and captured", "captured")
WARMUP_STEPS = 2
T = TypeVar("T")


def capture_graph(
    function: Callable[[], T],
    generators: Sequence[torch.Generator] = (),
    warmup: int = 1,
    device: torch.device | None = None,
) -> Callable[[], T]:
    """Capture `function` as a CUDA graph and return a function that replays it.

    `replay()` returns the tensors that the captured call returned; each replay overwrites them. `generators` are
    those that `function` draws from. The `warmup` calls before the capture really run; the capture runs nothing.
    The graph reads the tensors that `function` reads, but does not own them: the caller keeps them alive.
    """
    outer = torch.cuda.current_stream(device)
    on_default = outer == torch.cuda.default_stream(device)  # which cannot be captured
    stream = torch.cuda.Stream(device) if on_default else outer
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            function()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # `with torch.cuda.graph(...)` would synchronize the whole device, which other runs may share. Autograd's leaf
        # nodes remember the stream of the warm-up, so the capture uses the same one.
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # report the error of `function`
                graph.capture_end()
            raise
        graph.capture_end()
    outer.wait_stream(stream)

    def replay() -> T:
        graph.replay()
        return result

    return replay


@contextlib.contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of the tensors on leaving the context, also after an error."""
    distinct = {(t.data_ptr(), t.shape, t.stride(), t.dtype): t for t in tensors}  # a tensor may have two names
    saved = [(tensor, tensor.clone()) for tensor in distinct.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in saved:
                tensor.copy_(before)


def capture_step(
    loop: StageLoop, live: Mapping[str, Tensor], generators: Sequence[torch.Generator], compiled: bool
) -> None:
    """Capture the loop's step, compiled or as it is.

    The warm-up steps compile kernels and select algorithms. They also change weights, statistics and optimizer
    state, so everything in `live` is restored afterwards.
    """
    with fusing(compiled):
        try:
            with restored(live.values()):
                for _ in range(WARMUP_STEPS):
                    loop.cursor.zero_()
                    loop.step()
        finally:
            loop.cursor.zero_()
        loop.replay = capture_graph(loop.step, generators, warmup=0)


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
            capture_step(loop, live, [loop.world.generator, loop.views_generator], compiled=attempt == ATTEMPTS[0])
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
