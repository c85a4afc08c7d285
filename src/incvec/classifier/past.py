"""The past of a model that was trained elsewhere: the Fisher that IVT needs of what the model already knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import AddOn, Batch, Method

BATCH = 32


def give_past(addons: Sequence[AddOn], method: Method, rows: Tensor, labelled: bool) -> None:
    """Let IVT measure F of the model as it is, before its first increment, with these rows of the training images.

    `labelled`: the rows are photos of what the model knows, and the loss is the method's own. Otherwise the stand-in:
    the photos are of other classes, and the labels are drawn from the model's own predictions, so that F is the Fisher
    information of its outputs on photos like those that come next.
    """
    model: Any = method.model
    training = model.training

    def loss(batch: Batch) -> Tensor:
        if labelled:
            return torch.stack(list(method.loss(batch).values())).sum()
        logits = model(batch.images).logits
        drawn = torch.multinomial(logits.detach().softmax(1), 1, generator=method.world.generator).flatten()
        return F.cross_entropy(logits, drawn)

    for addon in addons:
        if isinstance(addon, IVTAddOn) and addon.plugin.task == 0:
            model.eval().requires_grad_(True)
            addon.plugin.begin_with(batches(method, rows), loss)
            model.train(training)


def batches(method: Method, rows: Tensor) -> Iterator[Batch]:
    for part in rows.split(BATCH):
        yield method.world.train.fetch(part, method.world.generator, ("test",))
