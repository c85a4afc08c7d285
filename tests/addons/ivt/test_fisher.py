"""F and Fbar: from which gradients, over which epochs, `first_fisher`, `structure`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.engine.build import check_names
from incvec.engine.run import finish
from incvec.errors import ConfigError
from incvec.ivt import IVT
from incvec.presets import resolve
from tests.addons.ivt.conftest import Teleports, split_state, teleported
from tests.addons.tools import Tensors, record_batches, run_on, same, snapshot, stage_names, watch
from tests.conftest import make_run, quick


@pytest.mark.parametrize(
    "options",
    [
        {"interval": 1}, {"interval": 3}, {"interval": None}, {"interval": 5, "last": "skip"},
    ],
    ids=str,
)  # fmt: skip
def test_fisher_is_that_of_one_epoch(
    options: dict[str, Any], few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every teleport and at the end of every task: the mean squared gradient of the last epoch only."""
    squares: dict[str, Tensor] = {}
    steps, compared = [0], [0]
    names: dict[int, str] = {}

    def begin(addon: IVTAddOn, task: Task, stage: Stage, epoch: int) -> None:
        names.update({id(p): name for name, p in addon.method.model.named_parameters()})
        if stage.role == "main":
            squares.clear()
            steps[0] = 0

    def step(addon: IVTAddOn, parameters: dict[str, Tensor]) -> None:
        steps[0] += 1
        for parameter in [p for name, p in parameters.items() if name.startswith("model.")]:
            if parameter.grad is not None:
                name = names[id(parameter)]
                squares[name] = squares.get(name, 0.0) + parameter.grad.double() ** 2

    def compare(plugin: IVT) -> None:
        if plugin.task > 1:  # F_1 comes from the shared base
            compared[0] += 1
            for name, total in squares.items():
                torch.testing.assert_close(plugin.fisher[name].double(), total / steps[0], rtol=1e-5, atol=0)

    watch(monkeypatch, IVTAddOn, "begin_epoch", before=begin)
    watch(monkeypatch, IVTAddOn, "_accumulate", after=step)
    watch(monkeypatch, IVT, "teleport", before=compare)
    watch(monkeypatch, IVT, "end_task", before=compare)
    finish(make_run(few, tmp_path, quick("podnet", "ivt", podnet={"epochs": 5}, ivt=options)))
    teleports = {1: 5, 3: 1, None: 1, 5: 0}[options["interval"]]
    assert compared[0] == 2 * (teleports + 1)


