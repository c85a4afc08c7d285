"""Random draws of views and losses differ from step to step, captured and eager.

The learning rates are zero, the rows are the same and the statistics are restored, so only draws can change a loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.loop import StageLoop
from incvec.engine.run import Run
from tests.conftest import make_run, quick

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 4
DRAWING: dict[str, dict[str, float]] = {"fcs": {}, "mrfa": {"strength": 0.1}, "pass": {}, "ssre": {}}  # losses draw


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def at_stage(run: Run, name: str) -> Iterator[StageLoop]:
    """The stage of that name of the first increment, before its first step, with learning rates of zero."""
    events = run.events()  # referenced until the end: a run ends with its generator
    for event in events:
        if isinstance(event, ev.StageStarted) and (event.task, event.stage) == (1, name):
            break
    loop = run.loop
    assert loop is not None
    assert bool(loop.replays) == (run.parts.engine == "graph")
    assert loop.optimizer is not None
    loop.order.copy_(loop.rows.flip(0)[: len(loop.order)])  # the last rows are exemplars, for which some losses draw
    for group in loop.optimizer.param_groups:
        group["lr"].zero_()
    yield loop
    del events


def steps(run: Run, loop: StageLoop, fixed: tuple[bool, bool]) -> torch.Tensor:
    """Loss terms of some steps on the same rows. `fixed`: whether views and losses are reseeded before each."""
    terms = []
    buffers = {buffer: buffer.clone() for buffer in loop.method.buffers()}
    for number in range(STEPS):
        for generator, same in zip((loop.views_generator, loop.world.generator), fixed, strict=True):
            if same or number == 0:
                generator.manual_seed(7)
        loop.cursor.zero_()
        for buffer, value in buffers.items():
            buffer.copy_(value)
        wait()
        loop.queue_step()
        wait()
        terms.append(loop.history[0].detach().cpu().clone())
    return torch.stack(terms)


def all_equal(terms: torch.Tensor) -> bool:
    return bool(torch.isclose(terms, terms[:1], rtol=1e-4, atol=1e-7).all())


def all_differ(terms: torch.Tensor) -> bool:
    """Whether any two steps differ in some term."""
    return all(not torch.isclose(a, b, rtol=2e-4, atol=1e-7).all() for a, b in itertools.combinations(terms, 2))


@pytest.mark.parametrize("engine", ["eager", pytest.param("graph", marks=gpu)])
@pytest.mark.parametrize("method", ["finetune", *DRAWING])
def test_views_and_losses_draw_anew_in_every_step(method: str, engine: str, few: Dataset, tmp_path: Path) -> None:
    device = "cuda" if engine == "graph" else "cpu"
    own = {"brightness": 0.2, **DRAWING.get(method, {})}
    given = quick(method, base_classes=4, engine=engine, device=device, precision="fp32", **{method: own})
    run = make_run(few, tmp_path / "run", given)
    with at_stage(run, "main") as loop:
        assert all_equal(steps(run, loop, (True, True)))
        assert all_differ(steps(run, loop, (False, True)))
        drawn = steps(run, loop, (True, False))
    assert all_differ(drawn) if method in DRAWING else all_equal(drawn)


@pytest.mark.parametrize("engine", ["eager", pytest.param("graph", marks=gpu)])
def test_loss_of_an_addon_draws_anew_in_every_step(engine: str, few: Dataset, tmp_path: Path) -> None:
    device = "cuda" if engine == "graph" else "cpu"
    given = quick("podnet", "eopc", engine=engine, device=device, precision="fp32")
    run = make_run(few, tmp_path / "run", given)
    with at_stage(run, "eopc-path") as loop:
        assert all_equal(steps(run, loop, (True, True)))
        assert all_differ(steps(run, loop, (True, False)))
