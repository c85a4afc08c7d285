"""Several processes: DistributedDataParallel ends where one process does; sharded parameters are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from incvec import IVT

from .loops import TORCH, grow, network

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "verbatim": {"exclude": (), "last": "teleport"},
    "own": {"fisher_loss": "own"},
    "layer": {"batchnorm": "layer"},
}


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.fc = nn.Linear(3, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.conv(x)).tanh().mean((2, 3)))


def train_three_tasks(options: str, rank: int | None, wrapped: bool) -> dict[str, torch.Tensor]:
    """A growing head in a new DDP wrapper per task; `wrapped`: whether IVT is given the first one, or the module."""
    rows = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
    net = Net(norm=options == "layer")
    model = net if rank is None else DistributedDataParallel(net)
    ivt = IVT(model if wrapped else net, interval=1, **OPTIONS[options])
    generator = torch.Generator().manual_seed(1)
    for task in range(3):
        if task:
            torch.manual_seed(task)
            net.fc = grow(net.fc, 2)
            model = net if rank is None else DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        ivt.begin_task(optimizer, epochs=3)
        for epoch in range(3):
            for _ in range(3):
                x = torch.randn(8, 1, 5, 5, generator=generator, dtype=torch.float64)
                y = torch.randint(net.fc.out_features, (8,), generator=generator)
                outputs = model(x[rows])
                own = cross_entropy(outputs, y[rows])
                if options == "own" and ivt.collecting:
                    ivt.collect(own)
                optimizer.zero_grad()
                (own + mse_loss(outputs, x[rows].mean((1, 2, 3))[:, None].expand_as(outputs))).backward()
                optimizer.step()
            assert ivt.end_epoch() == (task > 0 and (epoch < 2 or ivt.last == "teleport"))
        ivt.end_task()
    fisher = {f"F/{name}": value for name, value in ivt.cumulative.items()}
    return {**{name: p.detach() for name, p in net.named_parameters()}, **fisher}


CASES = [(options, wrapped) for options in OPTIONS for wrapped in (False, True)]


def one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save([train_three_tasks(options, rank, wrapped) for options, wrapped in CASES], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """The weights and Fishers of all cases, in both processes."""
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.start_processes(one_of_two, (str(folder),), nprocs=2, start_method="spawn")
    return torch.load(folder / "0.pt", weights_only=True), torch.load(folder / "1.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)), ids=map(str, CASES))
def test_two_processes_end_where_one_does(case: int, two_processes: tuple[list[Any], list[Any]]) -> None:
    first, second = (results[case] for results in two_processes)
    assert first["fc.weight"].shape == (6, 3)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    options, wrapped = CASES[case]
    if options != "layer":  # BatchNorm normalizes with the batch of each process
        torch.testing.assert_close(first, train_three_tasks(options, None, wrapped), rtol=1e-12, atol=0)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def refused(model: nn.Module) -> None:
    ivt = IVT(model)
    with pytest.raises(TypeError, match=r"sharded parameters \(FSDP, DTensor\), which IVT does not support"):
        ivt.begin_task(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not ivt.in_task
    assert ivt.task == 0


@pytest.mark.skipif(TORCH < (2, 6), reason="fully_shard is public since torch 2.6")
def test_parameters_of_fully_shard_are_refused(one_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    refused(model)


@pytest.mark.skipif(TORCH < (2, 6), reason="torch.distributed.tensor is public since torch 2.5")
def test_dtensors_are_refused(one_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    refused(distribute_module(network(), init_device_mesh("cpu", (1,))))


@pytest.mark.skipif(TORCH < (2, 4), reason="older FSDP needs a GPU")
@pytest.mark.parametrize("original", [False, True])
def test_fully_sharded_data_parallel_is_refused(one_process: None, original: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device("cpu")
    refused(FullyShardedDataParallel(network(), device_id=device, use_orig_params=original))
    inside = nn.Sequential(FullyShardedDataParallel(network(), device_id=device, use_orig_params=original))
    refused(inside)
