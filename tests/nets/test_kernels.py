"""Our kernels against torch's operators: exactly or nearly, in Triton's interpreter; and on a GPU."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import ConfigError
from incvec.nets import Backbone, build_backbone, kernels
from incvec.nets.kernels import blocks, launch
from incvec.nets.kernels.launch import Sums, Tiles
from incvec.nets.resnet import Residual, Stem
from tests.conftest import make_run, quick

SOURCE = Path(__file__).parents[2] / "src"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SHAPES = [(16, 16, 32), (32, 32, 16), (64, 64, 8)]
LAST = torch.channels_last


@pytest.fixture
def switch() -> Iterator[None]:
    before = blocks._enabled
    yield
    kernels.enable(before)


def interpret(code: str) -> None:
    """Run the code where Triton interprets: it must know before it is imported, so in a process of its own."""
    header = """
        import copy, torch, torch.nn.functional as F
        from incvec.nets import kernels
        from incvec.nets.kernels import blocks, launch
        from incvec.nets.kernels.launch import Masked, Normed, Sums, Tiles
        from incvec.nets.resnet import Norm, Residual, Stem
        torch.set_num_threads(1)
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(5)
        last = torch.channels_last

        def whole(shape, bound, dtype=torch.float32):
            # Products and sums of these are exact in every format used, bfloat16 results up to 256 included.
            numbers = torch.randint(-bound, bound + 1, shape, generator=draw).to(dtype)
            return numbers.to(memory_format=last)

        def expected(x, w, g, stride=1):
            x, w = x.float().requires_grad_(), w.float().requires_grad_()
            y = F.conv2d(x, w, padding=1, stride=stride)
            assert y.abs().max() <= 256 and y.abs().max() > 5
            return y.detach(), *torch.autograd.grad(y, (x, w), g.float())

        def far(found, wanted):
            return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(header) + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_products_are_those_of_conv2d() -> None:
    interpret("""
        cases = [
            (2, 16, 16, 8, 8, 1, last), (3, 16, 32, 5, 7, 1, torch.contiguous_format), (1, 32, 16, 4, 4, 1, last),
            (1, 64, 64, 8, 8, 1, last), (1, 64, 16, 1, 3, 1, torch.contiguous_format),
            (2, 16, 32, 8, 6, 2, last), (1, 32, 64, 4, 4, 2, torch.contiguous_format),
        ]
        for n, inputs, outputs, height, width, stride, layout in cases:
            x = whole((n, inputs, height, width), 2, torch.bfloat16)
            w = whole((outputs, inputs, 3, 3), 1).contiguous(memory_format=layout)
            g = whole((n, outputs, height // stride, width // stride), 1, torch.bfloat16)
            y_, to_x_, to_w_ = expected(x, w, g, stride)
            y = launch.product(x, w, stride=stride)[0]
            to_x = launch.product(g, w, stride=stride, mirror=True)[0]
            to_w = launch.to_weight(x, g, w, stride=stride)
            assert y.dtype == torch.bfloat16 and torch.equal(y.float(), y_)
            assert to_x.dtype == torch.bfloat16 and torch.equal(to_x.float(), to_x_)
            assert to_w.dtype == torch.float32 and to_w.stride() == w.stride() and torch.equal(to_w, to_w_)
    """)


@needs_triton
def test_every_way_to_cut_the_work_gives_the_same() -> None:
    interpret("""
        n, c, side = 2, 16, 5
        x, g = whole((n, c, side, side), 2, torch.bfloat16), whole((n, c, side, side), 1, torch.bfloat16)
        w = whole((c, c, 3, 3), 1)
        y_, to_x_, to_w_ = expected(x, w, g)
        for group in (1, 3):
            for stages in (0, 2):
                for pixels in (32, 64):
                    cut = Tiles(pixels, 16, group, stages, 4)
                    assert torch.equal(launch.product(x, w, tiles=cut)[0].float(), y_), cut
                    assert torch.equal(launch.product(g, w, mirror=True, tiles=cut)[0].float(), to_x_), cut
            for tiles in (1, 3):
                for pixels, parts in ((16, 3), (32, 100)):
                    cut = Sums(pixels, 16, group, tiles, parts, 2, 4)
                    assert torch.equal(launch.to_weight(x, g, w, sums=cut), to_w_), cut
        x, w = whole((1, 64, 18, 18), 2, torch.bfloat16), whole((64, 64, 3, 3), 1)
        g = whole((1, 64, 18, 18), 1, torch.bfloat16)
        many = Sums(16, 64, 3, 1, 21, 2, 4)  # more parts than are added at once
        assert torch.equal(launch.to_weight(x, g, w, sums=many), expected(x, w, g)[2])
    """)


