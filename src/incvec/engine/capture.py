"""CUDA graphs: capture any function, and capture a stage's training step in the fastest mode that works.

A step is compiled and captured. If that fails, it is captured without compilation; if that fails too, it runs eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from incvec.engine.device_errors import describe_memory, is_out_of_memory, release_idle_memory, release_memory
from incvec.engine.loop import StageLoop
from incvec.fused import fusing
from incvec.nets import kernels

MODES = ("compiled and captured", "captured")  # fastest first; after them, eager
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


def capture_step(loop: StageLoop, live: Mapping[str, Tensor], compiled: bool) -> None:
    """Add the captured step to `loop.replays`, and that of the last, smaller batch to `loop.last_replays`.

    The last batch has another size in every task, so its step is captured without compilation.
    """
    with fusing(compiled):
        loop.replays[loop.own] = _capture(loop, live, loop.step, 0)
    if loop.last_batch:
        loop.last_replays[loop.own] = _capture(loop, live, loop.last_step, loop.full_steps)


def _capture(loop: StageLoop, live: Mapping[str, Tensor], step: Callable[[], None], number: int) -> Callable[[], None]:
    """Capture the step with this number.

    The warm-up steps compile kernels and select algorithms. They also change weights, statistics and optimizer
    state, so everything in `live` is restored afterwards.
    """
    try:
        with restored(live.values()):
            for _ in range(WARMUP_STEPS):
                loop.cursor.fill_(number)
                step()
    finally:
        loop.cursor.zero_()
    return capture_graph(step, [loop.world.generator, loop.views_generator], warmup=0)


def capture_with_fallback(
    loop: StageLoop,
    live: Mapping[str, Tensor],
    failed: set[tuple[str, bool, str]],
    wait_for_writes: Callable[[], None],
    others_running: Callable[[], bool],
) -> list[str]:
    """Capture the loop's step in the fastest mode that works. Returns a notice for each mode that failed.

    `live` are the tensors that warm-up steps must not change. `failed` collects what later tasks need not attempt:
    stage name, `loop.own` and mode. `wait_for_writes` waits for the checkpoint writer and raises the error of a failed
    write. Its thread frees pinned buffers, which records an event on the run's stream: not allowed during a capture.

    A mode that fails with our Triton kernels is attempted without them first. If memory is full, it is attempted again
    after releasing the warm-up's memory. If memory is still full, the error is raised if other runs will release theirs
    (`others_running`); a run on its own continues eagerly.
    """
    modes = [mode for mode in MODES if (loop.stage.name, loop.own, mode) not in failed]
    notices: list[str] = []
    released = False
    wait_for_writes()
    release_idle_memory(loop.world.device)
    while modes:
        mode, problem, full = modes[0], "", False
        try:
            capture_step(loop, live, compiled=mode == MODES[0])
        except Exception as error:  # whatever a compiler or driver raises, a slower mode may work
            full = is_out_of_memory(error)
            if full and released and others_running():
                raise
            problem = f"{type(error).__name__}: {error}"
        if not loop.distributed.any(bool(problem)):  # all processes use the same mode
            break
        discard_capture(loop)
        if loop.distributed.any(full):
            release_memory()
            if not released:
                released = True
                continue
            modes = []  # a capture without compilation needs as much
            problem = f"the memory {describe_memory(loop.world.device)} is full"
        elif kernels.available():
            kernels.enable(False)  # for every run of this process
            mode += " with our own kernels"
        else:
            failed.add((loop.stage.name, loop.own, modes.pop(0)))
        notices.append(f"stage {loop.stage.name!r} could not be {mode}: {problem or 'not on every rank'}"[:500])
    return notices


def discard_capture(loop: StageLoop) -> None:
    """Remove what a failed capture leaves behind: gradients in its memory, and generators that it made unusable.

    Earlier captures of the loop draw from the same generators, so they are repeated when an epoch needs them.
    """
    loop.attempted -= loop.replays.keys() - {loop.own}
    loop.replays.clear()
    loop.last_replays.clear()
    loop.world.generator = torch.Generator(loop.world.device)
    loop.views_generator = torch.Generator(loop.world.device)
    for parameter in loop.parameters.values():
        parameter.grad = None
