"""Backbones: shapes, counts, where the ReLUs stand, and that nothing draws from the global generator."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.errors import ConfigError
from incvec.nets import BACKBONES, Backbone, Norm, Residual, build_backbone, finer_backbone

SMALL = ["resnet32-rebuffi", "resnet32-lucir", "resnet32-icarl", "resnet32-pycil", "small", "tiny"]
LARGE = [name for name in BACKBONES if name not in SMALL]
SIZES = {
    "resnet18": 64, "resnet18-podnet": 64, "resnet18-lucir": 64, "resnet18-cifar": 16,
    "resnet18-64": 32, "resnet18-64-podnet": 32, "resnet18-64-lucir": 32,
}  # fmt: skip


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(name: str, batch: int = 2, channels: int = 3) -> Tensor:
    size = SIZES.get(name, 8)
    return torch.randn(batch, channels, size, size, generator=seeded(99))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet32-lucir", 466_256),
        ("resnet32-icarl", 466_256),
        ("resnet32-pycil", 463_504),
        ("resnet32-rebuffi", 463_504),
        ("resnet18-cifar", 11_168_832),
        ("resnet18-64", 11_168_832),
        ("resnet18-64-podnet", 11_168_832),
        ("resnet18-64-lucir", 11_168_832),
        ("resnet18", 11_176_512),
        ("resnet18-podnet", 11_176_512),
        ("resnet18-lucir", 11_176_512),
    ],
)
def test_parameter_counts(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count(Backbone(BACKBONES[name])) == parameters


@pytest.mark.parametrize("name", ["resnet18", "resnet18-64", "resnet18-cifar", "resnet32-pycil", "tiny"])
@pytest.mark.parametrize("side", [33, 64])
def test_the_side_of_the_last_maps(name: str, side: int) -> None:
    with torch.device("meta"):
        maps = Backbone(BACKBONES[name])(torch.zeros(1, 3, side, side)).maps
    assert maps[-1].shape[-1] == BACKBONES[name].last_side(side)


@pytest.mark.parametrize(
    ("name", "side", "other"),
    [
        ("resnet18", 224, None),
        ("resnet18", 112, None),  # 4 x 4
        ("resnet18", 96, "resnet18-64"),  # 3 x 3
        ("resnet18-podnet", 64, "resnet18-64-podnet"),
        ("resnet18-lucir", 64, "resnet18-64-lucir"),
        ("resnet18-64", 64, None),
        ("resnet18", 32, "resnet18-cifar"),
        ("resnet18-podnet", 32, "resnet18-64-podnet"),  # 2 x 2, which is more than 1 x 1
        ("small", 8, None),  # 2 x 2, but there is no other
    ],
)
def test_a_network_for_smaller_images(name: str, side: int, other: str | None) -> None:
    assert finer_backbone(name, side) == other


def test_small_networks_are_small() -> None:
    assert 12_000 < count(build_backbone("small", channels=1)) < 20_000
    assert 1_000 < count(build_backbone("tiny", channels=1)) < 2_000


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", BACKBONES)
def test_forward_is_stem_then_stages_then_pool(name: str, training: bool) -> None:
    backbone = build_backbone(name, generator=seeded()).train(training)
    twin = copy.deepcopy(backbone)
    x = images(name)
    with torch.no_grad():
        out = backbone(x)
        h = twin.stem(x)
        assert len(out.maps) == len(twin.stages)
        for i, stage in enumerate(twin.stages):
            before = h.clone()
            h = stage(before)
            # A later stage must not have written into the map it was handed.
            assert torch.equal(out.maps[i], h)
        assert torch.equal(out.features, twin.pool(h))
    assert out.features.shape == (2, backbone.width)
    torch.testing.assert_close(out.features, out.maps[-1].flatten(2).mean(-1))


@pytest.mark.parametrize(
    ("name", "size", "shapes"),
    [
        ("resnet32-rebuffi", 32, [(16, 32), (32, 16), (64, 8), (64, 8)]),
        ("resnet32-lucir", 32, [(16, 32), (32, 16), (64, 8)]),
        ("resnet32-pycil", 32, [(16, 32), (32, 16), (64, 8)]),
        ("resnet18-cifar", 32, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("resnet18-64", 64, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("resnet18-64-podnet", 64, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("resnet18", 224, [(64, 56), (128, 28), (256, 14), (512, 7)]),
        ("small", 8, [(8, 8), (16, 4), (32, 2)]),
        ("tiny", 8, [(4, 8), (8, 4)]),
    ],
)
def test_map_shapes(name: str, size: int, shapes: list[tuple[int, int]]) -> None:
    with torch.device("meta"):
        out = Backbone(BACKBONES[name]).eval()(torch.empty(1, 3, size, size))
    assert [tuple(m.shape) for m in out.maps] == [(1, c, s, s) for c, s in shapes]


def activations(name: str) -> list[list[bool]]:
    """For each block of each stage: whether a ReLU ends it, seen from its output on random input."""
    with torch.random.fork_rng(devices=[]):
        backbone = Backbone(BACKBONES[name]).eval()
    found = []
    for stage in backbone.stages:
        ends = []
        for block in stage.children():
            assert isinstance(block, Residual)
            x = torch.randn(1, block.conv1.in_channels, 4, 4, generator=seeded())
            with torch.no_grad():
                ends.append(bool((block(x) >= 0).all()))
        found.append(ends)
    return found


def test_where_the_relus_stand() -> None:
    assert activations("resnet32-rebuffi") == [[False] * 5, [False] * 5, [False] * 4, [False]]
    assert activations("resnet32-pycil") == [[True] * 5] * 3
    assert activations("resnet32-icarl") == [[True] * 5] * 3
    assert activations("resnet32-lucir") == [[True] * 5, [True] * 5, [True] * 4 + [False]]
    assert activations("resnet18-cifar") == [[True, True]] * 4
    assert activations("resnet18-podnet") == [[True, False]] * 4
    assert activations("resnet18-lucir") == [[True, True]] * 3 + [[True, False]]
    assert activations("resnet18-64") == [[True, True]] * 4
    assert activations("resnet18-64-podnet") == [[True, False]] * 4
    assert activations("resnet18-64-lucir") == [[True, True]] * 3 + [[True, False]]
    assert activations("small") == [[False]] * 3


def restated_block(block: Residual, x: Tensor, option_a: bool, relu: bool) -> Tensor:
    """A down-sampling basic block in eval mode, from its raw tensors."""

    def norm(y: Tensor, n: Norm) -> Tensor:
        assert n.running_mean is not None
        assert n.running_var is not None
        shape = (1, -1, 1, 1)
        scale = n.weight / (n.running_var + 1e-5).sqrt()
        return (y - n.running_mean.view(shape)) * scale.view(shape) + n.bias.view(shape)

    y = norm(F.conv2d(x, block.conv1.weight, stride=2, padding=1), block.norm1).clamp(min=0)
    y = norm(F.conv2d(y, block.conv2.weight, padding=1), block.norm2)
    if option_a:
        half = x[:, :, ::2, ::2]
        y = y + torch.cat((half, torch.zeros_like(half)), 1)
    else:
        shortcut = block.shortcut
        y = y + norm(F.conv2d(x, shortcut.conv.weight, stride=2), shortcut.norm)  # type: ignore[union-attr, arg-type]
    return y.clamp(min=0) if relu else y


@pytest.mark.parametrize(
    ("name", "option_a", "relu"),
    [("resnet32-rebuffi", True, False), ("resnet32-pycil", True, True), ("resnet32-lucir", False, True)],
)
def test_down_sampling_block_by_its_formula(name: str, option_a: bool, relu: bool) -> None:
    block = build_backbone(name, generator=seeded()).eval().stages[1][0]  # type: ignore[index]
    assert isinstance(block, Residual)
    draws = seeded(5)
    for norm in (m for m in block.modules() if isinstance(m, Norm)):
        for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.copy_(torch.rand(tensor.shape, generator=draws) + 0.5)
    x = torch.randn(2, 16, 6, 6, generator=draws)
    with torch.no_grad():
        torch.testing.assert_close(block(x), restated_block(block, x, option_a, relu))


def test_drawn_from_the_generator_and_nothing_else() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = build_backbone("resnet32-lucir", generator=seeded(3))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again = build_backbone("resnet32-lucir", generator=seeded(3))
    other = build_backbone("resnet32-lucir", generator=seeded(4))
    for (name, a), b in zip(first.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, c) in zip(first.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, c) == ("norm" in name), name


def test_without_a_generator_it_is_still_reproducible() -> None:
    state = torch.random.get_rng_state()
    a, b = build_backbone("tiny"), build_backbone("tiny")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(a.stem.conv.weight, b.stem.conv.weight)


def test_initial_values_follow_kaiming_fan_out() -> None:
    backbone = build_backbone("resnet32-lucir", generator=seeded())
    for name, module in backbone.named_modules():
        if isinstance(module, nn.Conv2d):
            expected = math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels))
            n = module.weight.numel()
            assert module.weight.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * n)), name
            assert abs(module.weight.mean().item()) < 4 * expected / math.sqrt(n), name
        elif isinstance(module, Norm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
            assert (module.running_mean == 0).all()  # type: ignore[union-attr]
            assert (module.running_var == 1).all()  # type: ignore[union-attr]


def test_no_batch_counter_anywhere_and_plain_state_loads() -> None:
    backbone = build_backbone("tiny", generator=seeded())
    names = [*backbone.state_dict(), *dict(backbone.named_buffers())]
    assert names
    assert not [name for name in names if "num_batches" in name]
    other = build_backbone("tiny", generator=seeded(1))
    # A plain dictionary, as read from a safetensors file, carries no version metadata.
    other.load_state_dict({k: v.clone() for k, v in backbone.state_dict().items()}, strict=True)
    assert torch.equal(other.stem.conv.weight, backbone.stem.conv.weight)
    state = {k: v for k, v in backbone.state_dict().items() if k != "stem.norm.running_mean"}
    with pytest.raises(RuntimeError, match="running_mean"):
        other.load_state_dict(state)


def test_running_statistics_move_in_training_and_can_be_reset() -> None:
    norm = Norm(1)
    x = torch.tensor([[[[0.0, 2.0]]], [[[4.0, 6.0]]]])  # mean 3, unbiased variance 20 / 3
    norm(x)
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.3]))
    torch.testing.assert_close(norm.running_var, torch.tensor([0.9 + 2 / 3]))
    norm.reset_running_stats()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert (norm.running_mean.item(), norm.running_var.item()) == (0, 1)
    assert norm.num_batches_tracked is None


def test_the_convolutions_are_plain() -> None:
    for name in SMALL:
        backbone = build_backbone(name)
        blocks = [m for m in backbone.modules() if isinstance(m, Residual)]
        assert blocks
        assert all(type(b.conv1) is nn.Conv2d and type(b.conv2) is nn.Conv2d for b in blocks)


@pytest.mark.parametrize("name", ["tiny", "resnet32-lucir"])
def test_one_graph_without_breaks(name: str) -> None:
    backbone = build_backbone(name, generator=seeded())
    twin = copy.deepcopy(backbone)
    compiled = torch.compile(backbone, backend="aot_eager", fullgraph=True)
    x = images(name)
    out, expected = compiled(x), twin(x)
    torch.testing.assert_close(out.features, expected.features)
    out.features.square().sum().backward()
    expected.features.square().sum().backward()
    torch.testing.assert_close(backbone.stem.conv.weight.grad, twin.stem.conv.weight.grad)


def test_features_stay_wide_under_autocast_and_in_double() -> None:
    backbone = build_backbone("tiny", generator=seeded()).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = backbone(images("tiny"))
    assert out.maps[-1].dtype == torch.bfloat16
    assert out.features.dtype == torch.float32
    torch.testing.assert_close(out.features, out.maps[-1].float().mean((2, 3)))
    assert backbone.double()(images("tiny").double()).features.dtype == torch.float64


def test_channels() -> None:
    assert build_backbone("small", channels=1)(images("small", channels=1)).features.shape == (2, 32)
    with pytest.raises(ValueError, match="not 0"):
        build_backbone("small", channels=0)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"'resnet32-rebufi'.*Did you mean 'resnet32-rebuffi'"):
        build_backbone("resnet32-rebufi")


def test_every_backbone_has_a_summary_of_one_line() -> None:
    assert all(plan.summary and "\n" not in plan.summary for plan in BACKBONES.values())
