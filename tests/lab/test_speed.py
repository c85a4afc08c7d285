"""How long a path and a plane take at the size of CIFAR-100 with ResNet-32: on a GPU only."""

from __future__ import annotations

import time

import pytest
import torch

from incvec.data import Dataset
from incvec.engine.build import build
from incvec.engine.restore import grow
from incvec.lab import Points, Rebuilt
from incvec.presets import resolve

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def as_large_as_cifar100(device: str, test_images: int = 10_000) -> Rebuilt:
    """PODNet on noise; the weights do not matter for the time."""
    draw = torch.Generator().manual_seed(0)

    def images(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draw)

    norm = ((0.5,) * 3, (0.25,) * 3)
    data = Dataset(
        "cifar100", images(2000), torch.arange(2000) % 100, images(test_images), torch.arange(test_images) % 100,
        tuple(map(str, range(100))), 4, True, "noise", {"default": norm, "lucir": norm},
    )  # fmt: skip
    config = resolve({"method": "podnet", "dataset": "cifar100", "device": device})
    where = torch.device(device)
    parts = build(config, data, torch.Generator(where), where)
    for task in parts.tasks:
        grow(parts, task, 0)
    return Rebuilt(config, parts, parts.tasks[-1])


@pytest.mark.parametrize(("points", "limit"), [(51, 10), (41 * 41, 60)], ids=["path", "plane"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_seconds(device: str, points: int, limit: float) -> None:
    rebuilt = as_large_as_cifar100(device)
    a = rebuilt.state()
    b = {name: tensor + 0.01 for name, tensor in a.items()}
    began = time.monotonic()
    Points(rebuilt).evaluate([a, b], [(1 - x / points, x / points) for x in range(points)])
    taken = time.monotonic() - began
    print(f"{points} points: {taken:.1f} s")
    assert taken < limit


def test_large_images_go_one_by_one_on_a_cpu_and_agree_with_many_at_once() -> None:
    rebuilt = as_large_as_cifar100("cpu", 100)
    a = rebuilt.state()
    b = {name: tensor * 1.1 for name, tensor in a.items()}
    chosen, forced = Points(rebuilt, images=2), Points(rebuilt, images=2, way="vmap")
    found = [each.evaluate([a, b], [(0.75, 0.25), (0.5, 0.5)]) for each in (chosen, forced)]
    assert (chosen.used, forced.used) == ("loop", "vmap")
    assert found[0].accuracy == found[1].accuracy
    torch.testing.assert_close(torch.tensor(found[0].loss), torch.tensor(found[1].loss), rtol=1e-4, atol=1e-5)
