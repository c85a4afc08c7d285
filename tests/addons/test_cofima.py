"""CoFiMA and Fisher merging: the formulas, what is merged, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from incvec.addons.cofima import CoFiMA, CoFiMAOptions
from incvec.addons.fisher_merge import FisherMerge, FisherMergeOptions
from incvec.addons.merging import FisherReplace
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.methods.common import ImageMethod
from incvec.methods.ewc import EWC
from tests.addons.tools import Tensors, run_on, same, snapshot, stage_names, state_of, watch

Row = dict[str, Tensors]


def record_merges(patch: pytest.MonkeyPatch, kind: type[FisherReplace]) -> list[Row]:
    """Per task: the weights at its beginning and after training, its F, and the merged weights."""
    rows: list[Row] = []
    begun: list[Tensors] = [{}]

    def begin(self: FisherReplace, task: Task) -> None:
        begun[0] = state_of(self.method.model)

    def before(self: FisherReplace, task: Task, fisher: Tensors) -> None:
        measured = {name: f.clone() for name, f in fisher.items()}
        rows.append({"old": begun[0], "new": state_of(self.method.model), "fisher": measured})

    def after(self: FisherReplace, task: Task, fisher: Tensors) -> None:
        rows[-1]["merged"] = state_of(self.method.model)

    watch(patch, kind, "begin_task", before=begin)
    watch(patch, kind, "measured", before=before, after=after)
    return rows


def expected_cofima(old: Tensor, new: Tensor, f_old: Tensor, f_new: Tensor, alpha: float) -> Tensor:
    """Elementwise, in float64."""
    out = []
    for o, n, fo, fn in zip(*(t.flatten().double().tolist() for t in (old, new, f_old, f_new)), strict=True):
        fo, fn = (1 - alpha) * min(fo, 1e-4), alpha * min(fn, 1e-4)
        out.append((fo * o + fn * n) / (fo + fn) if fo + fn > 0 else (1 - alpha) * o + alpha * n)
    return torch.tensor(out, dtype=torch.float64).view(old.shape)


@pytest.mark.parametrize("buffers", ["average", "new", "anchor"])
def test_cofima_merges_by_the_formula(
    buffers: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = record_merges(monkeypatch, CoFiMA)
    run_on(few, tmp_path, "podnet", "cofima", cofima={"alpha": 0.3, "buffers": buffers})
    same(rows[0]["new"], rows[0]["merged"])  # nothing to merge after the base task
    assert any((f > 1e-4).any() and (f < 1e-4).any() for f in rows[0]["fisher"].values())  # some are clipped
    for task in (1, 2):
        row, previous = rows[task], rows[task - 1]["fisher"]  # of the previous task only
        for name, value in row["merged"].items():
            new = row["new"][name]
            if name in previous:
                expected = expected_cofima(row["old"][name], new, previous[name], row["fisher"][name], 0.3)
                assert torch.allclose(value.double(), expected, rtol=1e-5, atol=1e-7), name
                if name != "head.scale" and not name.startswith("head.blocks"):
                    assert not torch.equal(value, new), f"{name} was not merged"
            elif name in row["fisher"]:
                assert name.startswith(f"head.blocks.{task}.")
                assert torch.equal(value, new), f"{name} has no past, it stays as trained"
            elif buffers == "average":
                assert torch.allclose(value, 0.7 * row["old"][name] + 0.3 * new, rtol=1e-5, atol=1e-6), name
            else:
                assert torch.equal(value, new if buffers == "new" else row["old"][name]), name
                assert not torch.equal(row["old"][name], new), name


def test_parameter_without_fisher_is_averaged(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = record_merges(monkeypatch, CoFiMA)
    run_on(few, tmp_path, "podnet", "cofima")
    row = rows[1]
    assert row["fisher"]["head.scale"].item() == 0
    expected = 0.6 * row["old"]["head.scale"] + 0.4 * row["new"]["head.scale"]
    assert torch.allclose(row["merged"]["head.scale"], expected)


def test_fisher_merge_is_the_mean_over_all_tasks(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with sums over all tasks, which the add-on does not store."""
    rows = record_merges(monkeypatch, FisherMerge)
    run_on(few, tmp_path, "finetune", "fisher-merge")
    for task in (1, 2):
        past = rows[: task + 1]
        for name, value in rows[task]["merged"].items():
            rows_with = [row for row in past if name in row["new"]]
            if name in rows[0]["fisher"] or name.startswith("head"):
                products = [row["fisher"][name].double() * row["new"][name].double() for row in rows_with]
                above = torch.stack(products).sum(0)
                below = torch.stack([row["fisher"][name].double() for row in rows_with]).sum(0)
                expected = torch.where(below > 0, above / below, rows[task]["new"][name].double())
            else:
                expected = torch.stack([row["new"][name].double() for row in rows_with]).mean(0)
            assert torch.allclose(value.double(), expected, rtol=1e-4, atol=1e-6), name
    assert not torch.equal(rows[2]["merged"]["head.blocks.1.weight"], rows[2]["new"]["head.blocks.1.weight"])


