"""BiC: corrected logits, the losses of both stages, validation images, fixed corrections."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from incvec.data import Dataset
from incvec.errors import ConfigError
from incvec.methods.bic import BiC, CorrectedClassifier, Correction
from incvec.nets import LinearHead, build_backbone
from tests.conftest import make_run, quick, weights
from tests.methods.tools import cross_entropy, finished, kl_divergence, seeded, some_batch, trained


def test_each_task_has_its_own_correction() -> None:
    draws = seeded(0)
    model = CorrectedClassifier(build_backbone("tiny", 1, draws), LinearHead(8)).eval()
    model.grow(2, draws)
    model.grow(3, draws)
    images = torch.randn(4, 1, 8, 8, generator=draws)
    plain = model(images)
    torch.testing.assert_close(plain.logits, model.head(plain.features))  # alpha = 1, beta = 0
    second = model.corrections[1]
    assert isinstance(second, Correction)
    with torch.no_grad():
        second.alpha.fill_(0.5)
        second.beta.fill_(-2.0)
    changed = model(images).logits
    assert torch.equal(changed[:, :2], plain.logits[:, :2])
    torch.testing.assert_close(changed[:, 2:], 0.5 * plain.logits[:, 2:] - 2)


def test_loss_of_the_first_stage(few: Dataset, tmp_path: Path) -> None:
    method = trained(BiC, few, tmp_path, temperature=3.0)
    assert method.teacher is not None
    method.eval()
    batch = some_batch(method)
    terms = method.loss(batch)
    logits, old = method.model(batch.images).logits.tolist(), method.teacher(batch.images).logits.tolist()
    # four of six classes are old
    assert terms["ce"].item() == pytest.approx(2 / 6 * cross_entropy(logits, batch.labels.tolist()), rel=1e-4)
    assert terms["distil"].item() == pytest.approx(4 / 6 * kl_divergence(logits, old, 3.0), rel=1e-3)


def test_teacher_includes_the_corrections(few: Dataset, tmp_path: Path) -> None:
    method = trained(BiC, few, tmp_path)
    assert isinstance(method.teacher, CorrectedClassifier)
    new, old = method.model.corrections, method.teacher.corrections
    assert [len(new), len(old)] == [3, 2]
    for one, other in zip(new[:2].parameters(), old.parameters(), strict=True):
        assert torch.equal(one, other)


def test_loss_of_the_second_stage(few: Dataset, tmp_path: Path) -> None:
    method = trained(BiC, few, tmp_path, bias_decay=0.3)
    method.eval()
    newest = method.model.corrections[2]
    assert isinstance(newest, Correction)
    with torch.no_grad():
        newest.alpha.fill_(0.8)
        newest.beta.fill_(-0.6)
    batch = some_batch(method)
    terms = method.correction_loss(batch)
    logits = method.model.head(method.model(batch.images).features).tolist()
    logits = [row[:4] + [0.8 * z - 0.6 for z in row[4:]] for row in with_second_correction(method, logits)]
    assert terms["ce"].item() == pytest.approx(cross_entropy(logits, batch.labels.tolist()), rel=1e-4)
    assert terms["decay"].item() == pytest.approx(0.3 * 0.6**2, rel=1e-5)


def with_second_correction(method: BiC, logits: list[list[float]]) -> list[list[float]]:
    """Logits with the correction of the second task, classes 2 and 3."""
    second = method.model.corrections[1]
    assert isinstance(second, Correction)
    alpha, beta = second.alpha.item(), second.beta.item()
    return [row[:2] + [alpha * z + beta for z in row[2:4]] + row[4:] for row in logits]


def test_corrections_of_earlier_tasks_stay_fixed(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "bic")
    names = [f"method/model.corrections.{t}.{kind}" for t in range(3) for kind in ("alpha", "beta")]
    after = [weights(run.snapshot_path(t)) for t in range(3)]
    assert [after[2][name].item() for name in names[:2]] == [1, 0]
    assert all(after[1][name] == after[2][name] for name in names[2:4])
    assert after[1][names[2]] != 1
    assert after[2][names[4]] != 1
    heads = [f"method/model.head.blocks.{t}.weight" for t in range(2)]
    assert not torch.equal(after[1][heads[0]], after[2][heads[0]])  # the rows are still trained


def test_second_stage_trains_only_the_current_correction(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[tuple[str, dict[str, torch.Tensor]]] = []

    def record(method: BiC, task: object, stage: object) -> None:
        state = {name: tensor.clone() for name, tensor in method.model.state_dict().items()}
        states.append((stage.name, state))  # type: ignore[attr-defined]

    monkeypatch.setattr(BiC, "end_stage", record)
    finished(few, tmp_path, "bic")
    assert [name for name, _ in states] == ["main", "main", "bias", "main", "bias"]
    before, after = states[3][1], states[4][1]
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    assert changed == ["corrections.2.alpha", "corrections.2.beta"]


def test_validation_images_are_never_trained_on(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("bic", bic={"memory": 5, "validation": 0.4}))
    rows: dict[tuple[int, str], set[int]] = {}
    for _ in run.events():
        if run.loop is not None:
            rows[(run.position[0], run.loop.stage.name)] = set(run.loop.rows.tolist())
    method = run.parts.method
    validation, memory = method.store["validation"], method.store["memory"]
    assert validation.shape == (6, 2)
    assert memory.shape == (6, 3)  # five per class, two of them for validation
    labels = method.world.train.labels
    for chosen in (validation, memory):
        assert torch.equal(labels[chosen], torch.arange(6)[:, None].expand(chosen.shape))
    held = set(validation.flatten().tolist())
    assert not held & set(memory.flatten().tolist())
    for task in range(3):
        assert not held & rows[(task, "main")]
    assert rows[(2, "bias")] == held
    assert rows[(1, "bias")] == set(validation[:4].flatten().tolist())  # drawn once
    assert len(rows[(2, "main")]) == 2 * 38 + 4 * 3
    assert len(set(rows[(0, "main")])) == 2 * 38


def test_oracle_has_the_same_validation_images(few: Dataset, tmp_path: Path) -> None:
    runs = [make_run(few, tmp_path / name, quick("bic", oracle=name == "oracle")) for name in ("plain", "oracle")]
    held = []
    for run in runs:
        for _ in run.events():
            pass
        held.append(run.parts.method.store["validation"])
    assert torch.equal(held[0], held[1])
    oracle = runs[1].parts.method
    assert isinstance(oracle, BiC)
    assert len(oracle.training_rows(oracle.task)) == 6 * 39


def test_too_small_memory_is_refused(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("bic", bic={"memory_total": 8}))
    with pytest.raises(ConfigError, match="holds out 1 for validation"):
        next(run.events())


def test_corrections_are_not_teleported(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "bic", "ivt")
    parts = run.progress.statistics[2]["ivt"]
    assert {"head.blocks.0", "head.blocks.1"} <= set(parts)
    assert not [part for part in parts if part.startswith("corrections")]


def test_first_stage_does_not_train_corrections(few: Dataset, tmp_path: Path) -> None:
    method = trained(BiC, few, tmp_path)
    (group,) = method.stages(method.world.tasks[0])[0].groups
    names = [name for name, _ in method.named_parameters() if group.owns(name)]
    assert "model.head.blocks.0.weight" in names
    assert not [name for name in names if "corrections" in name]
    assert isinstance(method.model.corrections, nn.ModuleList)
