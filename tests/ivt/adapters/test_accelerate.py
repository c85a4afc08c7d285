"""A loop of one's own with accelerate, and its checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

from incvec import IVT  # noqa: E402
from incvec.ivt.adapters.accelerate import prepare  # noqa: E402

from . import stream  # noqa: E402
from .stream import Network  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Run:
    """The loop that a user of accelerate writes; each task has its own Accelerator, optimizer and loader."""

    def __init__(self, **options: Any) -> None:
        self.network, self.options = Network(), options
        self.ivt: Any = None

    def task(
        self, task: int, load: Path | None = None, done: int = 0, save: Path | None = None, stop: int = -1
    ) -> None:
        self.network.grow_to(task)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(self.network.parameters(), lr=stream.RATE)
        loader = DataLoader(TensorDataset(*stream.samples(task)), batch_size=stream.BATCH)
        model, optimizer, loader = accelerator.prepare(self.network, optimizer, loader)
        self.ivt = prepare(accelerator, self.ivt or IVT(model, **self.options))
        if load is not None:
            accelerator.load_state(str(load))
        if not self.ivt.in_task:
            self.ivt.begin_task(optimizer, epochs=stream.EPOCHS)
        for epoch in range(done // stream.BATCHES, stream.EPOCHS):
            skipped = done % stream.BATCHES if epoch == done // stream.BATCHES else 0
            for index, (x, y) in enumerate(accelerator.skip_first_batches(loader, skipped), start=skipped):
                accelerator.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if epoch * stream.BATCHES + index + 1 == stop:
                    accelerator.save_state(str(save))
                    stream.kill()
            self.ivt.end_epoch()
        self.ivt.end_task()
        if save is not None:
            accelerator.save_state(str(save))


def test_three_tasks_equal_the_reference() -> None:
    run = Run(**stream.VERBATIM)
    for task in range(1, stream.TASKS + 1):
        run.task(task)
    stream.assert_reference(run.network, run.ivt)


def unbroken(tasks: int) -> Run:
    run = Run(interval=stream.INTERVAL)
    for task in range(1, tasks + 1):
        run.task(task)
    return run


def test_killed_and_resumed_within_an_epoch(tmp_path: Path) -> None:
    def die() -> None:
        unbroken(1).task(2, save=tmp_path, stop=7)

    stream.killed(die)
    resumed, want = Run(interval=stream.INTERVAL), unbroken(2)
    resumed.task(2, load=tmp_path, done=7)
    assert resumed.ivt.task == 2
    stream.assert_same(resumed.network, resumed.ivt, want.network, want.ivt)


def test_restarted_after_a_finished_task_the_next_one_begins(tmp_path: Path) -> None:
    run = Run(interval=stream.INTERVAL)
    run.task(1, save=tmp_path)
    run.task(2)

    resumed = Run(interval=stream.INTERVAL)
    accelerator = accelerate.Accelerator(cpu=True)
    model, _ = accelerator.prepare(resumed.network, torch.optim.SGD(resumed.network.parameters(), lr=stream.RATE))
    resumed.ivt = prepare(accelerator, IVT(model, interval=stream.INTERVAL))
    accelerator.load_state(str(tmp_path))
    assert not resumed.ivt.in_task
    resumed.task(2)
    assert resumed.ivt.task == 2
    stream.assert_same(resumed.network, resumed.ivt, run.network, run.ivt)


def test_accumulated_gradients_are_one_step() -> None:
    network = Network()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=stream.BATCHES)
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=stream.RATE))
    ivt = prepare(accelerator, IVT(model))
    ivt.begin_task(optimizer, epochs=1)
    for x, y in stream.batches(1):
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(x), y))
            gradient = network.head.bias.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ivt.fisher["head.bias"], gradient**2)
