"""The base classes of the merging add-ons: weighted means, the Fisher pass, and the order of add-ons."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.addons import ADDONS
from incvec.addons.cofima import CoFiMA
from incvec.addons.merging import (
    DEPLOYING,
    REPLACING,
    copy_weights,
    float_tensors,
    merge,
    merge_incompatibility,
    pack_state,
    unpack_state,
    weight_share,
)
from incvec.cli.sweep import plan
from incvec.contracts import Batch, Stage, Task
from incvec.data import Dataset
from incvec.engine.build import check_names
from incvec.engine.record import accuracy_matrix
from incvec.errors import ConfigError
from incvec.methods import find_method
from incvec.methods.finetune import local_cross_entropy
from incvec.presets import resolve
from tests.addons.tools import record_batches, run_on, stage_names, watch
from tests.conftest import quick


def test_share_and_merge_are_the_weighted_mean() -> None:
    old, new = [1.0, 2.0, -3.0, 5.0], [2.0, 2.5, 4.0, 7.0]
    w_old, w_new = [1e-12, 0.0, 3.0, 0.0], [3e-12, 2.0, 0.0, 0.0]
    share = weight_share(torch.tensor(w_old), torch.tensor(w_new), default=0.25)
    merged = merge(torch.tensor(old), torch.tensor(new), share)
    for i in range(3):
        assert merged[i].item() == pytest.approx((w_old[i] * old[i] + w_new[i] * new[i]) / (w_old[i] + w_new[i]))
    assert merged[3].item() == pytest.approx(0.75 * 5 + 0.25 * 7)  # 0/0
    assert merged[1].item() == new[1]  # the new value, bit for bit
    assert merged[2].item() == old[2]


def test_scalar_weight_applies_to_all_elements() -> None:
    share = weight_share(torch.tensor(2.0), torch.tensor(1.0), default=1.0)
    assert torch.allclose(merge(torch.zeros(2, 3), torch.ones(2, 3), share), torch.full((2, 3), 1 / 3))


def test_local_cross_entropy() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 3.0, 1.0, 1.5]])
    labels = torch.tensor([2, 1])  # new, old: two classes are old
    first = -(0.5 - math.log(math.exp(0.5) + math.exp(-1.0)))
    second = -(3.0 - math.log(math.exp(0.0) + math.exp(3.0)))
    assert local_cross_entropy(logits, labels, 2).item() == pytest.approx((first + second) / 2)
    assert torch.allclose(local_cross_entropy(logits, labels, 0), F.cross_entropy(logits, labels))


@pytest.mark.parametrize("dataset", ["cifar100", "digits"])
def test_local_variant_of_finetune(dataset: str) -> None:
    given = {"method": "finetune", "addons": ["magmax"], "dataset": dataset}
    assert resolve(given).sections["finetune"]["loss_over"] == "seen"
    local = resolve({**given, "variant": "local"}).sections["finetune"]
    assert local["loss_over"] == "new"
    if dataset == "cifar100":
        assert (local["optimizer"], local["lr"], local["epochs"]) == ("adam", 1e-3, 100)


def test_pack_and_unpack_state() -> None:
    state = pack_state(anchor={"a.b": torch.ones(2)}, fisher={"a.b": torch.zeros(()), "c": torch.ones(1)})
    assert list(state) == ["anchor/a.b", "fisher/a.b", "fisher/c"]
    back = unpack_state(state, "fisher")
    assert list(back) == ["a.b", "c"]
    assert back["c"].data_ptr() != state["fisher/c"].data_ptr()


def test_copied_weights_are_float32_without_integers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).to(torch.bfloat16), torch.nn.BatchNorm1d(2))
    assert "1.num_batches_tracked" in model.state_dict()
    live = float_tensors(model)
    assert "1.num_batches_tracked" not in live
    assert "1.running_mean" in live
    copies = copy_weights(model)
    assert copies["0.weight"].dtype == torch.float32
    assert not copies["0.weight"].requires_grad
    assert copies["1.running_mean"].data_ptr() != live["1.running_mean"].data_ptr()


@pytest.mark.parametrize(("method", "outputs"), [("finetune", 1), ("podnet", 1), ("pass", 4)])
def test_fisher_pass_measures_mean_squared_batch_gradients(
    method: str, outputs: int, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a loop over the same batches, with the same weights, in eval mode."""
    batches = record_batches(monkeypatch)
    checked: list[int] = []
    before: dict[str, Tensor] = {}

    def begin(self: CoFiMA, task: Task, stage: Stage) -> None:
        batches.clear()
        before.update({name: t.clone() for name, t in self.method.model.state_dict().items()})

    def check(self: CoFiMA, task: Task, fisher: dict[str, Tensor]) -> None:
        model = self.method.model
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), f"measuring changed {name}"
        seen = {int(label) for batch in batches for label in batch.labels}
        assert seen == set(task.classes)
        assert sum(len(b.labels) for b in batches) == 40 * task.n_new // 32 * 32
        expected = expected_fisher(model, batches, outputs)
        assert fisher.keys() == expected.keys()
        for name, f in fisher.items():
            assert torch.allclose(f, expected[name], rtol=1e-4, atol=1e-12), name
        assert any(f.max() > 0 for f in fisher.values())
        checked.append(task.index)

    watch(monkeypatch, CoFiMA, "begin_stage", before=begin)
    watch(monkeypatch, CoFiMA, "measured", before=check)
    run_on(few, tmp_path, method, "cofima", **{method: {"epochs": 1}})
    assert checked == [0, 1, 2]


