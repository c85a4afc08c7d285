"""EWC: the penalty and the Fisher restated, and its store over the tasks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.contracts import Batch
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.methods.ewc import EWC, accumulated, quadratic, to_vector
from tests.conftest import make_run, quick, weights
from tests.methods.tools import finished, seeded, trained


def new_rows(method: EWC, count: int) -> Batch:
    return method.world.train.fetch(method.training_rows(method.task)[:: 80 // count][:count], None, ("test",))


def test_quadratic_penalty_ignores_new_weights() -> None:
    weights = torch.tensor([1.0, 2.0, -1.0, 5.0], requires_grad=True)
    anchor, fisher = torch.tensor([0.0, 2.5, 1.0]), torch.tensor([2.0, 4.0, 0.0])
    loss = quadratic(weights, anchor, fisher)
    assert loss.item() == pytest.approx(0.5 * (2 * 1.0**2 + 4 * 0.5**2 + 0 * 2.0**2))
    (gradient,) = torch.autograd.grad(loss, weights)
    assert gradient.tolist() == pytest.approx([2.0, -2.0, 0.0, 0.0])


def test_accumulated_fisher() -> None:
    old, new = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0, 30.0])
    assert accumulated(old, new, 0.5, 1.0).tolist() == [10.5, 21.0, 30.0]
    assert accumulated(old[:0], new, 0.5, 1.0).tolist() == [10.0, 20.0, 30.0]


def test_parameter_vector_is_a_prefix_after_growing(few: Dataset, tmp_path: Path) -> None:
    method = trained(EWC, few, tmp_path)
    names = list(dict(method.model.named_parameters()))
    method.model.grow(2, seeded(0))
    assert list(dict(method.model.named_parameters()))[: len(names)] == names


def test_increment_penalty(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "ewc", lambda_ewc=30.0)
    method = run.parts.method
    assert isinstance(method, EWC)
    method.eval()
    before = weights(run.snapshot_path(1))  # at the beginning of the last task
    method.store |= {name: before[f"store/{name}"] for name in ("anchor", "fisher")}
    terms = method.loss(new_rows(method, 20))
    assert list(terms) == ["ce", "ewc"]
    total, at = 0.0, 0
    for name, parameter in method.model.named_parameters():
        if name.startswith("head.blocks.2"):
            continue
        anchor = before[f"method/model.{name}"]
        importance = before["store/fisher"][at : at + anchor.numel()].view_as(anchor)
        at += anchor.numel()
        total += 15.0 * float((importance.double() * (parameter.double() - anchor.double()) ** 2).sum())
    assert at == len(before["store/fisher"])
    assert total > 0
    assert terms["ewc"].item() == pytest.approx(total, rel=1e-4)


def gradient(method: EWC, loss: Tensor) -> Tensor:
    parameters = list(method.model.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    return torch.cat([g.flatten() for g in found])


@pytest.mark.parametrize("kind", ["batch", "sample", "exact"])
def test_measured_fisher(kind: str, few: Dataset, tmp_path: Path) -> None:
    method = trained(EWC, few, tmp_path, fisher=kind, clip=None)
    method.requires_grad_(True)
    measure = method.stages(method.task)[1]
    method.store["fisher"] = method.store["fisher"][:0]
    method.begin_stage(method.task, measure)
    batches = [new_rows(method, 4), new_rows(method, 5)]
    with torch.no_grad():
        for batch in batches:
            method.measure(batch)
    method.end_stage(method.task, measure)
    method.eval()
    terms = []
    for batch in batches:
        logits = method.model(batch.images).logits
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        if kind == "batch":
            terms.append(gradient(method, losses.mean()) ** 2)
        elif kind == "sample":
            terms += [gradient(method, loss) ** 2 for loss in losses]
        else:
            for row in logits.log_softmax(1):
                terms.append(sum(row[c].exp().item() * gradient(method, row[c]) ** 2 for c in range(6)))
    torch.testing.assert_close(method.store["fisher"], torch.stack(terms).mean(0), rtol=1e-3, atol=1e-9)


def test_measuring_changes_no_weights_or_statistics(few: Dataset, tmp_path: Path) -> None:
    method = trained(EWC, few, tmp_path, fisher="sampled")
    before = {name: tensor.clone() for name, tensor in method.model.state_dict().items()}
    method.train()
    method.begin_stage(method.task, method.stages(method.task)[1])
    with torch.no_grad():
        method.measure(new_rows(method, 8))
    assert method.store["squares"].sum() > 0
    for name, tensor in method.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("kind", ["batch", "sampled"])
def test_fisher_is_measured_in_full_precision(kind: str, few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("ewc", precision="bf16", ewc={"fisher": kind, "clip": None}))
    finish(run)
    (*_, last) = run.progress.losses
    assert last["stage"] == "fisher"
    method = run.parts.method
    assert isinstance(method, EWC)
    batch = new_rows(method, 8)
    results = []
    for precision in (torch.float32, torch.bfloat16):
        method.begin_stage(method.task, method.stages(method.task)[1])
        method.world.generator.manual_seed(3)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            method.measure(batch)
        results.append(method.store["squares"].clone())
    assert torch.equal(*results)


def test_store_over_the_tasks(few: Dataset, tmp_path: Path) -> None:
    run = finished(few, tmp_path, "ewc", clip=1e-5)
    after = [weights(run.snapshot_path(task)) for task in range(3)]
    fishers = [state["store/fisher"] for state in after]
    sizes = [len(fisher) for fisher in fishers]
    assert [b - a for a, b in pairwise(sizes)] == [2 * 9, 2 * 9]  # two rows of width 8, each with a bias
    for task in range(2):
        grown = fishers[task + 1][: sizes[task]] - fishers[task]
        assert grown.min() >= 0  # a sum over the tasks
        assert grown.max() > 0
    for task, fisher in enumerate(fishers):
        assert fisher.max() <= (task + 1) * 1.001e-5
    names = [name for name, _ in run.parts.method.model.named_parameters()]
    final = to_vector({name: after[2][f"method/model.{name}"] for name in names})
    assert torch.equal(after[2]["store/anchor"], final)
    assert {name for name in after[2] if name.startswith("store/")} == {"store/anchor", "store/fisher"}


def test_fisher_mean_is_weighted_by_classes(few: Dataset, tmp_path: Path) -> None:
    method = trained(EWC, few, tmp_path, accumulate="mean", clip=None)
    past = torch.full_like(method.store["fisher"][:-18], 3.0)
    method.store["fisher"] = past
    method.store["squares"] = torch.full((len(past) + 18,), 12.0)
    method.store["terms"] = torch.tensor(2.0)
    method.end_stage(method.task, method.stages(method.task)[1])
    fisher = method.store["fisher"]
    torch.testing.assert_close(fisher[:-18], torch.full_like(past, (4 * 3 + 2 * 6) / 6))
    assert fisher[-18:].tolist() == [6.0] * 18
