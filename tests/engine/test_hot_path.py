"""No step waits for the device: every stage of every method and add-on, as far as it claims to be capturable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from incvec.addons import ADDONS
from incvec.data import Dataset
from incvec.engine.capture import restored
from incvec.engine.loop import StageLoop
from incvec.engine.run import finish
from incvec.methods import METHODS, find_method
from tests.conftest import make_run, quick
from tests.hot_path import NoReading

TRAINED = [name for name in sorted(METHODS) if find_method(name).trains]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Watch every step of every stage but the first, which may make buffers; yields the steps by stage. Optimizers have
    a kernel of their own on a CPU, which reads its rate; on a GPU they read none.
    """
    seen: dict[str, int] = {}
    step = StageLoop.step

    def watching(loop: StageLoop) -> None:
        if loop.stage.eager is not None:
            return step(loop)
        seen[loop.stage.name] = seen.get(loop.stage.name, 0) + 1
        with NoReading() as mode, monkeypatch.context() as patch:
            mode.resting = seen[loop.stage.name] == 1
            if loop.optimizer is not None:
                real = loop.optimizer.step

                def rest() -> None:
                    before, mode.resting = mode.resting, True
                    real()
                    mode.resting = before

                patch.setattr(loop.optimizer, "step", rest)
            step(loop)
        return None

    with monkeypatch.context() as patch:
        patch.setattr(StageLoop, "step", watching)
        yield seen


@pytest.mark.parametrize("method", TRAINED)
def test_methods(method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as steps:
        finish(make_run(few, tmp_path, quick(method, tasks=1)))
    assert max(steps.values()) > 1


@pytest.mark.parametrize("addon", sorted(ADDONS))
def test_add_ons(addon: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as steps:
        finish(make_run(few, tmp_path, quick("podnet", addon, tasks=1)))
    assert steps["main"] > 1


def test_restored_puts_values_back_also_after_an_error() -> None:
    weight, empty = torch.arange(6.0).reshape(2, 3), torch.zeros(0)

    def fail() -> None:
        with restored([weight, weight.detach(), weight.t(), weight[0], empty]):
            weight.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
