"""Our convolution kernels against torch's: exactly, on small whole numbers, in Triton's interpreter; and on a GPU."""

from __future__ import annotations

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

from incvec.nets import Backbone, build_backbone, kernels
from incvec.nets.kernels import Sums, Tiles

SOURCE = Path(__file__).parents[2] / "src"
NO_TRITON = importlib.util.find_spec("triton") is None
SHAPES = [(16, 16, 32), (32, 32, 16), (64, 64, 8)]


@pytest.fixture
def switched_on() -> Iterator[None]:
    before = kernels.enabled()
    kernels.enable()
    yield
    kernels.enable(before)


def interpret(code: str) -> None:
    """Run the code where Triton interprets: it must know before it is imported, so in a process of its own."""
    header = """
        import torch, torch.nn.functional as F
        from incvec.nets import kernels
        from incvec.nets.kernels import Sums, Tiles
        torch.set_num_threads(1)
        draw = torch.Generator().manual_seed(5)
        last = torch.channels_last

        def whole(shape, bound, dtype=torch.float32):
            # Products and sums of these are exact in every format used, bfloat16 results up to 256 included.
            numbers = torch.randint(-bound, bound + 1, shape, generator=draw).to(dtype)
            return numbers.to(memory_format=last)

        def expected(x, w, g):
            x, w = x.float().requires_grad_(), w.float().requires_grad_()
            y = F.conv2d(x, w, padding=1)
            assert y.abs().max() <= 256 and y.abs().max() > 5
            return y.detach(), *torch.autograd.grad(y, (x, w), g.float())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(header) + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(NO_TRITON, reason="needs triton")
def test_the_operator_and_its_gradients_are_those_of_conv2d() -> None:
    interpret("""
        cases = [
            (2, 16, 16, 8, 8, last), (3, 16, 32, 5, 7, torch.contiguous_format), (1, 32, 16, 4, 4, last),
            (1, 32, 32, 16, 16, last), (1, 64, 64, 8, 8, last), (1, 64, 16, 1, 3, torch.contiguous_format),
        ]
        for n, inputs, outputs, height, width, layout in cases:
            x = whole((n, inputs, height, width), 2, torch.bfloat16).requires_grad_()
            w = whole((outputs, inputs, 3, 3), 1).contiguous(memory_format=layout).requires_grad_()
            y = kernels.conv3x3(x, w)
            g = whole(tuple(y.shape), 1, torch.bfloat16)
            to_x, to_w = torch.autograd.grad(y, (x, w), g)
            y_, to_x_, to_w_ = expected(x.detach(), w.detach(), g)
            assert y.dtype == torch.bfloat16 and torch.equal(y.float(), y_)
            assert to_x.dtype == torch.bfloat16 and torch.equal(to_x.float(), to_x_)
            assert to_w.dtype == torch.float32 and to_w.stride() == w.stride() and torch.equal(to_w, to_w_)
    """)


@pytest.mark.skipif(NO_TRITON, reason="needs triton")
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
                    assert torch.equal(kernels.launch_product(x, w, False, cut).float(), y_), cut
                    assert torch.equal(kernels.launch_product(g, w, True, cut).float(), to_x_), cut
            for tiles in (1, 3):
                for pixels, parts in ((16, 3), (32, 100)):
                    cut = Sums(pixels, 16, group, tiles, parts, 2, 4)
                    assert torch.equal(kernels.launch_sums(x, g, w, cut), to_w_), cut
        x, w = whole((1, 32, 4, 4), 2, torch.bfloat16), whole((64, 32, 3, 3), 1)
        g = whole((1, 64, 4, 4), 1, torch.bfloat16)
        y_, to_x_, to_w_ = expected(x, w, g)
        assert torch.equal(kernels.launch_product(x, w, False, Tiles(16, 32, 1, 2, 4)).float(), y_)
        assert torch.equal(kernels.launch_product(g, w, True, Tiles(16, 16, 1, 2, 4)).float(), to_x_)
        assert torch.equal(kernels.launch_sums(x, g, w, Sums(16, 16, 3, 1, 1, 2, 4)), to_w_)
        x, w = whole((1, 64, 18, 18), 2, torch.bfloat16), whole((64, 64, 3, 3), 1)
        g = whole((1, 64, 18, 18), 1, torch.bfloat16)
        many = Sums(16, 64, 3, 1, 21, 2, 4)  # more parts than are added at once
        assert torch.equal(kernels.launch_sums(x, g, w, many), expected(x, w, g)[2])
    """)