@needs_triton
def test_images_of_few_channels_in_any_layout() -> None:
    interpret("""
        for channels, layout in ((3, last), (3, torch.contiguous_format), (1, last)):
            x = whole((2, channels, 6, 5), 3).contiguous(memory_format=layout)
            w, g = whole((16, channels, 3, 3), 2), whole((2, 16, 6, 5), 1, torch.bfloat16)
            y_, _, to_w_ = expected(x, w, g)
            assert torch.equal(launch.product(x, w)[0].float(), y_)
            assert torch.equal(launch.to_weight(x, g, w), to_w_)
    """)


@needs_triton
def test_moments_of_uneven_parts_are_the_whole_maps() -> None:
    interpret("""
        norm = Norm(16)
        norm.running_mean.fill_(2.0)
        x, w = whole((3, 16, 5, 7), 2, torch.bfloat16), whole((16, 16, 3, 3), 1)
        z, parts, rows = launch.product(x, w, moments=True, tiles=Tiles(32, 16, 1, 0, 4))
        assert len(parts) == 4 and 3 * 5 * 7 % 32 != 0
        found = launch.merge_moments(parts, rows, z, norm)
        flat = z.double().transpose(0, 1).flatten(1)
        torch.testing.assert_close(found[0].double(), flat.mean(1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[1].double(), (flat.var(1, unbiased=False) + 1e-5).rsqrt(), rtol=1e-6, atol=0)
        torch.testing.assert_close(norm.running_mean.double(), 1.8 + 0.1 * flat.mean(1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(norm.running_var.double(), 0.9 + 0.1 * flat.var(1), rtol=1e-6, atol=1e-6)
    """)


@needs_triton
def test_a_block_and_all_its_gradients() -> None:
    """Against float64: what is left is bfloat16's rounding, which a ReLU at the end can turn into a flipped mask."""
    interpret("""
        cases = ((16, 16, 1, True, 2, 8, 8), (16, 16, 1, False, 3, 5, 7), (16, 32, 2, True, 2, 8, 8),
                 (32, 64, 2, False, 1, 8, 4), (64, 64, 1, False, 1, 4, 8))
        for inputs, outputs, stride, relu, n, height, width in cases:
            torch.manual_seed(0)
            block = Residual(inputs, outputs, stride, "pad", relu).to(memory_format=last)
            for norm in (block.norm1, block.norm2):
                norm.weight.data.uniform_(0.5, 1.5, generator=draw)
                norm.bias.data.normal_(0, 0.3, generator=draw)
            for conv in (block.conv1, block.conv2):
                conv.weight.data = conv.weight.data.bfloat16().float()
            exact = copy.deepcopy(block).double()
            x = torch.randn(n, inputs, height, width, generator=draw).bfloat16().contiguous(memory_format=last)
            x.requires_grad_()
            x_ = x.detach().double().requires_grad_()
            other = None if stride == 1 else block.shortcut(x)
            y = blocks.BlockFunction.apply(
                block, x, other, block.conv1.weight, block.norm1.weight, block.norm1.bias,
                block.conv2.weight, block.norm2.weight, block.norm2.bias)
            y_ = exact.plain(x_)
            g = torch.randn(y.shape, generator=draw).bfloat16()
            names = ["x", *(name for name, _ in block.named_parameters())]
            found = torch.autograd.grad(y, [x, *block.parameters()], g)
            wanted = torch.autograd.grad(y_, [x_, *exact.parameters()], g.double())
            assert far(y, y_) < 0.006
            bound = 0.06 if relu else 0.012
            for name, a, b in zip(names, found, wanted, strict=True):
                assert far(a, b) < bound, (name, far(a, b))
            for a, b in zip(found[1:], block.parameters(), strict=True):
                assert a.dtype == b.dtype and a.stride() == b.stride()
            for (name, a), b in zip(block.named_buffers(), exact.buffers(), strict=True):
                assert far(a, b) < 0.01, name
            block.eval(), exact.eval()
            with torch.no_grad():
                one = kernels.infer_block(block, x, x if other is None else other)
                assert far(one, exact.plain(x_)) < 0.006
    """)


