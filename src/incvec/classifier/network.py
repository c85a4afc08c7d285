"""The deployed network: the method's model and classifier, with the normalization, from pixels to probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from incvec.classifier.folder import Description, Preprocessing
from incvec.config import RunConfig, validate
from incvec.contracts import Method, World
from incvec.data.augment import gray
from incvec.data.stream import make_tasks
from incvec.data.views import CENTER_FRACTION, ResizedViews
from incvec.errors import CheckpointError, DataError
from incvec.methods import find_method
from incvec.nets.pretrained import copy_state

BATCH = 32  # images per forward pass on a GPU
CPU_PIXELS = 4 * 224**2  # per forward pass on a CPU: larger batches spend their time on allocating memory


def stored_side(side: int) -> int:
    """The side of stored squares whose center square of `side` pixels is what test views show."""
    first = round(side / CENTER_FRACTION)
    return next(s for s in (first, first + 1, first - 1) if s >= side and round(CENTER_FRACTION * s) == side)


def to_pixels(squares: Tensor, preprocessing: Preprocessing) -> Tensor:
    """What the network sees of stored squares: float [B, 3, side, side] from 0 to 1 (one channel if it sees gray)."""
    p = preprocessing
    pixels = ResizedViews(p.stored, p.side, True, 0.0, p.mean, p.std)("raw", squares)
    return gray(pixels) if len(p.mean) == 1 else pixels


class Network(nn.Module):
    """RGB pixels from 0 to 1, [B, 3, side, side] -> probabilities of the classes, [B, classes]."""

    mean: Tensor
    std: Tensor

    def __init__(self, method: Method, preprocessing: Preprocessing, temperature: float = 1.0) -> None:
        super().__init__()
        self.method, self.temperature = method, temperature
        self.register_buffer("mean", torch.tensor(preprocessing.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(preprocessing.std)[:, None, None])
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return (self.scores(images) / self.temperature).softmax(1)

    def scores(self, images: Tensor) -> Tensor:
        """Before the softmax and the temperature."""
        scores: Tensor = next(iter(self.method((images - self.mean) / self.std).values()))
        return scores.float()


@torch.inference_mode()
def in_batches(
    function: Callable[[Tensor], Tensor],
    squares: Tensor,
    preprocessing: Preprocessing,
    device: torch.device,
    report: Callable[[int], None] | None = None,
) -> Tensor:
    """`function` of the network's pixels for any number of stored squares. `report` gets the number done."""
    parts, done = [], 0
    batch = max(1, CPU_PIXELS // preprocessing.side**2) if device.type == "cpu" else BATCH
    for part in squares.split(batch):
        parts.append(function(to_pixels(part, preprocessing).to(device)).cpu())
        done += len(part)
        if report is not None:
            report(done)
    return torch.cat(parts)


def build_network(description: Description, tensors: Mapping[str, Tensor], device: torch.device) -> Network:
    """The network of a version, from its description and the tensors of its file of weights."""
    kind = find_method(description.method)
    config: RunConfig = validate(RunConfig, {"method": description.method, "sections": description.sections})
    side = description.preprocessing.side
    world = World(
        device=device,
        tasks=make_tasks(len(description.classes), description.task_sizes),
        sources={},
        generator=torch.Generator(device),
        image_shape=(len(description.preprocessing.mean), side, side),
        class_names=description.classes,
    )
    method = kind(config.options(description.method, kind.Options), world)
    if "carry" in description.addons:
        from incvec.addons.carry import report_trained  # other networks do not need it

        report_trained(method)
    for task in world.tasks:
        method.task = task
        method.grow(task)
        method.teacher = None
    method.to(device)
    try:
        copy_state(method, select(tensors, "method/"))
    except DataError as error:
        raise CheckpointError(f"the weights do not fit {description.backbone} with {method.name}: {error}") from error
    method.store = {name: tensor.to(device) for name, tensor in select(tensors, "store/").items()}
    network = Network(method, description.preprocessing, description.temperature).to(device)
    cast(Any, network).to(memory_format=torch.channels_last)  # on a CPU a third of the time
    return network


def select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
