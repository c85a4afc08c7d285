"""Classifier heads that grow by appending blocks.

`head.blocks[t]` has the rows of task t. Growing appends a block and changes nothing else, so a parameter keeps its name
and shape forever. Rows are ordered by class: with k rows per class, those of class c start at k * c.

A head computes in float32 (or wider) whatever the training precision: scores of different classes may differ in the
third digit only, and the head is a small part of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.fused import fused


def to_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Block(nn.Module):
    """One task's rows of a head."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def extra_repr(self) -> str:
        rows, width = self.weight.shape
        return f"rows={rows}, width={width}, bias={self.bias is not None}"


class Head(nn.Module):
    """Base class: the blocks. Subclasses define how rows are initialized (`initial`) and scored (`scores`)."""

    blocks: nn.ModuleList

    def __init__(self, width: int, rows_per_class: int = 1) -> None:
        super().__init__()
        if width < 1 or rows_per_class < 1:
            raise ValueError(f"width and rows per class must be 1 or more, got {width} and {rows_per_class}")
        self.width = width
        self.rows_per_class = rows_per_class
        self.blocks = nn.ModuleList()
        self._place = torch.empty(0)  # device and dtype of new blocks; follows `.to()`, not in the state dict

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._place = fn(self._place)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __iter__(self) -> Iterator[Block]:
        return (cast(Block, block) for block in self.blocks)

    def __getitem__(self, t: int) -> Block:
        return cast(Block, self.blocks[t])

    @property
    def n_classes(self) -> int:
        return sum(block.weight.shape[0] for block in self) // self.rows_per_class

    @property
    def weight(self) -> Tensor:
        """The rows of all blocks, concatenated."""
        if not len(self.blocks):
            raise ValueError("this head has no classes yet: call grow(n_classes, generator) first")
        return to_float32(torch.cat([block.weight for block in self]))

    def initial(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Initial weight and bias of a new block, on the generator's device."""
        raise NotImplementedError

    def scores(self, features: Tensor) -> Tensor:
        """Scores of float32 features, outside autocast."""
        raise NotImplementedError

    def grow(self, n_classes: int, generator: torch.Generator) -> Block:
        """Append a block of `n_classes` classes, on the device and in the dtype of the head."""
        if n_classes < 1:
            raise ValueError(f"n_classes must be 1 or more, got {n_classes}")
        weight, bias = self.initial(n_classes * self.rows_per_class, generator)
        block = Block(weight.to(self._place), None if bias is None else bias.to(self._place))
        block.train(self.training)
        self.blocks.append(block)
        return block

    @torch.no_grad()
    def set_block(self, t: int, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy these values into block `t`; the parameters stay the same objects."""
        block = self[t]
        if weight.shape != block.weight.shape:
            raise ValueError(
                f"block {t} has weights of shape {tuple(block.weight.shape)}, but got {tuple(weight.shape)}"
            )
        if bias is not None and (block.bias is None or bias.shape != block.bias.shape):
            present = "no bias" if block.bias is None else f"a bias of shape {tuple(block.bias.shape)}"
            raise ValueError(f"block {t} has {present}, but got one of shape {tuple(bias.shape)}")
        block.weight.copy_(weight)
        if bias is not None and block.bias is not None:
            block.bias.copy_(bias)

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return self.scores(to_float32(features))


class LinearHead(Head):
    """logits = W h + b, with `outputs_per_class` rows per class (PASS and FCS have one per rotation).

    `init="kaiming"` draws weights from U(±sqrt(3 / d)) with zero biases (Kaiming-uniform of a linear layer, as
    PyCIL does); `"default"` draws both from U(±1 / sqrt(d)), as `nn.Linear` does.
    """

    def __init__(
        self,
        width: int,
        outputs_per_class: int = 1,
        init: Literal["kaiming", "default"] = "kaiming",
    ) -> None:
        super().__init__(width, outputs_per_class)
        if init not in ("kaiming", "default"):
            raise ValueError(f"init must be 'kaiming' or 'default', got {init!r}")
        self.init = init

    @property
    def bias(self) -> Tensor:
        """The biases of all blocks."""
        return to_float32(torch.cat([block.bias for block in self if block.bias is not None]))

    def initial(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        if self.init == "kaiming":
            weight = uniform((rows, self.width), math.sqrt(3 / self.width), generator)
            bias = torch.zeros(rows)
        else:
            bound = 1 / math.sqrt(self.width)
            weight = uniform((rows, self.width), bound, generator)
            bias = uniform((rows,), bound, generator)
        return weight, bias

    def scores(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


class CosineHead(Head):
    """LUCIR's head: logits_c = scale * cos(h, w_c), one row per class, one learnable scale for all."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    def initial(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        return uniform((rows, self.width), 1 / math.sqrt(self.width), generator), None

    def cosines(self, features: Tensor) -> Tensor:
        """cos(h, w_c) without the scale, in float32: the margin loss compares these."""
        with torch.autocast(features.device.type, enabled=False):
            return cosine(to_float32(features), self.weight)

    def scores(self, features: Tensor) -> Tensor:
        return self.scale * cosine(features, self.weight)


class ProxyHead(Head):
    """PODNet's head: several proxies per class; the class score is their softmax-weighted mean.

    y_c = sum_k softmax_k(s_{c,.})_k s_{c,k}, with s the negative squared distance of the directions
    (`proxy_similarities`). `forward` returns y; `scale` (eta in the paper) multiplies it in the loss only.
    """

    def __init__(self, width: int, proxies: int = 10, scale: float = 1.0) -> None:
        super().__init__(width, proxies)
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    @property
    def proxies(self) -> int:
        return self.rows_per_class

    def initial(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Kaiming-normal over fan-in with the gain of a linear layer: N(0, 1 / d)."""
        drawn = torch.randn((rows, self.width), generator=generator, device=generator.device)
        return drawn / math.sqrt(self.width), None

    def similarities(self, features: Tensor) -> Tensor:
        """s as (samples, classes, proxies), in float32."""
        with torch.autocast(features.device.type, enabled=False):
            return proxy_similarities(to_float32(features), self.weight, self.proxies)

    def scores(self, features: Tensor) -> Tensor:
        return proxy_scores(features, self.weight, self.proxies)


def uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    """U(-bound, bound), drawn on the generator's device."""
    return torch.empty(shape, device=generator.device).uniform_(-bound, bound, generator=generator)


def cosine(features: Tensor, rows: Tensor) -> Tensor:
    """cos(h_i, w_j) for every sample and row."""
    return F.linear(F.normalize(features, dim=-1), F.normalize(rows, dim=-1))


@fused
def proxy_scores(features: Tensor, rows: Tensor, proxies: int) -> Tensor:
    """y_c = sum_k softmax_k(s_{c,.})_k s_{c,k}."""
    s = proxy_similarities(features, rows, proxies)
    return (s.softmax(-1) * s).sum(-1)


def proxy_similarities(features: Tensor, rows: Tensor, proxies: int) -> Tensor:
    """s_{c,k} = -|h/|h| - w_{c,k}/|w_{c,k}||^2 = 2 cos(h, w_{c,k}) - 2, as (samples, classes, proxies)."""
    s = 2 * cosine(features, rows) - 2
    return s.reshape(*s.shape[:-1], -1, proxies)


@torch.no_grad()
def mean_row_norm(head: Head, n_blocks: int | None = None) -> Tensor:
    """Mean Euclidean norm of the rows of the first `n_blocks` blocks (None: of all).

    Imprinting gives new rows the norm of the old ones: after `grow`, pass the number of old blocks.
    """
    blocks = list(head)[:n_blocks]
    if not blocks:
        raise ValueError(f"no blocks to average over: the head has {len(head.blocks)}, n_blocks={n_blocks}")
    return torch.cat([to_float32(block.weight).norm(dim=1) for block in blocks]).mean()
