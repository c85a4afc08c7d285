"""What the beginning of a task and `collect` refuse or warn about: optimizers, parameters, losses that do not fit."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from incvec import IVT

from .loops import base_task, gradients_of, grow, network, step


def test_an_optimizer_made_before_the_model_grew_is_noticed() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT(model)
    base_task(model, ivt, optimizer)
    model[2] = grow(model[2], 2)
    with pytest.warns(UserWarning, match=r"'2\.weight' requires gradients but is in no group.*before the model grew"):
        ivt.begin_task(optimizer, epochs=11)


@pytest.mark.parametrize("how", ["all", "auxiliary", "some"])
def test_optimizers_that_fit_cause_no_warning(how: str) -> None:
    """Of the model and more, or of a part of it."""
    model = network()
    parameters = list(model[0].parameters() if how == "some" else model.parameters())
    if how == "auxiliary":
        parameters.append(nn.Parameter(torch.zeros(1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IVT(model).begin_task(torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize("structure", ["diagonal", "kernel"])
def test_a_parameter_without_a_shape_is_refused(structure: Any) -> None:
    model = nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(2))
    ivt = IVT(model, structure=structure, batchnorm="keep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"'0\.weight' is of a lazy module.*call the model on a batch first"):
        ivt.begin_task(optimizer)
    model(torch.zeros(1, 1, 4, 4))
    ivt.begin_task(torch.optim.SGD(model.parameters(), lr=0.1))
    assert set(ivt.anchor) == set(dict(model.named_parameters()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("name", ["embedding", "head", "head.weight"])
def test_a_tied_parameter_is_excluded_by_any_of_its_names(name: str) -> None:
    model = Tied()
    ivt = IVT(model, exclude=[name, lambda name, parameter: name == "head.weight"])
    ivt.begin_task(torch.optim.SGD(model.parameters(), lr=0.1))
    assert ivt._left_alone() == {"embedding.weight"}


@pytest.mark.parametrize("exclude", [True, [1], network().parameters()])
def test_exclusions_of_other_types_are_refused_when_they_are_given(exclude: Any) -> None:
    with pytest.raises(TypeError, match="expected prefixes of names, modules or predicates, got"):
        IVT(network(), exclude=exclude)


def test_a_model_that_has_moved_since_the_task_began_is_an_error() -> None:
    """The gradients are on another device than the sums."""
    model = network()
    ivt = IVT(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt.begin_task(optimizer)
    moved = [(p, torch.zeros_like(p, device="meta")) for p in model.parameters()]
    for _ in range(2):  # before the first step, and after one
        with pytest.raises(RuntimeError, match=r"'0\.weight' was on cpu when the task began and is on meta now"):
            ivt.core.accumulate(moved)
        step(model, optimizer, seed=0)


def test_other_errors_of_a_step_stay_what_they_are() -> None:
    model = network()
    ivt = IVT(model)
    ivt.begin_task(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"size|shape"):
        ivt.core.accumulate([(model[0].weight, torch.zeros(2, 2, dtype=torch.float64))])


def test_a_model_may_change_its_precision() -> None:
    """Within a task and between tasks: F and the anchor keep the one they began with."""
    model = network().float()
    ivt = IVT(model, interval=1, exclude=(), last="teleport")
    for task in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ivt.begin_task(optimizer)
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            model.to(dtype)
            gradients_of(model, task)
            optimizer.step()
            assert ivt.end_epoch() == (task > 0)
        ivt.end_task()
    assert {row["name"] for row in ivt.report()} == set(dict(model.named_parameters()))
    assert all(0.5 < row["scale"] < 1 for row in ivt.report())


def own_loss() -> tuple[nn.Module, IVT]:
    model = network().float()
    ivt = IVT(model, fisher_loss="own")
    ivt.begin_task(torch.optim.SGD(model.parameters(), lr=0.1))
    return model, ivt


def test_losses_that_have_no_gradient_are_refused() -> None:
    model, ivt = own_loss()
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0])
    loss = cross_entropy(model(x), y)
    with pytest.raises(TypeError, match="the loss as a tensor, got float"):
        ivt.collect(loss.item())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no graph"):
        ivt.collect(loss.detach())
    with pytest.raises(ValueError, match="depends on no parameter of this task"):
        ivt.collect(cross_entropy(network().float()(x), y))
    with pytest.raises(ValueError, match="scalar"):
        ivt.collect(cross_entropy(model(x), y, reduction="none"))
    assert not ivt.fisher
    ivt.collect(loss)
    assert set(ivt.fisher) == set(dict(model.named_parameters()))


def test_numbers_of_numpy_are_numbers_of_epochs() -> None:
    np = pytest.importorskip("numpy")
    ivt = IVT(network(), interval=np.int64(2))
    ivt.begin_task(epochs=np.int32(4))
    assert (ivt.interval, ivt.epochs) == (2, 4)
    assert type(ivt.interval) is type(ivt.epochs) is int
    for wrong in (np.float64(2), 2.0, "2", True, 0):
        with pytest.raises(ValueError, match="give a number of epochs from 1 up"):
            IVT(network(), interval=wrong)
