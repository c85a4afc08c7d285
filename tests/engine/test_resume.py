"""A run that was interrupted or killed ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.run import Run, finish
from incvec.errors import CheckpointError
from incvec.methods import METHODS, find_method
from incvec.presets import resolve
from tests.conftest import always_saving_run, make_run, quick, same_record, same_weights


class Interrupted(Exception):
    pass


def interrupt_after(run: Run, count: int) -> bool:
    """Drop the run after `count` events; True if it finished before."""
    for number, event in enumerate(run.events()):
        if isinstance(event, ev.Finished):
            return True
        if number == count:
            return False
    return True


def finish_in_parts(make: Callable[[], Run]) -> dict[str, Any]:
    """The record of a run that is started again after every interruption."""
    for _ in range(40):
        with suppress(Interrupted):
            return finish(make())
    pytest.fail("the run did not finish")


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("addons", [(), ("ivt",)], ids=["plain", "ivt"])
def test_run_interrupted_at_every_event_resumes_to_the_same_bits(
    method: str, addons: tuple[str, ...], few: Dataset, tmp_path: Path
) -> None:
    kind = find_method(method)
    if addons and (kind.joint or not kind.trains):
        pytest.skip("IVT needs increments")
    given = quick(method, *addons)
    whole = make_run(few, tmp_path / "whole", given)
    record = finish(whole)
    out = tmp_path / "broken"
    breaks = 0
    while not interrupt_after(always_saving_run(few, out, given), 2 + breaks % 3):
        breaks += 1
        assert breaks < 200
    assert breaks > (5 if kind.trains else 1)  # without stages there are few events
    again = finish(make_run(few, out, given))
    same_record(again, record)
    for task in range(len(whole.parts.tasks)):
        same_weights(whole.snapshot_path(task), out / "snapshots" / f"task-{task:02d}.safetensors")


@pytest.mark.parametrize("hook", ["begin_task", "begin_stage", "end_stage", "end_task", "begin_evaluation", "grow"])
def test_run_interrupted_inside_hooks_resumes_to_the_same_bits(
    hook: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from incvec.methods.podnet import PODNet

    given = quick("podnet", "ivt")
    whole = make_run(few, tmp_path / "whole", given)
    record = finish(whole)
    original = getattr(PODNet, hook)
    calls = 0

    def breaking(self: PODNet, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(self, *arguments)
        if calls in (1, 3, 4, 9, 14):
            raise Interrupted
        return result

    out = tmp_path / "broken"
    with monkeypatch.context() as patch:
        patch.setattr(PODNet, hook, breaking)
        again = finish_in_parts(lambda: make_run(few, out, given))
    same_record(again, record)
    same_weights(whole.snapshot_path(2), out / "snapshots" / "task-02.safetensors")


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from incvec.data import load_dataset
from incvec.engine.run import Run, finish
from incvec.presets import resolve
finish(Run(resolve({given!r}), load_dataset("digits"), Path({out!r}), save_interval=0))
"""


def kill_until_done(given: dict[str, Any], out: Path, seed: int, span: float) -> int:
    """Run in another process, kill it at random moments and start it again, until it finishes."""
    chance = random.Random(seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    kills = 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(given=given, out=str(out))], env=environment)
        before = out / "checkpoint.safetensors"
        stamp = before.stat().st_mtime_ns if before.exists() else 0
        # Wait for a new checkpoint first, so that every process makes progress.
        while process.poll() is None:
            if before.exists() and before.stat().st_mtime_ns != stamp:
                break
            time.sleep(0.005)
        try:
            process.wait(timeout=chance.uniform(0, span if kills else 0.05))  # the first process is always killed
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0
        return kills


def long_enough(method: str, epochs: int) -> dict[str, Any]:
    given = quick(method, "ivt", **{method: {"epochs": epochs, "base_epochs": epochs}, "ivt": {"interval": 3}})
    return {**given, "base_classes": 4, "tasks": 3}


