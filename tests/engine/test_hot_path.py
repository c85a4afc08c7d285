"""No step synchronizes with the device: every stage of every method and add-on that can be captured."""

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
from tests.hot_path import NoSynchronization

TRAINED = [name for name in sorted(METHODS) if find_method(name).trains]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Refuse synchronization in all steps but a stage's first one, which may allocate; yields the number of steps.

    Optimizers are excluded: on a CPU their fused kernel reads the learning rate, on a GPU it does not.
    """
    seen: dict[str, int] = {}
    step = StageLoop.step

    def watching(loop: StageLoop) -> None:
        if loop.stage.eager is not None:
            return step(loop)
        seen[loop.stage.name] = seen.get(loop.stage.name, 0) + 1
        with NoSynchronization() as mode, monkeypatch.context() as patch:
            mode.paused = seen[loop.stage.name] == 1
            if loop.optimizer is not None:
                real = loop.optimizer.step

                def unwatched() -> None:
                    before, mode.paused = mode.paused, True
                    real()
                    mode.paused = before

                patch.setattr(loop.optimizer, "step", unwatched)
            step(loop)
        return None

    with monkeypatch.context() as patch:
        patch.setattr(StageLoop, "step", watching)
        yield seen


@pytest.mark.parametrize("method", TRAINED)
def test_methods_do_not_synchronize_with_the_device(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch) as steps:
        finish(make_run(few, tmp_path, quick(method, tasks=1)))
    assert max(steps.values()) > 1


@pytest.mark.parametrize("addon", sorted(ADDONS))
def test_addons_do_not_synchronize_with_the_device(
    addon: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch) as steps:
        finish(make_run(few, tmp_path, quick("podnet", addon, tasks=1)))
    assert steps["main"] > 1


def test_restored_restores_values_after_an_error() -> None:
    weight, empty = torch.arange(6.0).reshape(2, 3), torch.zeros(0)

    def fail() -> None:
        with restored([weight, weight.detach(), weight.t(), weight[0], empty]):
            weight.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
