"""Files of earlier formats open, and runs continue from them.

The files in tests/formats were written by the last version before format 2. They are of one run on the digits, whose
settings `SETTINGS` repeats: its record, its checkpoint within the second task, its snapshot after that task, and its
shared base.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec import atomic_files
from incvec.atomic_files import read_meta, read_tensors, write_tensors
from incvec.config import RunConfig
from incvec.data import Dataset
from incvec.engine.run import Run, finish
from incvec.errors import CheckpointError
from incvec.presets import complete_settings, resolve
from incvec.records import FORMAT, read_record
from tests.conftest import same_weights

FORMATS = Path(__file__).parent / "formats"
SETTINGS: dict[str, Any] = {
    "method": "replay", "addons": ["ivt"], "dataset": "digits", "base_classes": 6, "tasks": 2, "device": "cpu",
    "replay": {"net": "tiny", "epochs": 2, "batch_size": 64, "memory": 3},
    "ivt": {"interval": 1, "last": "teleport", "head": "teleport", "batchnorm": "keep"},
}  # fmt: skip


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return resolve(SETTINGS)


@pytest.fixture(scope="module")
def run(config: RunConfig, digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of the files, trained by the present version."""
    run = Run(config, digits, tmp_path_factory.mktemp("run"))
    finish(run)
    return run


def test_record_of_format_1_opens_under_the_present_names(config: RunConfig, run: Run) -> None:
    raw = json.loads((FORMATS / "record-1.json").read_text())
    assert (raw["format"], FORMAT) == (1, 2)
    record, new = read_record(FORMATS / "record-1.json"), read_record(run.record_path)
    assert complete_settings(record["config"]) == config.resolved()
    assert record["statistics"] == raw["facts"]
    assert record["accuracy"] == new["accuracy"]


def test_checkpoint_of_format_1_resumes_to_the_same_bits(config: RunConfig, run: Run, tmp_path: Path) -> None:
    assert read_meta(FORMATS / "checkpoint-1.safetensors")["format"] == 1
    shutil.copy(FORMATS / "checkpoint-1.safetensors", tmp_path / "checkpoint.safetensors")
    resumed = Run(config, run.dataset, tmp_path)
    record = finish(resumed)
    expected = read_record(run.record_path)["statistics"]
    teleports = [[row["ivt"].pop("teleports", {}) for row in rows] for rows in (record["statistics"], expected)]
    assert record["statistics"] == expected
    # Such a checkpoint has no statistics of the teleports before it; later ones are complete.
    assert [[row.get("epoch") for row in rows] for rows in teleports] == [[None, [2], [1, 2]], [None, [1, 2], [1, 2]]]
    assert teleports[0][2] == teleports[1][2]
    for task in (1, 2):
        same_weights(resumed.snapshot_path(task), run.snapshot_path(task))


def test_snapshot_of_format_1_can_be_started_from(run: Run, tmp_path: Path) -> None:
    old, new = (read_tensors(path)[0] for path in (FORMATS / "snapshot-1.safetensors", run.snapshot_path(1)))
    added = {"addon/ivt/epochs", "addon/ivt/exponent"}  # Fbar is stored times 2^exponent since then
    assert old.keys() == new.keys() - added
    assert new["addon/ivt/exponent"] == 64
    for name, tensor in old.items():
        assert torch.equal(tensor * 2.0**64 if "/cumulative/" in name else tensor, new[name]), name
    started = Run(resolve({**SETTINGS, "start": str(FORMATS / "snapshot-1.safetensors")}), run.dataset, tmp_path)
    finish(started)
    same_weights(started.snapshot_path(2), run.snapshot_path(2))


def test_base_of_format_1_is_read(run: Run) -> None:
    tensors, meta = read_tensors(FORMATS / "base-1.safetensors")
    assert meta["kind"] == "base"
    assert "optimizer" in meta["config"]["replay"]
    assert any(name.startswith("fisher/") for name in tensors)


def test_tensors_of_format_1_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ["loop/optimiser/model.head.weight/momentum_buffer", "method/model.dual.centre", "addon/ivt/epoch_finalised"]
    new = ["loop/optimizer/model.head.weight/momentum_buffer", "method/model.dual.center", "addon/ivt/epoch_finalized"]
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "FORMAT", 1)
        write_tensors(tmp_path / "old.safetensors", {name: torch.ones(1) for name in old}, {})
    assert sorted(read_tensors(tmp_path / "old.safetensors")[0]) == sorted(new)
    write_tensors(tmp_path / "new.safetensors", {name: torch.ones(1) for name in old}, {})
    assert sorted(read_tensors(tmp_path / "new.safetensors")[0]) == sorted(old)


def test_a_file_whose_configuration_has_removed_settings_can_be_read(tmp_path: Path) -> None:
    config = {"method": "rapf", "rapf": {"lr": 0.1, "shrink": False}}
    write_tensors(tmp_path / "old.safetensors", {}, {"config": config})
    assert read_meta(tmp_path / "old.safetensors")["config"] == {"method": "rapf", "rapf": {"lr": 0.1}}


def test_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "FORMAT", 3)
        write_tensors(tmp_path / "later.safetensors", {}, {})
    with pytest.raises(CheckpointError, match="has format 3; this version of incvec reads up to 2"):
        read_meta(tmp_path / "later.safetensors")
