"""Many points a launch, a graph replayed, and one point after the other give the same numbers."""

from __future__ import annotations

import pytest
import torch

from incvec.data import Dataset
from incvec.engine.build import build, grow
from incvec.presets import resolve
from incvec.study.geometry import Points, Rebuilt
from incvec.study.geometry.points import Way

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_both_ways_agree(device: str) -> None:
    """PODNet with ResNet-32 on noise. On a CPU such images go one point after the other, where nobody says."""
    draw = torch.Generator().manual_seed(0)

    def images(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draw)

    norm = ((0.5,) * 3, (0.25,) * 3)
    data = Dataset(
        "cifar100", images(2000), torch.arange(2000) % 100, images(100), torch.arange(100),
        tuple(map(str, range(100))), 4, True, "noise", {"default": norm, "lucir": norm},
    )  # fmt: skip
    config = resolve({"method": "podnet", "dataset": "cifar100", "device": device, "precision": "fp32"})
    where = torch.device(device)
    parts = build(config, data, torch.Generator(where), where)
    for task in parts.tasks:
        grow(parts, task, 0)
    rebuilt = Rebuilt(config, parts, parts.tasks[-1])
    a = rebuilt.state()
    b = {name: tensor * 1.1 for name, tensor in a.items()}
    other: Way = "loop" if device == "cuda" else "vmap"
    chosen, forced = Points(rebuilt, images=2), Points(rebuilt, images=2, way=other)
    found = [each.evaluate([a, b], [(0.75, 0.25), (0.5, 0.5)]) for each in (chosen, forced)]
    assert forced.used == other
    assert chosen.used == ("graph" if device == "cuda" else "loop")
    assert found[0].accuracy == found[1].accuracy or device == "cuda"  # a tie may fall either way there
    torch.testing.assert_close(torch.tensor(found[0].loss), torch.tensor(found[1].loss), rtol=1e-3, atol=1e-4)