def test_fisher_merge_keeps_a_parameter_without_fisher(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PODNet's logits do not depend on its scale, so its F is 0 in every task."""
    rows = record_merges(monkeypatch, FisherMerge)
    run_on(few, tmp_path, "podnet", "fisher-merge")
    assert len(rows) == 3
    for row in rows[1:]:
        assert row["fisher"]["head.scale"].item() == 0
        assert not torch.equal(row["old"]["head.scale"], row["new"]["head.scale"])
        assert torch.equal(row["merged"]["head.scale"], row["new"]["head.scale"])


def test_only_cofima_clips_by_default() -> None:
    assert CoFiMAOptions.model_fields["clip"].default == 1e-4
    assert FisherMergeOptions.model_fields["clip"].default is None


@pytest.mark.parametrize(("name", "kind"), [("cofima", CoFiMA), ("fisher-merge", FisherMerge)])
def test_training_continues_from_the_merge(
    name: str, kind: type[FisherReplace], few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = record_merges(monkeypatch, kind)
    run = run_on(few, tmp_path, "finetune", name)
    assert {key.partition("/")[0] for key in run.parts.addons[0].state()} == {"fisher", "share"}  # between tasks
    for task in range(3):
        same(snapshot(run, task), rows[task]["merged"])  # the merge is deployed
    for task in (1, 2):
        began = {n: t for n, t in rows[task]["old"].items() if n in rows[task - 1]["merged"]}
        same(began, rows[task - 1]["merged"])


def test_exemplars_are_selected_with_the_merged_weights(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PODNet herds before its balanced stage, and again after the merge."""
    rows = record_merges(monkeypatch, CoFiMA)
    herded: list[Tensors] = []
    watch(monkeypatch, ImageMethod, "herd_new", before=lambda self, task: herded.append(state_of(self.model)))
    run_on(few, tmp_path, "podnet", "cofima")
    assert len(herded) == 5  # base task: once; increments: before the balanced stage and after the merge
    same(herded[2], rows[1]["merged"])
    same(herded[4], rows[2]["merged"])


@pytest.mark.parametrize("addons", [("cofima",), ("fisher-merge",), ("ivt", "cofima", "imm")], ids="+".join)
def test_ewc_measures_fisher_after_the_merge(
    addons: tuple[str, ...], few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F and theta* both belong to the merged model."""
    measured: list[Tensors] = []
    trained: list[Tensors] = []

    def record(self: EWC, task: Task, stage: Stage) -> None:
        if stage.role == "measure":
            measured.append(state_of(self.model))

    watch(monkeypatch, EWC, "begin_stage", before=record)
    watch(monkeypatch, EWC, "end_task", before=lambda self, task: trained.append(state_of(self.model)))
    run = run_on(few, tmp_path, "ewc", *addons)
    merge = f"{addons[0] if len(addons) == 1 else addons[1]}-fisher"
    names = [stage_names(run, task) for task in range(3)]
    last = ["imm-fisher"] if "imm" in addons else []
    assert names[0] == ["main", "fisher", merge, *last]  # nothing to merge
    assert names[1] == names[2] == ["main", merge, "fisher", *last]
    for before, after in zip(measured, trained, strict=True):
        same(before, after)


def test_measurement_before_training_stays_before_training(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "spu", "cofima", tasks=3, base_classes=0, spu={"net": "small", "epochs": 1})
    assert stage_names(run, 1) == ["score", "main", "cofima-fisher"]


def test_prototypes_use_the_merged_weights(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "pass", "cofima")
    method, task = run.parts.method, run.parts.tasks[2]
    assert isinstance(method, ImageMethod)
    features, labels = method.new_class_features(task)
    for label in range(task.n_new):
        mean = features[labels == label].mean(0)
        assert torch.allclose(method.store["prototypes"][task.first + label], mean, atol=1e-5)


def test_share_of_new_weights_is_recorded(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "finetune", "cofima", cofima={"alpha": 1.0, "clip": None})
    shares = [row["cofima"]["share"] for row in run.progress.statistics]
    assert shares == [0, 1, 1]  # nothing is merged; then only the new weights
    run = run_on(few, tmp_path / "half", "finetune", "cofima")
    assert all(0 < row["cofima"]["share"] < 1 for row in run.progress.statistics[1:])
