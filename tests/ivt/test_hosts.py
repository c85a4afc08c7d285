"""IVT beside GradScaler, DistributedDataParallel, CUDA graphs and other people's trainers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from incvec import IVT

from .loops import TORCH

SCALE = 1024.0


def train_scaled(fused: bool, kind: type[torch.optim.Optimizer], poison: int | None, unscale: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    ivt = IVT.verbatim(model)
    ivt.begin_task(optimizer)
    squares = []
    generator = torch.Generator().manual_seed(1)
    for i in range(4):
        x = torch.randn(5, 3, generator=generator)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        true = torch.autograd.grad(loss, model.weight, retain_graph=True)[0]
        scaler.scale(loss).backward()
        if i == poison:
            model.weight.grad[0, 0] = float("inf")
        else:
            squares.append(true**2)
        if unscale:
            scaler.unscale_(optimizer)
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        assert torch.equal(model.weight, before) == (i == poison)
        scaler.update()
    ivt.end_epoch()
    return ivt.fisher["weight"], torch.stack(squares).mean(0), ivt.core.fisher.counts()["weight"].item()


@pytest.mark.skipif(TORCH < (2, 4), reason="torch 2.4 is the first with fused optimizers on a CPU")
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("poison", [None, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_leaves_true_gradients_and_skipped_steps_out(
    fused: Any, kind: Any, poison: Any, unscale: Any
) -> None:
    got, want, steps = train_scaled(fused, kind, poison, unscale)
    torch.testing.assert_close(got, want)
    assert steps == (4 if poison is None else 3)


def train_two_tasks(model: nn.Module, rows: slice) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ivt = IVT.verbatim(model, interval=1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        ivt.begin_task(optimizer)
        for _ in range(3):
            x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(x[rows]).square().mean().backward()
            optimizer.step()
        ivt.end_epoch()
        ivt.end_task()
    return {**ivt.core.model.state_dict(), **{f"F/{name}": value for name, value in ivt.cumulative.items()}}


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def train_distributed(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(small_network())
    torch.save(train_two_tasks(model, slice(4 * rank, 4 * rank + 4)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_with_ddp_end_where_one_does(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(train_distributed, (str(tmp_path),), nprocs=2, start_method="spawn")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = train_two_tasks(small_network(), slice(None))
    assert "F/0.weight" in alone
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, alone)


def test_the_plugin_imports_torch_and_nothing_else_of_the_package() -> None:
    code = (
        "import sys; from incvec import IVT; "
        "rooms = sorted({m.split('.')[1] for m in sys.modules if m.startswith('incvec.')}); "
        "others = ('torchvision', 'pydantic', 'safetensors', 'sklearn', 'lightning', 'transformers'); "
        "print(rooms, [m for m in others if m in sys.modules])"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(source)}
    )
    assert done.stdout.strip() == "['ivt', 'lazy'] []"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("structure", ["diagonal", "kernel"])
def test_a_captured_step_accumulates_without_synchronizing(structure: str) -> None:
    def run(captured: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).cuda()
        ivt = IVT.verbatim(model, interval=1, structure=structure)
        x = torch.zeros(4, 2, 4, 4, device="cuda")
        data = torch.randn(2, 2, 5, 4, 2, 4, 4, generator=torch.Generator().manual_seed(1)).cuda()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad.zero_()
            model(x).square().mean().backward()
            ivt.core.accumulate((p, p.grad) for p in model.parameters())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)

        for task in range(2):
            ivt.begin_task()
            graph = torch.cuda.CUDAGraph()
            if captured:
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    step()
                torch.cuda.current_stream().wait_stream(side)
                with torch.cuda.graph(graph):
                    step()
                model.load_state_dict(saved)
            torch.cuda.synchronize()
            if structure == "diagonal":  # the batched solver of the blocks may wait as it likes
                torch.cuda.set_sync_debug_mode("error")
            try:
                for epoch in range(2):
                    ivt.begin_epoch()
                    for i in range(5):
                        x.copy_(data[task, epoch, i])
                        graph.replay() if captured else step()
                    ivt.end_epoch()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            ivt.end_task()
        return {**model.state_dict(), **{f"F/{n}": v for n, v in ivt.cumulative.items()}}

    torch.testing.assert_close(run(True), run(False))