def test_fisher_accumulates_over_tasks(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    """Fbar_t = Fbar_{t-1} + F_t, with F_t of the last epoch."""
    run_on(few, tmp_path, "finetune", "ivt", ivt={"interval": 2})
    first, second = teleports.rows
    for name, past in first["past"].items():
        assert torch.allclose(second["past"][name], past + first["fisher"][name], rtol=1e-6), name


def test_gradients_are_those_after_the_methods_transform(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    """PODNet clamps its gradients, so F of the base task and of increments is at most the squared clamp."""
    run_on(few, tmp_path, "podnet", "ivt", podnet={"clamp": 1e-3}, tasks=1)
    for part in ("past", "fisher"):
        largest = max(float(f.max()) for f in teleports.rows[0][part].values())
        assert 0.5e-6 < largest <= 1.001e-6


def test_first_fisher_of_samples(
    few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Fbar_1 differs from that of batches; it equals a loop over single images."""
    batches = record_batches(monkeypatch)
    expected: list[Tensors] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.name == "ivt-fisher":
            batches.clear()

    def end(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.name != "ivt-fisher":
            return
        model = self.method.model
        assert [len(batch.labels) for batch in batches] == [1] * 80
        model.eval()
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for batch in batches:
            loss = F.cross_entropy(model(batch.images).logits, batch.labels)
            for name, gradient in zip(total, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                total[name] += gradient**2 / len(batches)
        expected.append(total)

    watch(monkeypatch, IVTAddOn, "begin_stage", after=begin)
    watch(monkeypatch, IVTAddOn, "end_stage", before=end)
    batch_run = run_on(few, tmp_path / "batch", "finetune", "ivt", ivt={"interval": 2})
    assert expected == []
    sample_run = run_on(few, tmp_path / "sample", "finetune", "ivt", ivt={"interval": 2, "first_fisher": "sample"})
    same(snapshot(batch_run, 0), snapshot(sample_run, 0))  # measuring changes no weights and no statistics
    by_batch, by_sample = teleports.rows[0], teleports.rows[2]
    same(by_batch["before"], by_sample["before"])  # nor the training until the first teleport
    same(by_batch["fisher"], by_sample["fisher"])
    for name, past in by_sample["past"].items():
        assert torch.allclose(past, expected[0][name], rtol=1e-4, atol=1e-12), name
    old, new = (sum(t.sum().item() for t in row["past"].values()) for row in (by_batch, by_sample))
    assert new > 2 * old  # the gradient of a batch is a mean, so its square is smaller


def test_first_fisher_of_batches_is_that_of_the_shared_base(
    few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensors] = []

    def end(self: IVTAddOn, task: Task) -> None:
        assert (self.world.base_fisher is None) == (task.index > 0)
        if self.world.base_fisher is not None:
            given.append({name: f.clone() for name, f in self.world.base_fisher.items()})

    watch(monkeypatch, IVTAddOn, "end_task", before=end)
    run_on(few, tmp_path, "finetune", "ivt", ivt={"interval": 2})
    same(teleports.rows[0]["past"], given[0])


@pytest.mark.parametrize("given", [{"structure": "kernel"}, {"first_fisher": "sample"}])
def test_first_fisher_covers_trained_parameters_only(given: dict[str, str], few: Dataset, tmp_path: Path) -> None:
    """RAPF's towers are frozen; a pass over them would find no gradient."""
    run = run_on(few, tmp_path, "rapf", "ivt", ivt=given)
    assert stage_names(run, 0)[-1] == "ivt-fisher"
    (addon,) = run.parts.addons
    assert isinstance(addon, IVTAddOn)
    assert not any(name.startswith("backbone.") for name in addon.plugin.cumulative)


def test_measuring_pass_keeps_batchnorm_frozen(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "flyp", "ivt", ivt={"structure": "kernel"})
    stages = run.parts.plan(run.parts.tasks[0])
    assert [(stage.name, stage.batchnorm) for stage in stages] == [("main", "frozen"), ("ivt-fisher", "frozen")]


@pytest.mark.parametrize(
    ("method", "options", "refused"),
    [
        ("flyp", {}, True), ("slca", {}, True), ("slca", {"form": "linear"}, False), ("spu", {}, True),
        ("rapf", {}, False),
    ],
)  # fmt: skip
def test_single_samples_are_refused_for_contrastive_losses(method: str, options: dict[str, Any], refused: bool) -> None:
    config = resolve(quick(method, "ivt", ivt={"first_fisher": "sample"}, **{method: options}))
    if not refused:
        return check_names(config)
    with pytest.raises(ConfigError, match=rf"'ivt'.* {method}.*ivt.first_fisher=batch"):
        check_names(config)


def test_kernel_blocks(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    """k x k kernels are teleported with one block per slice, all other parameters as with the diagonal."""
    run_on(few, tmp_path / "diagonal", "finetune", "ivt", ivt={"interval": 2})
    run = run_on(few, tmp_path / "kernel", "finetune", "ivt", ivt={"interval": 2, "structure": "kernel"})
    assert stage_names(run, 0) == ["main", "ivt-fisher"]
    plain, block = teleports.rows[0], teleports.rows[2]
    same(split_state(plain["before"])[0], split_state(block["before"])[0])
    kernels = 0
    for name, value in block["after"].items():
        if name not in block["past"]:
            continue
        if value.dim() != 4:
            assert block["past"][name].shape == value.shape
            assert torch.allclose(value.double(), teleported(block, name), rtol=1e-4, atol=1e-6), name
            continue
        kernels += 1
        a, f = block["past"][name].double(), block["fisher"][name].double()
        assert a.shape == (*value.shape[:2], 9, 9)
        both = 2 * a + f
        ridge = 1e-6 * both.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * torch.eye(9)
        ridge = torch.where(ridge.sum((-2, -1), keepdim=True) > 0, ridge, torch.eye(9).double())
        anchor = block["anchor"][name].double()
        step = (block["before"][name].double() - anchor).flatten(2)[..., None]
        scaled = torch.linalg.inv(both + ridge) @ (a + f + ridge) @ step
        expected = anchor + scaled[..., 0].view(anchor.shape)
        assert torch.allclose(value.double(), expected, rtol=1e-3, atol=1e-5), name
    assert kernels == 5
