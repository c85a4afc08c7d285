"""`batchnorm="layer"` and `"recalibrate"` in a plain loop, by formulas restated in float64."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from incvec import IVT

EPS = 1e-5


class Net(nn.Module):
    """Two convolutions with norms, one of them without a layer that it could be folded into, dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, eps=EPS)
        self.biased, self.second = nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, eps=EPS)
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        x = self.second(self.biased(x)).relu()
        return self.fc(self.dropout(x.mean((2, 3))))


def batches(task: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(task)
    return [torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64) * (1 + task) + task for _ in range(3)]


def train(model: Net, optimizer: torch.optim.Optimizer, ivt: IVT, task: int) -> None:
    for x in batches(task):
        optimizer.zero_grad()
        (model(x) - task).square().mean().backward()
        optimizer.step()


def start(**options: Any) -> tuple[Net, torch.optim.Optimizer, IVT]:
    """A model whose second task is trained, but not yet teleported."""
    model = Net()
    ivt = IVT(model, **{"interval": 1, "exclude": ["fc"], "last": "teleport", "batchnorm": "layer", **options})
    for task in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        ivt.begin_task(optimizer, epochs=1)
        train(model, optimizer, ivt, task)
        if task == 0:
            ivt.end_epoch()
            ivt.end_task()
    return model, optimizer, ivt


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.transpose(0, 1).flatten(1)
    return flat.mean(1), flat.var(1, correction=0)


def as_map(state: dict[str, Tensor], norm: str, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    slope = state[f"{norm}.weight"] / (var + EPS).sqrt()
    return slope, state[f"{norm}.bias"] - slope * mean


def scale(ivt: IVT, name: str) -> Tensor:
    a, f = ivt.cumulative[name], ivt.fisher[name]
    return (a + f) / (2 * a + f)


@pytest.mark.parametrize("mode", [True, False])
def test_a_convolution_and_its_norm_are_teleported_as_one_map(mode: bool) -> None:
    model, _, ivt = start()
    x = torch.cat(batches(1))  # the epoch's three batches, as one
    before, anchor = copy.deepcopy(model), {**ivt.anchor, **ivt.core.buffers}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.train(mode)  # a user may have evaluated in between
    with torch.no_grad():
        inputs = before.conv(x)
        new = as_map(state, "norm", *moments(inputs))
        old = as_map(anchor, "norm", anchor["norm.running_mean"], anchor["norm.running_var"])
        products = [
            slope[:, None, None, None] * w
            for (slope, _), w in ((new, state["conv.weight"]), (old, anchor["conv.weight"]))
        ]
        product = products[1] + scale(ivt, "conv.weight") * (products[0] - products[1])
        offset = old[1] + scale(ivt, "norm.bias") * (new[1] - old[1])
    assert ivt.end_epoch()
    assert model.training == mode
    assert torch.equal(model.fc.weight, state["fc.weight"])
    with torch.no_grad():
        mapped = as_map(dict(model.state_dict()), "norm", model.norm.running_mean, model.norm.running_var)
        torch.testing.assert_close(mapped[0][:, None, None, None] * model.conv.weight, product)
        torch.testing.assert_close(mapped[1], offset)
        inputs = model.conv(x)
        for found, wanted in zip((model.norm.running_mean, model.norm.running_var), moments(inputs), strict=True):
            torch.testing.assert_close(found, wanted)
        # The second norm follows a convolution with a bias: it is a map of its own, and that convolution is not folded.
        hidden = before.norm.train()(before.conv(x)).relu()
        new = as_map(state, "second", *moments(before.biased(hidden)))
        old = as_map(anchor, "second", anchor["second.running_mean"], anchor["second.running_var"])
        mapped = as_map(dict(model.state_dict()), "second", model.second.running_mean, model.second.running_var)
        for found, kind, (n, o) in zip(mapped, ("weight", "bias"), zip(new, old, strict=True), strict=True):
            torch.testing.assert_close(found, o + scale(ivt, f"second.{kind}") * (n - o))
        bias = anchor["biased.weight"] + scale(ivt, "biased.weight") * (
            state["biased.weight"] - anchor["biased.weight"]
        )
        torch.testing.assert_close(model.biased.weight.detach(), bias)


def test_a_given_probe_is_used_in_place_of_remembered_inputs() -> None:
    calls: list[int] = []

    def probe() -> None:
        calls.append(len(calls))
        model(torch.cat(batches(1)))

    model, _, ivt = start(probe=probe)
    assert not model._forward_pre_hooks
    assert ivt.end_epoch()
    assert len(calls) == 2
    other, _, automatic = start()
    automatic.end_epoch()
    model.dropout.eval()
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()))