@pytest.mark.skipif(NO_TRITON, reason="needs triton")
def test_the_operator_keeps_torchs_rules() -> None:
    interpret("""
        for layout in (last, torch.contiguous_format):
            x = whole((1, 16, 4, 4), 2, torch.bfloat16).requires_grad_()
            w = whole((32, 16, 3, 3), 1).contiguous(memory_format=layout).requires_grad_()
            tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
            torch.library.opcheck(kernels.conv3x3, (x, w), test_utils=tests)
        x.requires_grad_(False)
        kernels.conv3x3(x, w).float().sum().backward()
        assert x.grad is None and w.grad is not None
        half = w.detach().bfloat16().requires_grad_()
        kernels.conv3x3(x, half).float().sum().backward()
        assert half.grad.dtype == torch.bfloat16 and torch.equal(half.grad.float(), w.grad)

        def run(x, w):
            return torch.relu(kernels.conv3x3(x, w) * 2).float().square().mean()

        slow = torch.autograd.grad(run(x, w), w)[0]
        fast = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(x, w), w)[0]
        assert torch.equal(slow, fast)
    """)


def test_what_does_not_fit_is_refused_with_a_hint() -> None:
    x = torch.zeros(1, 16, 4, 4)
    with pytest.raises(ValueError, match=r"bfloat16 maps.*conv2d"):
        kernels.conv3x3(x, torch.zeros(16, 16, 3, 3))
    with pytest.raises(ValueError, match="not 3 channels in"):
        kernels.conv3x3(x[:, :3].bfloat16(), torch.zeros(16, 3, 3, 3))


def test_switched_off_unless_asked() -> None:
    assert not kernels.asked({})
    assert not kernels.asked({kernels.VARIABLE: "cudnn"})
    assert kernels.asked({kernels.VARIABLE: "triton"})
    with pytest.raises(ValueError, match="'tritn' is not known: give triton, cudnn or nothing"):
        kernels.asked({kernels.VARIABLE: "tritn"})


@pytest.mark.skipif(NO_TRITON, reason="needs triton")
def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = "from incvec.nets import kernels; import sys; print(kernels.enabled(), 'triton' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), kernels.VARIABLE: "triton"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "True False"


@pytest.mark.skipif(NO_TRITON, reason="needs triton")
def test_on_a_cpu_the_switch_changes_nothing(switched_on: None) -> None:
    net = build_backbone("small", channels=1)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    on = net(x).features
    kernels.enable(False)
    torch.testing.assert_close(net(x).features, on, rtol=0, atol=0)


def test_every_cut_in_the_tables_is_possible() -> None:
    for table in (kernels.FORWARD, kernels.TO_INPUT):
        for (_, outputs, _, _), tiles in table.items():
            assert outputs % tiles.channels == 0
            assert tiles.group in (1, 3)
    for (_, outputs, _, _), sums in kernels.TO_WEIGHT.items():
        assert outputs % sums.channels == 0
        assert (sums.group, sums.tiles) in {(1, 1), (1, 3), (3, 1), (3, 3)}
    assert isinstance(kernels.tiles_for((16, 64, 5, 5), False), Tiles)
    assert isinstance(kernels.sums_for((64, 16, 5, 5)), Sums)


