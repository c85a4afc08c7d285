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
from incvec.engine import events as ev
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


def measure(method: EWC, batches: list[Batch], autocast: bool = False) -> Tensor:
    """The measuring pass over these batches, with the engine's backward pass restated; the squared gradients."""
    method.begin_stage(method.task, method.stages(method.task)[1])
    parameters = {f"model.{name}": p for name, p in method.model.named_parameters()}
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = method.measured_loss(batch)["ce"]
        found = torch.autograd.grad(loss, list(parameters.values()))
        for parameter, gradient in zip(parameters.values(), found, strict=True):
            parameter.grad = gradient
        method.gradients(parameters)
    return method.store["squares"]


def test_measured_fisher(few: Dataset, tmp_path: Path) -> None:
    method = trained(EWC, few, tmp_path, clip=None)
    method.requires_grad_(True).eval()
    method.store["fisher"] = method.store["fisher"][:0]
    batches = [new_rows(method, 4), new_rows(method, 5)]
    measure(method, batches)
    method.end_stage(method.task, method.stages(method.task)[1])
    expected = []
    for batch in batches:
        losses = F.cross_entropy(method.model(batch.images).logits, batch.labels, reduction="none")
        parameters = list(method.model.parameters())
        each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        expected.append(torch.stack([torch.cat([g.flatten() for g in own]) for own in each]).mean(0).square())
    torch.testing.assert_close(method.store["fisher"], torch.stack(expected).mean(0), rtol=1e-3, atol=1e-9)


def test_measuring_changes_no_weights_or_statistics(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("ewc", stop_after=1))
    before: dict[str, Tensor] = {}
    for event in run.events():
        if isinstance(event, ev.StageStarted) and event.stage == "fisher":
            before = {name: tensor.clone() for name, tensor in run.parts.method.model.state_dict().items()}
    assert run.parts.method.store["fisher"].sum() > 0
    assert before
    for name, tensor in run.parts.method.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_fisher_is_measured_in_full_precision(few: Dataset, tmp_path: Path) -> None:
    method = trained(EWC, few, tmp_path, clip=None)
    method.requires_grad_(True).eval()
    batches = [new_rows(method, 8)]
    full = measure(method, batches).clone()
    assert torch.equal(measure(method, batches, autocast=True), full)


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
