"""Base tasks that are trained once and shared by runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.methods import METHODS, declared_method
from incvec.methods.podnet import PODNet
from tests.conftest import always_saving_run, make_run, quick, same_record, same_weights


def test_shared_base_is_trained_once_and_changes_no_bit(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without and with IVT, the oracle, another number of tasks: one base, the same bits as from scratch."""
    trained = 0
    original = PODNet.begin_stage

    def counting(self: PODNet, task: object, stage: object) -> torch.Tensor:
        nonlocal trained
        trained += self.task.index == 0
        return original(self, task, stage)  # type: ignore[arg-type]

    monkeypatch.setattr(PODNet, "begin_stage", counting)
    cases = {
        "plain": quick("podnet"),
        "ivt": quick("podnet", "ivt"),
        "oracle": quick("podnet", oracle=True),
        "one": quick("podnet", tasks=1),
    }
    for name, given in cases.items():
        finish(make_run(few, tmp_path / "shared" / name, given, tmp_path / "bases"))
    assert trained == 1
    for name, given in cases.items():
        alone = make_run(few, tmp_path / "alone" / name, given)
        record = finish(alone)
        again = finish(make_run(few, tmp_path / "shared" / name, given, tmp_path / "bases"))
        same_record(again, record)
        last = len(record["accuracy"]) - 1
        same_weights(
            alone.snapshot_path(last), tmp_path / "shared" / name / "snapshots" / f"task-{last:02d}.safetensors"
        )
    assert finish(make_run(few, tmp_path / "shared" / "ivt", cases["ivt"]))["base"]["shared"]


def test_other_seed_or_setting_has_another_base(few: Dataset, tmp_path: Path) -> None:
    for given in (quick("podnet"), quick("podnet", seed=1), quick("podnet", podnet={"lr": 0.01})):
        run = make_run(few, tmp_path / str(len(list(tmp_path.iterdir()))), given, tmp_path / "bases")
        finish(run)
    assert len(list((tmp_path / "bases").glob("*.safetensors"))) == 3


@pytest.mark.parametrize("name", [n for n in METHODS if n != "joint" and declared_method(n).later_settings])
def test_base_does_not_depend_on_later_settings(name: str, few: Dataset, tmp_path: Path) -> None:
    """Bases of runs that differ in nothing else have one key and the same bits."""
    files = []
    for settings in ({"memory": 2}, {"memory": 3}, {"memory_total": 12}):
        bases = tmp_path / str(settings)
        finish(make_run(few, tmp_path / f"run {settings}", quick(name, stop_after=1, **{name: settings}), bases))
        files += list(bases.glob("*.safetensors"))
    assert len(files) == 3
    assert len({file.name for file in files}) == 1
    for file in files[1:]:
        same_weights(files[0], file)


def test_run_interrupted_in_its_base_ignores_one_published_meanwhile(few: Dataset, tmp_path: Path) -> None:
    """It continues with its own base."""
    given, bases = quick("podnet"), tmp_path / "bases"
    first = always_saving_run(few, tmp_path / "first", given, bases)
    events = first.events()
    for _ in events:
        if first.checkpoint_path.exists():
            break
    events.close()
    record = finish(make_run(few, tmp_path / "second", given, bases))
    same_record(finish(make_run(few, tmp_path / "first", given, bases)), record)


def test_temporary_files_of_other_bases_are_not_removed(few: Dataset, tmp_path: Path) -> None:
    given, bases = quick("podnet"), tmp_path / "bases"
    finish(make_run(few, tmp_path / "first", given, bases))
    (base,) = bases.glob("*.safetensors")
    base.unlink()
    own, others = bases / f".{base.name}.killed", bases / ".0123456789abcdef01234567.safetensors.written"
    own.touch()
    others.touch()
    finish(make_run(few, tmp_path / "second", given, bases))
    assert base.exists()
    assert others.exists()
    assert not own.exists()
