"""Failed compilation and capture, full memory, and GPUs that cannot be used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from incvec.contracts import Batch, Terms
from incvec.data import Dataset
from incvec.engine import capture as capture_module
from incvec.engine import device_errors, scheduler
from incvec.engine import events as ev
from incvec.engine import run as run_module
from incvec.engine import stage as stage_module
from incvec.engine.build import RunParts
from incvec.engine.checkpoint_writer import CheckpointWriter
from incvec.engine.loop import StageLoop
from incvec.engine.run import Run, finish
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.errors import CheckpointError, ConfigError, DeviceMemoryError, TrainingError
from incvec.methods.podnet import PODNet
from incvec.nets import kernels
from incvec.presets import resolve
from tests.conftest import make_run, quick, same_record


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def graph_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs on a CPU attempt to capture their steps."""
    original = run_module.build

    def build(*arguments: Any) -> RunParts:
        parts = original(*arguments)
        parts.engine = "graph"
        return parts

    monkeypatch.setattr(run_module, "build", build)


# Compilers and captures -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("graph_engine")
def test_stage_runs_eagerly_if_capture_fails(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up steps of both attempts change nothing: the run ends with the same bits as one without them."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", broken)
        tried = make_run(few, tmp_path / "tried", quick("podnet", "ivt"))
        events = list(tried.events())
    notices = [event.text for event in events if isinstance(event, ev.Notice)]
    assert (
        sum("'main' could not be compiled and captured: RuntimeError: Failed to find C" in text for text in notices)
        == 1
    )
    assert sum("'main' could not be captured" in text for text in notices) == 1  # once, not in every task
    record = events[-1].record  # type: ignore[attr-defined]
    assert record["engine"]["notices"] == notices
    with monkeypatch.context() as patch:
        patch.setattr(stage_module, "capture_with_fallback", lambda *_: [])
        same_record(record, finish(make_run(few, tmp_path / "plain", quick("podnet", "ivt"))))


