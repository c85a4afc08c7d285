"""Full memory, compilers and captures that fail, a GPU that cannot be used: a word about it, and a slower way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from incvec.contracts import Batch, Terms
from incvec.data import Dataset
from incvec.engine import capture as speed
from incvec.engine import device_errors as trouble
from incvec.engine import events as ev
from incvec.engine import run as run_module
from incvec.engine import stage as stage_module
from incvec.engine.build import RunParts
from incvec.engine.run import Run, finish
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.errors import ConfigError, DeviceMemoryError, TrainingError
from incvec.methods.podnet import PODNet
from incvec.nets import kernels
from incvec.presets import resolve
from tests.conftest import make_run, quick, same_record


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def graph_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take themselves to be on a device that captures, so they try."""
    original = run_module.build

    def build(*arguments: Any) -> RunParts:
        parts = original(*arguments)
        parts.engine = "graph"
        return parts

    monkeypatch.setattr(run_module, "build", build)


# Compilers and captures -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("graph_engine")
def test_neither_compiled_nor_captured(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real warm-ups in every stage leave no trace: the run ends, bit for bit, as one that never tried."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", broken)
        tried = make_run(few, tmp_path / "tried", quick("podnet", "ivt"))
        events = list(tried.events())
    told = [event.text for event in events if isinstance(event, ev.Notice)]
    assert (
        sum("'main' could not be compiled and captured: RuntimeError: Failed to find C" in text for text in told) == 1
    )
    assert sum("'main' could not be captured" in text for text in told) == 1  # in the first task, not in every one
    record = events[-1].record  # type: ignore[attr-defined]
    assert record["engine"]["notices"] == told
    with monkeypatch.context() as patch:
        patch.setattr(stage_module, "capture_with_fallback", lambda *_: [])
        same_record(record, finish(make_run(few, tmp_path / "plain", quick("podnet", "ivt"))))