@pytest.mark.parametrize("batchnorm", ["layer", "recalibrate"])
def test_norms_frozen_in_training_keep_their_statistics(batchnorm: str) -> None:
    model, optimizer, ivt = start(batchnorm=batchnorm)
    ivt.abandon_task()
    ivt.begin_task(optimizer, epochs=1)
    model.train()
    model.norm.eval()
    train(model, optimizer, ivt, 1)
    frozen, trained = model.norm.running_mean.clone(), model.second.running_mean.clone()
    assert ivt.end_epoch()
    ivt.end_task()
    assert torch.equal(model.norm.running_mean, frozen)
    assert not torch.equal(model.second.running_mean, trained)
    assert not model.norm.training
    assert model.second.training


def test_a_model_that_is_not_called_itself_is_an_error_that_says_what_to_do() -> None:
    model, optimizer, ivt = start()
    ivt.abandon_task()
    ivt.begin_task(optimizer, epochs=1)
    ivt.interval = 2
    for epoch in range(2):
        model.conv(batches(0)[0]).sum().backward()
        optimizer.step()
        if epoch == 0:
            with pytest.warns(UserWarning, match="call the model itself"):  # before the epoch of the teleport
                ivt.end_epoch()
    with pytest.raises(RuntimeError, match=r"call the model itself.*IVT\(probe=\.\.\.\)"):
        ivt.end_epoch()


def test_a_model_that_is_called_in_a_closure_causes_no_warning() -> None:  # as Lightning does
    model = Net()
    ivt = IVT(model, interval=1, batchnorm="layer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    ivt.begin_task(optimizer, epochs=1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(batches(0)[0]).square().mean()
        loss.backward()
        return float(loss.detach())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
        ivt.end_epoch()


def test_recalibrated_statistics_are_the_averages_of_the_last_batches() -> None:
    model, _, ivt = start(batchnorm="recalibrate")
    ivt.end_epoch()
    ivt.end_task()
    with torch.no_grad():
        inputs = [model.conv(x) for x in batches(1)]
    torch.testing.assert_close(model.norm.running_mean, torch.stack([moments(x)[0] for x in inputs]).mean(0))
    unbiased = [x.transpose(0, 1).flatten(1).var(1) for x in inputs]
    torch.testing.assert_close(model.norm.running_var, torch.stack(unbiased).mean(0))
    assert model.norm.momentum == 0.1


def test_statistics_without_inputs_to_recalibrate_them_are_noticed() -> None:
    model, optimizer, ivt = start(batchnorm="recalibrate")
    ivt.abandon_task()
    ivt.begin_task(optimizer, epochs=1)
    before = model.norm.running_mean.clone()
    model.conv(batches(0)[0]).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="call the model itself"):
        ivt.end_epoch()
    ivt.end_task()
    assert torch.equal(model.norm.running_mean, before)


@pytest.mark.parametrize("kind", ["keyword", "dictionary"])
def test_inputs_of_any_shape_are_remembered(kind: str) -> None:
    class Wrapped(Net):
        def forward(self, x: Any = None, *, images: Any = None) -> Tensor:  # type: ignore[override]
            return super().forward(images if images is not None else x["images"])

    model = Wrapped()
    ivt = IVT(model, interval=1, last="teleport", batchnorm="layer")
    for task in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ivt.begin_task(optimizer, epochs=1)
        for x in batches(task):
            optimizer.zero_grad()
            (model(images=x) if kind == "keyword" else model({"images": x})).square().mean().backward()
            optimizer.step()
        assert ivt.end_epoch() == bool(task)
        ivt.end_task()