@pytest.mark.usefixtures("graph_engine")
def test_capture_is_retried_without_our_kernels(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[bool] = []

    def capture(loop: Any, live: Any, compiled: bool) -> None:
        tries.append(kernels.available())
        if not compiled or len(tries) > 20:
            pytest.fail("not attempted without our kernels")  # is not caught as a failed capture
        if kernels.available():
            raise RuntimeError("ptxas failed")

    enabled = [True]
    monkeypatch.setattr(kernels, "enable", lambda value: enabled.append(value))
    monkeypatch.setattr(kernels, "available", lambda: enabled[-1])
    monkeypatch.setattr(capture_module, "capture_step", capture)
    run = make_run(few, tmp_path / "run", quick("finetune"))
    notices = finish(run)["engine"]["notices"]
    assert tries[:2] == [True, False]
    assert sum(tries) == 1
    assert notices == [
        "stage 'main' could not be compiled and captured with our own kernels: RuntimeError: ptxas failed"
    ]


@pytest.mark.usefixtures("graph_engine")
def test_step_is_captured_if_it_cannot_be_compiled(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []

    def capture(loop: Any, live: Any, compiled: bool) -> None:
        tries.append(compiled)
        if compiled:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(capture_module, "capture_step", capture)
    notices = finish(make_run(few, tmp_path / "run", quick("finetune")))["engine"]["notices"]
    assert notices == ["stage 'main' could not be compiled and captured: RuntimeError: no compiler"]
    assert tries == [True, False, False, False]  # not compiled again in each of three tasks


@pytest.mark.usefixtures("graph_engine")
def test_failed_write_is_not_taken_for_a_failed_capture(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is written in a thread, and the next capture waits for it."""

    errors = [CheckpointError("could not write checkpoint.safetensors: no space left on device")]

    def wait(self: object) -> None:
        while errors:
            raise errors.pop()

    monkeypatch.setattr(CheckpointWriter, "wait", wait)
    with pytest.raises(CheckpointError, match="no space left"):
        finish(make_run(few, tmp_path / "run", quick("finetune")))


@pytest.mark.usefixtures("graph_engine")
def test_epochs_whose_graph_was_lost_are_captured_again(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs with gradients of the own loss have a graph of their own. If its capture fails, the generators of the
    other one are replaced, so that one is captured again; a failed one is attempted once per mode."""
    tries: list[tuple[bool, bool]] = []

    def capture(loop: StageLoop, live: Any, compiled: bool) -> None:
        tries.append((loop.own, compiled))
        if loop.own:
            raise RuntimeError("not static")
        loop.replays[loop.own] = loop.step

    monkeypatch.setattr(capture_module, "capture_step", capture)
    monkeypatch.setattr(kernels, "available", lambda: False)
    given = quick("lwf", "ivt", lwf={"epochs": 5}, ivt={"fisher_loss": "own", "interval": 2}, tasks=1)
    finish(make_run(few, tmp_path / "run", given))
    assert tries == [(False, True)] * 2 + [(True, True), (True, False), (False, True)]


# Full memory ----------------------------------------------------------------------------------------------------


def test_out_of_memory_errors_are_recognized() -> None:
    assert device_errors.is_out_of_memory(torch.OutOfMemoryError("x"))
    assert device_errors.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert device_errors.is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert device_errors.is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 60, np.uint8)
    assert device_errors.is_out_of_memory(numpys.value)
    assert not device_errors.is_out_of_memory(RuntimeError("out of resource: shared memory"))
    assert not device_errors.is_out_of_memory(OSError("out of memory"))
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = torch.OutOfMemoryError("x")
    assert device_errors.is_out_of_memory(wrapped)


@pytest.mark.usefixtures("graph_engine")
def test_capture_without_memory_is_retried_then_eager_or_raised(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is retried after memory was released. Then a single run continues eagerly; one of several raises."""
    tries = 0

    def capture(*_: Any, **__: Any) -> None:
        nonlocal tries
        tries += 1
        full()

    monkeypatch.setattr(capture_module, "capture_step", capture)
    record = finish(make_run(few, tmp_path / "alone", quick("finetune")))
    assert tries == 6  # twice in each of three tasks, since memory may be free in the next one
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


def test_run_without_memory_stops_and_resumes_when_others_have_ended(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run does not fit in its second task while the other one is running."""
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


@pytest.mark.parametrize("error", [DeviceMemoryError("full"), RuntimeError("broken")])
def test_memory_of_a_run_that_stopped_is_released_before_others_continue(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing refers to it any more, though its error is reported."""
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def look() -> None:
        alive.extend(weights() is not None for weights in held)

    class Scripted:
        def __init__(self, number: int) -> None:
            self.number = number

        def events(self, others_running: Callable[[], bool]) -> Iterator[ev.Event]:
            weights = torch.zeros(3)
            yield ev.Tick()
            if self.number == 0 and others_running():
                held.append(weakref.ref(weights))
                try:
                    raise error
                except Exception as cause:
                    raise type(error)("as the user sees it") from cause
            look()

    monkeypatch.setattr(scheduler, "release_memory", look)
    runs: Any = [partial(Scripted, number) for number in range(2)]
    events = list(run_concurrently(runs, 2))
    assert [type(event) for _, event in events if isinstance(event, Failed)] == [Failed] * isinstance(
        error, RuntimeError
    )
    assert alive
    assert not any(alive)


def test_runs_that_never_fit_fail_and_do_not_affect_others(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs share a base that does not fit: each fails with a message, and none is retried forever."""
    fail_while(lambda method: method.options.lr == 0.02, monkeypatch)
    events = list(run_concurrently(makers(few, tmp_path, [0.02, 0.02, 0.03], tmp_path / "bases"), at_once=2))
    errors = {number: event.error for number, event in events if isinstance(event, Failed)}
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert isinstance(error, DeviceMemoryError)
        assert "batch_size" in str(error)
    assert [number for number, event in events if isinstance(event, ev.Finished)] == [2]


# The device itself ----------------------------------------------------------------------------------------------


def test_run_that_cannot_be_created_does_not_stop_the_others(few: Dataset, tmp_path: Path) -> None:
    def fail() -> Run:
        raise ConfigError("device 'cuda' was requested")

    events = list(run_concurrently([fail, *makers(few, tmp_path, [0.03])], at_once=1))
    assert isinstance(events[0][1], Failed)
    assert [number for number, event in events if isinstance(event, ev.Finished)] == [1]


def test_device_failure_is_reported(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PODNet, batch: Batch) -> Terms:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(PODNet, "loss", broken)
    with pytest.raises(
        TrainingError,
        match=r"cpu stopped working, in task 1.*illegal memory access was encountered. This process cannot",
    ):
        finish(make_run(few, tmp_path / "run", quick("podnet")))


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).\nPlease update", True),
        ("Found no NVIDIA driver on your system.", False),
        ("No CUDA GPUs are available", False),
    ],
)
def test_unusable_gpu_is_reported_in_a_notice(
    message: str, reported: bool, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    notices = finish(make_run(few, tmp_path / "run", quick("finetune")))["engine"]["notices"]
    expected = [
        "training on the CPU, since the GPU cannot be used: The NVIDIA driver on your system is too old (found "
    ]
    assert [text[: len(expected[0])] for text in notices] == (expected if reported else [])
    assert not any("Please" in text for text in notices)
