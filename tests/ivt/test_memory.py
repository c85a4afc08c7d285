"""The anchor and Fbar in host memory: the same bits as on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from incvec import IVT

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")]),
]


def build(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2), nn.Linear(2, 2).double())
    return layers.to(device).to(memory_format=torch.channels_last)


def run(memory: str, device: str, structure: str, stop: int | None = None) -> tuple[dict[str, Tensor], IVT]:
    """Three tasks of two epochs, the head growing in place; at `stop` steps everything is loaded anew."""
    model = build(device)
    ivt = IVT.verbatim(model, interval=1, structure=structure, memory=memory)  # type: ignore[arg-type]
    count = 0
    for task in range(3):
        if task == 1:
            head = nn.Linear(8, 3).to(device)
            with torch.no_grad():
                head.weight[:2], head.bias[:2] = model[2].weight, model[2].bias  # type: ignore[arg-type]
                head.weight[2:], head.bias[2:] = 0.5, 0.1
            model[2] = head
        ivt.begin_task()
        for _ in range(2):
            for _ in range(2):
                count += 1
                if count == stop:
                    saved = ivt.state_dict()
                    ivt = IVT.verbatim(model, interval=1, structure=structure, memory=memory)  # type: ignore[arg-type]
                    ivt.load_state_dict(saved)
                generator = torch.Generator().manual_seed(count)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                        parameter
                    )
                ivt.core.accumulate()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= 0.1 * parameter.grad
            ivt.end_epoch()
        if task < 2:
            ivt.end_task()
    past = {f"past/{name}": value.cpu() for name, value in ivt.cumulative.items()}
    anchor = {f"anchor/{name}": value.cpu() for name, value in ivt.anchor.items()}
    return {**{name: t.cpu() for name, t in model.state_dict().items()}, **past, **anchor}, ivt


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("structure", ["diagonal", "kernel"])
@pytest.mark.parametrize("stop", [None, 7])
def test_the_same_bits(device: str, structure: str, stop: int | None) -> None:
    wanted, _ = run("device", device, structure)
    found, ivt = run("host", device, structure, stop)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    for tensor in (*ivt.anchor.values(), *ivt.core.cumulative.values()):
        assert tensor.device.type == "cpu"
        assert tensor.is_pinned() == (device == "cuda")
    assert all(tensor.device.type == device for tensor in ivt.fisher.values())
    assert len(ivt.report()) == 6


def test_only_known_places() -> None:
    with pytest.raises(ValueError, match=r"memory='disk' is unknown; choose one of 'device', 'host'"):
        IVT.verbatim(nn.Linear(1, 1), memory="disk")  # type: ignore[arg-type]
