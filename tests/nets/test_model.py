"""The model: growing, copying, and running as a function of stacked weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from incvec.contracts import Output
from incvec.nets import Classifier, CosineHead, Head, LinearHead, ProxyHead, build_backbone

HEADS = [LinearHead, CosineHead, ProxyHead]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(kind: type[Head], seed: int = 0, backbone: str = "tiny") -> Classifier:
    draws = seeded(seed)
    body = build_backbone(backbone, channels=1, generator=draws)
    made = Classifier(body, kind(body.width))
    made.grow(3, draws)
    made.grow(2, draws)
    return made


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 1, 8, 8, generator=seeded(99))


@pytest.mark.parametrize("kind", HEADS)
def test_forward_is_backbone_then_head(kind: type[Head]) -> None:
    net = model(kind).eval()
    out = net(images())
    assert isinstance(out, Output)
    body = net.backbone(images())
    assert all(torch.equal(a, b) for a, b in zip(out.maps, body.maps, strict=True))
    assert torch.equal(out.features, body.features)
    assert torch.equal(out.features, net.features(images()))
    assert torch.equal(out.logits, net.head(body.features))
    assert out.logits.shape == (3, net.n_classes) == (3, 5)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("backbone", ["tiny", "small", "resnet32-lucir", "resnet32-pycil"])
def test_vmap_over_stacked_weights(kind: type[Head], backbone: str) -> None:
    nets = [model(kind, seed, backbone).eval() for seed in range(3)]
    for seed, net in enumerate(nets):  # distinct running statistics too
        net.train()(images() * (seed + 1))
        net.eval()
    parameters, buffers = stack_module_state(nets)
    shape = copy.deepcopy(nets[0])

    def run(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Output:
        return functional_call(shape, (p, b), (x,))  # type: ignore[no-any-return]

    with torch.no_grad():
        out = vmap(run, in_dims=(0, 0, None))(parameters, buffers, images())
        assert out.logits.shape == (3, 3, 5)
        for i, net in enumerate(nets):
            expected = net(images())
            torch.testing.assert_close(out.logits[i], expected.logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(out.features[i], expected.features, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(out.logits[0], out.logits[1])


@pytest.mark.parametrize("kind", HEADS)
def test_functional_call_has_gradients(kind: type[Head]) -> None:
    net = model(kind)
    weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    functional_call(net, weights, (images(),)).logits.square().sum().backward()
    assert all(p.grad is None for p in net.parameters())
    unused = {"head.scale"} if kind is ProxyHead else set()
    assert {name for name, w in weights.items() if w.grad is None} == unused


@pytest.mark.parametrize("kind", HEADS)
def test_gradients_sample_by_sample(kind: type[Head]) -> None:
    net = model(kind).eval()
    weights = {name: p.detach() for name, p in net.named_parameters() if name != "head.scale"}

    def loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
        logits: Tensor = functional_call(net, w, (x[None],)).logits
        return logits.square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(weights, images())
    for i, x in enumerate(images()):
        net.zero_grad()
        net(x[None]).logits.square().sum().backward()
        for name, parameter in net.named_parameters():
            if name in weights:
                torch.testing.assert_close(each[name][i], parameter.grad, rtol=1e-4, atol=1e-5)


def test_gradients_can_be_differentiated_again() -> None:
    net = model(ProxyHead).double()
    x = images().double().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).logits.square().sum(), x, create_graph=True)
    torch.autograd.backward(slope.square().sum())
    assert net.backbone.stem.conv.weight.grad is not None
    assert net.backbone.stem.conv.weight.grad.abs().sum() > 0


def test_a_copy_lives_its_own_life() -> None:
    net = model(ProxyHead)
    net(images()).logits.sum().backward()
    teacher = copy.deepcopy(net).eval()
    before = teacher(images()).logits
    net.grow(2, seeded(5))
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    assert teacher.n_classes == 5
    assert net.n_classes == 7
    assert torch.equal(teacher(images()).logits, before)
    assert set(teacher.state_dict()) < set(net.state_dict())


def test_head_and_features_stay_in_float32_under_autocast() -> None:
    net = model(CosineHead).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(images())
    assert out.maps[0].dtype == torch.bfloat16
    assert (out.features.dtype, out.logits.dtype) == (torch.float32, torch.float32)
    assert torch.equal(out.logits, net.head(out.features))


@pytest.mark.parametrize("kind", HEADS)
def test_one_graph_without_breaks(kind: type[Head]) -> None:
    net = model(kind).eval()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()).logits, net(images()).logits)


def test_a_head_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"7.*8"):
        Classifier(build_backbone("tiny"), LinearHead(7))