@pytest.mark.usefixtures("graph_engine")
def test_our_kernels_are_left_out_where_they_fail(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []

    def capture(loop: Any, live: Any, compiled: bool) -> None:
        tries.append(kernels.available())
        if not compiled or len(tries) > 20:
            pytest.fail("not tried without our kernels")  # no Exception, so nobody takes it for the compiler's
        if kernels.available():
            raise RuntimeError("ptxas failed")

    enabled = [True]
    monkeypatch.setattr(kernels, "enable", lambda value: enabled.append(value))
    monkeypatch.setattr(kernels, "available", lambda: enabled[-1])
    monkeypatch.setattr(speed, "capture_step", capture)
    run = make_run(few, tmp_path / "run", quick("finetune"))
    notices = finish(run)["engine"]["notices"]
    assert tries[:2] == [True, False]
    assert sum(tries) == 1
    assert notices == [
        "stage 'main' could not be compiled and captured with our own kernels: RuntimeError: ptxas failed"
    ]


@pytest.mark.usefixtures("graph_engine")
def test_captured_where_it_cannot_be_compiled(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[bool] = []

    def capture(loop: Any, live: Any, compiled: bool) -> None:
        tries.append(compiled)
        if compiled:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(speed, "capture_step", capture)
    notices = finish(make_run(few, tmp_path / "run", quick("finetune")))["engine"]["notices"]
    assert notices == ["stage 'main' could not be compiled and captured: RuntimeError: no compiler"]
    assert tries == [True, False, False, False]  # what failed once is not compiled again for each of three tasks


# Full memory ----------------------------------------------------------------------------------------------------


def test_what_means_full() -> None:
    assert trouble.is_out_of_memory(torch.OutOfMemoryError("x"))
    assert trouble.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert trouble.is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert trouble.is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 60, np.uint8)
    assert trouble.is_out_of_memory(numpys.value)
    assert not trouble.is_out_of_memory(RuntimeError("out of resource: shared memory"))
    assert not trouble.is_out_of_memory(OSError("out of memory"))
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = torch.OutOfMemoryError("x")
    assert trouble.is_out_of_memory(wrapped)


@pytest.mark.usefixtures("graph_engine")
def test_a_capture_without_memory(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again once memory is given back; then a run alone goes on eagerly, and one among others gives way."""
    tries = 0

    def capture(*_: Any, **__: Any) -> None:
        nonlocal tries
        tries += 1
        full()

    monkeypatch.setattr(speed, "capture_step", capture)
    record = finish(make_run(few, tmp_path / "alone", quick("finetune")))
    assert tries == 6  # twice in each of three tasks: there may be room in the next one
    assert record["engine"]["notices"] == ["stage 'main' could not be compiled and captured: the memory of cpu is full"]
    run = make_run(few, tmp_path / "among", quick("finetune"))
    with pytest.raises(DeviceMemoryError, match="memory of cpu is full, in task 1, stage 1 of finetune"):
        list(run.events(others_running=lambda: True))


def fail_while(condition: Callable[[PODNet], bool], patch: pytest.MonkeyPatch) -> None:
    original = PODNet.loss

    def loss(self: PODNet, batch: Batch) -> Terms:
        return full() if condition(self) else original(self, batch)  # type: ignore[no-any-return]

    patch.setattr(PODNet, "loss", loss)


def makers(few: Dataset, folder: Path, rates: list[float], bases: Path | None = None) -> list[Callable[[], Run]]:
    configs = [resolve(quick("podnet", podnet={"lr": rate})) for rate in rates]
    return [partial(Run, config, few, folder / str(number), bases) for number, config in enumerate(configs)]


def test_a_run_gives_way_and_comes_back(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has no room in its second task as long as the other one is at work; it goes on where it was."""
    done: set[int] = set()
    fail_while(lambda method: method.options.lr == 0.02 and method.task.index == 1 and 1 not in done, monkeypatch)
    resumed = []
    for number, event in run_concurrently(makers(few, tmp_path, [0.02, 0.03]), at_once=2):
        assert not isinstance(event, Failed)
        if isinstance(event, ev.Finished):
            done.add(number)
        if isinstance(event, ev.Started) and event.resumed:
            resumed.append((number, event.resumed, 1 in done))
    assert done == {0, 1}
    assert resumed == [(0, "task 2, stage 1, epoch 0", True)]


def test_no_room_even_alone(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one base that never fits: each fails with a message, none tries for ever, and others are not touched."""
    fail_while(lambda method: method.options.lr == 0.02, monkeypatch)
    events = list(run_concurrently(makers(few, tmp_path, [0.02, 0.02, 0.03], tmp_path / "bases"), at_once=2))
    errors = {number: event.error for number, event in events if isinstance(event, Failed)}
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert isinstance(error, DeviceMemoryError)
        assert "batch_size" in str(error)
    assert [number for number, event in events if isinstance(event, ev.Finished)] == [2]


# The device itself ----------------------------------------------------------------------------------------------


def test_a_run_that_cannot_be_made(few: Dataset, tmp_path: Path) -> None:
    def gone() -> Run:
        raise ConfigError("device 'cuda' was asked for")

    events = list(run_concurrently([gone, *makers(few, tmp_path, [0.03])], at_once=1))
    assert isinstance(events[0][1], Failed)
    assert [number for number, event in events if isinstance(event, ev.Finished)] == [1]


def test_a_device_that_broke(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PODNet, batch: Batch) -> Terms:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(PODNet, "loss", broken)
    with pytest.raises(
        TrainingError,
        match=r"cpu stopped working, in task 1.*illegal memory access was encountered. This process cannot",
    ):
        finish(make_run(few, tmp_path / "run", quick("podnet")))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).\nPlease update", True),
        ("Found no NVIDIA driver on your system.", False),
        ("No CUDA GPUs are available", False),
    ],
)
def test_a_gpu_that_cannot_be_used(
    message: str, said: bool, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    notices = finish(make_run(few, tmp_path / "run", quick("finetune")))["engine"]["notices"]
    told = ["training on the CPU, since the GPU cannot be used: The NVIDIA driver on your system is too old (found "]
    assert [text[: len(told[0])] for text in notices] == (told if said else [])
    assert not any("Please" in text for text in notices)