# On a GPU -------------------------------------------------------------------------------------------------

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def problem(batch: int, inputs: int, outputs: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(batch, inputs, side, side, generator=draw).cuda().bfloat16()
    w = (torch.randn(outputs, inputs, 3, 3, generator=draw) / (9 * inputs) ** 0.5).cuda()
    g = torch.randn(batch, outputs, side, side, generator=draw).cuda().bfloat16()
    last = torch.channels_last
    return x.to(memory_format=last), w.to(memory_format=last), g.to(memory_format=last)


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("batch", [128, 37])
    @pytest.mark.parametrize(("inputs", "outputs", "side"), [*SHAPES, (16, 64, 9), (64, 32, 12)])
    def test_as_near_to_the_truth_as_cudnn(self, batch: int, inputs: int, outputs: int, side: int) -> None:
        x, w, g = problem(batch, inputs, outputs, side)
        exact = [t.double().requires_grad_() for t in (x, w.bfloat16())]
        y = F.conv2d(exact[0], exact[1], padding=1)
        truth = (y, *torch.autograd.grad(y, exact, g.double()))
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        mine = kernels.conv3x3(*leaves)
        ours = (mine, *torch.autograd.grad(mine, leaves, g))
        with torch.autocast("cuda", torch.bfloat16):
            theirs = F.conv2d(leaves[0], leaves[1], padding=1)
        cudnn = (theirs, *torch.autograd.grad(theirs, leaves, g))
        for found, reference, wanted in zip(ours, cudnn, truth, strict=True):
            assert far(found, wanted) < 1.2 * far(reference, wanted) + 1e-5
        assert far(ours[2], truth[2]) < 1e-4  # float32 sums of exact products: nearer than cuDNN's rounded ones
        again = torch.autograd.grad(kernels.conv3x3(*leaves), leaves, g)
        assert all(torch.equal(a, b) for a, b in zip(ours[1:], again, strict=True))

    def test_compiled_backbone_agrees(self, switched_on: None) -> None:
        net = build_backbone("resnet32-rebuffi").cuda().to(memory_format=torch.channels_last)
        images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(2)).cuda()
        images = images.to(memory_format=torch.channels_last)

        def gradients(run: nn.Module) -> tuple[Tensor, list[Tensor]]:
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                out: Tensor = run(images).features
            return out.detach(), list(torch.autograd.grad(out.square().mean(), list(net.parameters())))

        ours = gradients(torch.compile(net, dynamic=False, fullgraph=True))  # type: ignore[arg-type]
        kernels.enable(False)
        torch._dynamo.reset()
        theirs = gradients(net)
        assert far(ours[0], theirs[0]) < 0.02
        both = zip(net.parameters(), ours[1], theirs[1], strict=True)
        for parameter, mine, other in both:
            assert mine.dtype == torch.float32
            assert mine.stride() == parameter.stride()
            assert far(mine, other) < 0.25  # thirty layers of bfloat16 rounding, twice over
        flat = [torch.cat([t.flatten() for t in side]) for side in (ours[1], theirs[1])]
        assert far(*flat) < 0.1

    @pytest.mark.parametrize("shape", SHAPES)
    def test_in_a_captured_graph(self, shape: tuple[int, int, int]) -> None:
        x, w, g = problem(128, *shape)
        x.requires_grad_()
        w.requires_grad_()

        def step() -> tuple[Tensor, ...]:
            y = kernels.conv3x3(x, w)
            return (y, *torch.autograd.grad(y, (x, w), g))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = step()
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                w.copy_(torch.randn_like(w))
            for tensor in captured:
                tensor.detach().fill_(float("nan"))
            graph.replay()
            expected = step()
            torch.cuda.current_stream().synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))

    def test_used_where_it_suits_and_nowhere_else(self, switched_on: None, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        real = kernels.conv3x3
        monkeypatch.setattr(kernels, "conv3x3", lambda x, w: (seen.append(w.shape[0]), real(x, w))[1])
        net: Backbone = build_backbone("resnet32-rebuffi").cuda().to(memory_format=torch.channels_last)
        images = torch.randn(2, 3, 32, 32).cuda()
        net(images)
        assert seen == []  # float32 maps
        with torch.autocast("cuda", torch.bfloat16):
            net(images)
        assert (seen.count(16), seen.count(32), seen.count(64)) == (10, 9, 9)  # not the stem, not the strided