def check_kills(method: str, tmp_path: Path, digits: Dataset, epochs: int, span: float) -> int:
    given = long_enough(method, epochs)
    whole = Run(resolve(given), digits, tmp_path / "whole")
    record = finish(whole)
    out = tmp_path / "killed"
    kills = kill_until_done(given, out, seed=1, span=span)
    again = finish(Run(resolve(given), digits, out))
    same_record(again, record)
    for task in range(4):
        same_weights(whole.snapshot_path(task), out / "snapshots" / f"task-{task:02d}.safetensors")
    return kills


def test_run_killed_at_random_moments_resumes_to_the_same_bits(tmp_path: Path, digits: Dataset) -> None:
    """SIGKILL, several times; PODNet with IVT, so herding and the balanced stage may be hit, too."""
    assert check_kills("podnet", tmp_path, digits, epochs=12, span=1.5) >= 2


KILL_INSIDE = """
import os, signal
import incvec.methods.common as common
from incvec.engine import loop as stage
from incvec.methods.podnet import PODNet
visits = 0
def die(*about):
    global visits
    visits += 1
    if visits == {visit}:
        if about:  # leave half of a file on the disk
            os.ftruncate(about[0], os.fstat(about[0]).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
herd, step, forward, fchmod = common.herd, stage.StageLoop.step, PODNet.forward, os.fchmod
def herding(*given):
    chosen = herd(*given)
    die()
    return chosen
def balance(self):
    step(self)
    if self.stage.role == "balance":
        die()
def evaluation(self, images):
    die()
    return forward(self, images)
def writing(handle, mode):
    die(handle)
    fchmod(handle, mode)
place = {place!r}
if place == "herding": common.herd = herding
if place == "balance": stage.StageLoop.step = balance
if place == "evaluation": PODNet.forward = evaluation
if place == "writing": os.fchmod = writing
"""


def test_run_killed_inside_herding_writing_balanced_stage_and_evaluation(tmp_path: Path, digits: Dataset) -> None:
    """Several processes are killed one after the other, each in another place; the last one finishes."""
    given = long_enough("podnet", epochs=2)
    whole = Run(resolve(given), digits, tmp_path / "whole")
    record = finish(whole)
    out, chance = tmp_path / "killed", random.Random(3)
    for place, most in (("herding", 2), ("writing", 4), ("balance", 2), ("evaluation", 1)):
        script = KILL_INSIDE.format(place=place, visit=chance.randint(1, most)) + SCRIPT.format(
            given=given, out=str(out)
        )
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        assert done.returncode == -signal.SIGKILL, place
        if place == "writing":
            assert list(tmp_path.glob("killed/**/.*.safetensors.*"))
    again = finish(Run(resolve(given), digits, out))
    same_record(again, record)
    for task in range(4):
        same_weights(whole.snapshot_path(task), out / "snapshots" / f"task-{task:02d}.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"joint", "lda", "zeroshot"}))  # those that train an increment
def test_every_method_killed_at_random_moments_resumes_to_the_same_bits(
    method: str, tmp_path: Path, digits: Dataset
) -> None:
    assert check_kills(method, tmp_path, digits, epochs=4, span=4.0) >= 1


def test_interrupted_write_leaves_the_previous_checkpoint(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is interrupted before the rename."""
    given = quick("podnet")
    record = finish(make_run(few, tmp_path / "whole", given))
    calls = 0

    def interrupted(source: str, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            raise Interrupted  # the temporary file was not renamed
        real(source, target)

    real = os.replace
    out = tmp_path / "broken"
    with monkeypatch.context() as patch:
        patch.setattr("incvec.atomic_files.os.replace", interrupted)
        again = finish_in_parts(lambda: always_saving_run(few, out, given))
    same_record(again, record)


@pytest.mark.parametrize("done", [True, False])
def test_folder_of_a_run_with_other_images_is_refused(done: bool, few: Dataset, tmp_path: Path) -> None:
    """Of a finished run, and of an interrupted one."""
    run = always_saving_run(few, tmp_path, quick("finetune"))
    assert interrupt_after(run, 1000 if done else 8) is done
    assert run.record_path.exists() is done
    assert run.checkpoint_path.exists() is not done
    other = replace(few, fingerprint="seven digits")
    with pytest.raises(
        CheckpointError, match=r"fingerprint few digi\) than the ones given \(seven di\)\. .*another --out"
    ):
        finish(make_run(other, tmp_path, quick("finetune")))