@needs_triton
def test_a_stem_and_its_gradients() -> None:
    interpret("""
        stem = Stem(3, 16, "3x3").to(memory_format=last)
        stem.conv.weight.data = stem.conv.weight.data.bfloat16().float()
        exact = copy.deepcopy(stem).double()
        x = torch.randn(3, 3, 8, 6, generator=draw).bfloat16().float()
        y = blocks.StemFunction.apply(stem, x, stem.conv.weight, stem.norm.weight, stem.norm.bias)
        y_ = exact.plain(x.double())
        g = torch.randn(y.shape, generator=draw).bfloat16()
        found = torch.autograd.grad(y, list(stem.parameters()), g)
        wanted = torch.autograd.grad(y_, list(exact.parameters()), g.double())
        assert far(y, y_) < 0.006
        assert all(far(a, b) < 0.06 for a, b in zip(found, wanted, strict=True))
        assert all(far(a, b) < 0.01 for a, b in zip(stem.buffers(), exact.buffers(), strict=True))
    """)


def test_only_on_and_off_are_known() -> None:
    assert kernels.allowed({})
    assert kernels.allowed({kernels.VARIABLE: "on"})
    assert not kernels.allowed({kernels.VARIABLE: "off"})
    with pytest.raises(ConfigError, match="'of' is not valid: expected on or off"):
        kernels.allowed({kernels.VARIABLE: "of"})


def test_a_run_refuses_another_value(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "of")
    with pytest.raises(ConfigError, match="expected on or off"):
        finish(make_run(few, tmp_path / "run", quick("finetune")))


@needs_triton
def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = "from incvec.nets import kernels; import sys; print('incvec.nets.kernels.conv' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"


def test_on_a_cpu_torchs_operators_are_used() -> None:
    block = Residual(16, 16, 1, "pad", True)
    assert kernels.block(block, torch.zeros(1, 16, 4, 4, dtype=torch.bfloat16)) is None
    assert kernels.stem(Stem(3, 16, "3x3"), torch.zeros(1, 3, 4, 4)) is None


@pytest.mark.parametrize(
    ("channels", "out", "side", "stride", "suits"),
    [
        (16, 16, 32, 1, True),  # ResNet-32, its stages and what leads from one to the next
        (16, 32, 32, 2, True),
        (32, 32, 16, 1, True),
        (32, 64, 16, 2, True),
        (64, 64, 8, 1, True),
        (3, 16, 32, 1, True),
        (64, 64, 32, 1, False),  # ResNet-18 at 64 pixels, and for CIFAR
        (3, 64, 32, 1, False),
        (64, 64, 56, 1, False),  # at 224
        (16, 32, 15, 2, False),
    ],
)
def test_maps_larger_than_resnet32s_are_left_to_cudnn(
    channels: int, out: int, side: int, stride: int, suits: bool
) -> None:
    conv = torch.nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
    assert blocks._fits(torch.zeros(1, channels, side, side), conv) is suits


def test_every_cut_in_the_tables_is_possible() -> None:
    for table in (launch.FORWARD, launch.TO_INPUT):
        for (_, outputs, _, _), tiles in table.items():
            assert outputs % tiles.channels == 0
            assert tiles.group in (1, 3)
    for (_, outputs, _, _), sums in launch.TO_WEIGHT.items():
        assert outputs % sums.channels == 0
        assert (sums.group, sums.tiles) in {(1, 1), (1, 3), (3, 1), (3, 3)}
    assert isinstance(launch.tiles_for((16, 64, 5, 5), False), Tiles)
    assert isinstance(launch.sums_for((64, 16, 5, 5), 1), Sums)