def expected_fisher(model: torch.nn.Module, batches: list[Batch], outputs: int) -> dict[str, Tensor]:
    training = model.training
    model.eval()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches:
        loss = F.cross_entropy(model(batch.images).logits, outputs * batch.labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for name, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient**2 / len(batches)
    model.train(training)
    return total


def test_oracle_measures_fisher_on_all_classes_seen(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = record_batches(monkeypatch)
    seen: list[set[int]] = []
    watch(monkeypatch, CoFiMA, "begin_stage", before=lambda *_: batches.clear())

    def record(self: CoFiMA, task: Task, fisher: dict[str, Tensor]) -> None:
        seen.append({int(label) for batch in batches for label in batch.labels})

    watch(monkeypatch, CoFiMA, "measured", before=record)
    run_on(few, tmp_path, "finetune", "cofima", finetune={"epochs": 1}, oracle=True)
    assert seen == [set(range(2)), set(range(4)), set(range(6))]


def test_every_order_of_two_addons_is_accepted_or_refused() -> None:
    for first, second in itertools.permutations(ADDONS, 2):
        config = resolve(quick("podnet", first, second))
        refused = (
            (first in DEPLOYING and second in (*DEPLOYING, *REPLACING))
            or {first, second} == {"cofima", "fisher-merge"}
            or (first == "carry" and second in REPLACING)
        )  # fmt: skip
        if refused:
            with pytest.raises(
                ConfigError, match=f"add-on '{second}' cannot be combined with podnet \\+ {first}: .+\\."
            ):
                check_names(config)
        else:
            check_names(config)


def test_sweep_of_merges_contains_all_of_them() -> None:
    configs = [config for _, config in plan("cifar100-merging", [])]
    assert {config.addons for config in configs} == {(name,) for name in ADDONS if name not in ("eopc", "carry")}
    for config in configs:
        check_names(config)
        assert (config.method, config.dataset, config.tasks, config.seed) == ("podnet", "cifar100", 5, 0)


def test_incompatibility_names_the_other_addon() -> None:
    podnet, joint = find_method("podnet"), find_method("joint")
    assert "name cofima before it" in (merge_incompatibility("cofima", podnet, ["ivt", "magmax"]) or "")
    assert "name eopc before it" in (merge_incompatibility("eopc", podnet, ["carry"]) or "")
    assert "imm deploys one already" in (merge_incompatibility("magmax", podnet, ["imm"]) or "")
    assert "use one of the two" in (merge_incompatibility("fisher-merge", podnet, ["cofima"]) or "")
    assert "joint trains all classes as one task" in (merge_incompatibility("magmax", joint, []) or "")
    assert merge_incompatibility("magmax", podnet, ["ivt", "eopc", "cofima"]) is None
    assert merge_incompatibility("eopc", podnet, ["cofima"]) is None


@pytest.mark.parametrize(
    "addons",
    [
        ("ivt", "eopc"), ("eopc", "ivt"), ("eopc", "cofima"), ("cofima", "eopc"), ("ivt", "cofima"), ("cofima", "ivt"),
        ("fisher-merge", "eopc", "ivt"), ("eopc", "magmax"), ("ivt", "cofima", "imm"), ("magmax", "ivt"),
    ],
    ids="+".join,
)  # fmt: skip
def test_several_addons_together(addons: tuple[str, ...], few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "podnet", *addons)
    added = {"eopc": "eopc-path", "cofima": "cofima-fisher", "fisher-merge": "fisher-merge-fisher", "imm": "imm-fisher"}
    assert stage_names(run, 1) == ["main", "balance", *(added[addon] for addon in addons if addon in added)]
    assert all(math.isfinite(value) for row in accuracy_matrix(run.progress, run.parts) for value in row)