# On a GPU -------------------------------------------------------------------------------------------------

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def problem(batch: int, inputs: int, outputs: int, side: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(batch, inputs, side, side, generator=draw).cuda().bfloat16()
    w = (torch.randn(outputs, inputs, 3, 3, generator=draw) / (9 * inputs) ** 0.5).cuda()
    g = torch.randn(batch, outputs, side // stride, side // stride, generator=draw).cuda().bfloat16()
    return x.to(memory_format=LAST), w.to(memory_format=LAST), g.to(memory_format=LAST)


def far(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("batch", [128, 37])
    @pytest.mark.parametrize(
        ("inputs", "outputs", "side", "stride"),
        [(16, 16, 32, 1), (32, 32, 16, 1), (64, 64, 8, 1), (16, 32, 32, 2), (32, 64, 16, 2), (3, 16, 32, 1)],
    )
    def test_as_near_to_the_truth_as_cudnn(self, batch: int, inputs: int, outputs: int, side: int, stride: int) -> None:
        x, w, g = problem(batch, inputs, outputs, side, stride)
        exact = [t.double().requires_grad_() for t in (x, w.bfloat16())]
        y = F.conv2d(exact[0], exact[1], padding=1, stride=stride)
        truth = (y, *torch.autograd.grad(y, exact, g.double()))
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        with torch.autocast("cuda", torch.bfloat16):
            theirs = F.conv2d(leaves[0], leaves[1], padding=1, stride=stride)
        cudnn = (theirs, *torch.autograd.grad(theirs, leaves, g))
        ours = [launch.product(x, w, stride=stride)[0], None, launch.to_weight(x, g, w, stride=stride)]
        if inputs >= 16:
            ours[1] = launch.product(g, w, stride=stride, mirror=True)[0]
        for found, reference, wanted in zip(ours, cudnn, truth, strict=True):
            if found is not None:
                assert far(found, wanted) < 1.2 * far(reference, wanted) + 1e-5
        assert ours[2] is not None
        assert far(ours[2], truth[2]) < 1e-4  # float32 sums of exact products: nearer than cuDNN's rounded ones
        assert torch.equal(ours[2], launch.to_weight(x, g, w, stride=stride))

    def test_large_maps_are_left_alone(self) -> None:
        block = Residual(64, 64, 1, "conv", True).cuda().to(memory_format=LAST)
        for side, ours in ((8, True), (32, False), (56, False)):
            x = torch.zeros(2, 64, side, side, device="cuda", dtype=torch.bfloat16).to(memory_format=LAST)
            assert (kernels.block(block, x) is not None) == ours

    @pytest.mark.parametrize("training", [True, False])
    def test_the_network_is_as_near_to_float32_as_torchs_own(self, training: bool, switch: None) -> None:
        net = build_backbone("resnet32-rebuffi").cuda().to(memory_format=LAST).train(training)
        images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(2)).cuda()
        images = images.to(memory_format=LAST)

        def run(on: bool, bf16: bool) -> tuple[Tensor, Tensor, Tensor]:
            kernels.enable(on)
            model = copy.deepcopy(net)
            with torch.set_grad_enabled(training), torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                out: Tensor = model(images).features
            found = torch.autograd.grad(out.square().mean(), list(model.parameters())) if training else (out,)
            buffers = torch.cat([b.flatten() for b in model.buffers()])
            return out.detach(), torch.cat([t.flatten() for t in found]), buffers

        ours, torchs, truth = run(True, True), run(False, True), run(False, False)
        for mine, other, wanted in zip(ours, torchs, truth, strict=True):
            assert far(mine, wanted) < 1.3 * far(other, wanted) + 1e-3

    def test_used_where_it_suits_and_nowhere_else(self, switch: None, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[int, ...]] = []
        real = launch.product

        def listen(x: Tensor, weight: Tensor, **rest: object) -> object:
            seen.append(tuple(weight.shape[:2]))
            return real(x, weight, **rest)  # type: ignore[arg-type]

        monkeypatch.setattr(launch, "product", listen)
        net: Backbone = build_backbone("resnet32-rebuffi").cuda().to(memory_format=LAST)
        images = torch.randn(2, 3, 32, 32).cuda()
        net(images)
        assert seen == []  # float32 maps
        for mode in (True, False):
            seen.clear()
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                net.train(mode)(images)
            assert len(seen) == 31
        seen.clear()
        with torch.autocast("cuda", torch.bfloat16):
            net.eval()(images)  # running statistics with gradients
        assert seen == []
        net.train()
        assert isinstance(net.stages[0][0], nn.Module)
        net.stages[0][0].conv1.register_forward_hook(lambda *_: None)
        with torch.autocast("cuda", torch.bfloat16):
            net(images)
        assert len(seen) == 29
