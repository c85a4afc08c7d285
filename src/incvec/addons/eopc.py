"""EOPC: ensembling over an optimized path (Wen et al., ICML 2023; address below). For methods with exemplars.

After each task from the second on, a low-loss path is optimized between the model before the task, `start`, and the
trained one, `stop`. For the parameter tensor l at position t in [0, 1], with w_n = (4n + 1) pi / 2,

    theta_l(t) = [1 - t + sum_n a_ln cos(w_n t)] start_l + [t + sum_n b_ln sin(w_n t)] stop_l,   n = 0 .. 3.

The ends are fixed as long as every row of a and b sums to 0, so gradients are projected onto that plane. a and b start
at 0, a straight line, and are trained on the balanced exemplars by

    mean over 10 positions t in [0.1, 0.95] of  (|t - 1/2| + 0.1) CE + mean(1 - cos(h, h_end)),

at theta(t) plus noise of norm `radius` orthogonal to the path. Before `cut_off`, CE is over old samples only and h_end
are the features at the start; after it, CE is over all samples and h_end are those at the stop. BatchNorm uses
statistics interpolated between those of the ends. Then ten points of the path around `center`, each with noise of a
norm drawn from U(0, ensemble_radius), are averaged, and the average replaces the model. The exemplars of the task's
classes are selected again. Classes are scored by `Output.logits` throughout (for PODNet without the scale).

The model before the task has no rows for the new classes: they are drawn from N(0, 1 / rows), with biases 0. As in the
authors' code, the learning rate is constant (they define a schedule that their optimizer does not use) and a, b are not
bounded. A batch without old samples has no CE before the cut-off, where theirs would be undefined. With several ranks,
CE over old samples is a mean over those of each local batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from incvec.addons.merging import (
    Tensors,
    before_measurements,
    copy_weights,
    float_tensors,
    merge_incompatibility,
    pack_state,
    unpack_state,
)
from incvec.config import Options
from incvec.contracts import AddOn, Batch, Group, Method, Optimizer, Stage, Task, Terms, World
from incvec.methods.common import ImageMethod, masked_mean

ORDER = 4  # frequencies
WIDTH = 256  # parameters per row of the packed matrix


class EOPCOptions(Options):
    epochs: int = Field(20, ge=1)
    lr: float = Field(0.1, gt=0)
    batch_size: int = Field(128, ge=1)
    positions: int = Field(10, ge=2, description="points of the path per step")
    radius: float = Field(6.0, ge=0, description="norm of the noise while the path is trained")
    cut_off: float = Field(0.75, description="position from which the loss compares with the stop instead of the start")
    center: float = Field(0.75, description="middle of the interval that is averaged")
    gap: float = Field(0.1, ge=0, description="length of the interval")
    members: int = Field(10, ge=1, le=10_000, description="number of averaged points")
    ensemble_radius: float = Field(6.0, ge=0, description="maximum norm of their noise")


def linspace(low: float, high: float, count: int) -> list[float]:
    """Evenly spaced from `low` to `high`, both included; the middle for a count of 1."""
    return [low + (high - low) * (i / (count - 1) if count > 1 else 0.5) for i in range(count)]


def angles(t: Tensor) -> tuple[Tensor, Tensor]:
    """w_n, and w_n t for positions t [k] as [k, 1, n]."""
    w = math.pi / 2 * (4 * torch.arange(ORDER, dtype=t.dtype, device=t.device) + 1)
    return w, t[:, None, None] * w


def coefficients(t: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of start and stop at positions t [k]: two tensors [k, parameter tensors]."""
    _, wt = angles(t)
    return 1 - t[:, None] + (a * wt.cos()).sum(-1), t[:, None] + (b * wt.sin()).sum(-1)


def velocities(t: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of `coefficients` with respect to t: the tangent of the path."""
    w, wt = angles(t)
    return -1 - (a * w * wt.sin()).sum(-1), 1 + (b * w * wt.cos()).sum(-1)


def orthogonal_noise(tangent: Tensor, noise: Tensor, length: Tensor) -> Tensor:
    """The component of the noise orthogonal to the tangent, scaled to the given norm."""
    tiny = torch.finfo(noise.dtype).tiny
    orthogonal = noise - (noise * tangent).sum() / tangent.square().sum().clamp(min=tiny) * tangent
    norm: Tensor = orthogonal.norm()
    return orthogonal * (length / norm.clamp(min=tiny))


def path_loss(
    logits: Tensor, features: Tensor, end: Tensor, labels: Tensor, n_old: int, t: float, cut_off: float
) -> tuple[Tensor, Tensor]:
    """At one position: the weighted cross-entropy, and the distance from the features at one end of the path."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    mask = (labels < n_old).to(losses.dtype) if t < cut_off else torch.ones_like(losses)
    return (abs(t - 0.5) + 0.1) * masked_mean(losses, mask), (1 - F.cosine_similarity(features, end, dim=1)).mean()


class Layout:
    """Many tensors as rows of one matrix. Each tensor begins a new row, and its last row is padded with zeros.

    So multiplying each tensor by a factor is one gather of rows, instead of several kernels per tensor and position.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        rows = [-(-shape.numel() // WIDTH) for shape in self.shapes.values()]
        self.padding = [n * WIDTH - shape.numel() for n, shape in zip(rows, self.shapes.values(), strict=True)]
        device = next(iter(tensors.values())).device
        self.owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(device)
        self.mask = self.pack({name: torch.ones_like(tensor) for name, tensor in tensors.items()})

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        rows = [tensors[name].detach().float().reshape(-1) for name in self.shapes]
        return torch.cat([F.pad(row, (0, n)) for row, n in zip(rows, self.padding, strict=True)]).view(-1, WIDTH)

    def unpack(self, matrix: Tensor) -> Tensors:
        pairs = zip(self.shapes.values(), self.padding, strict=True)
        sizes = [n for shape, padding in pairs for n in (shape.numel(), padding)]
        pieces = matrix.flatten().split(sizes)[::2]
        return {name: piece.view(shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)}

    def per_row(self, factors: Tensor) -> Tensor:
        """One factor per tensor as one factor per row."""
        return factors.index_select(0, self.owner)[:, None]


class Path:
    """The two ends in packed form, and the points between them."""

    def __init__(self, start: Mapping[str, Tensor], model: nn.Module, positions: Sequence[float]) -> None:
        self.parameters = dict(model.named_parameters())
        self.layout = Layout(self.parameters)
        self.start, self.stop = self.layout.pack(start), self.layout.pack(self.parameters)
        self.ends = (start, float_tensors(model))
        self.t = torch.tensor(positions, device=self.start.device)
        self.statistics = [self.statistics_at(t) for t in positions]

    def statistics_at(self, t: float) -> Tensors:
        """The floating-point buffers at t: (1 - t) start + t stop."""
        start, stop = self.ends
        return {n: torch.lerp(start[n].to(b), b, t) for n, b in stop.items() if n not in self.parameters}

    def points(self, t: Tensor, a: Tensor, b: Tensor, lengths: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """theta at the positions t [k], packed, each with orthogonal noise of the given norm."""
        factors = coefficients(t, a, b)
        with torch.no_grad():
            tangents = velocities(t, a, b)
        for k in range(len(t)):
            with torch.no_grad():
                noise = torch.randn(self.start.shape, generator=generator, device=self.start.device)
                noise = orthogonal_noise(self._combine(tangents, k), noise * self.layout.mask, lengths[k])
            yield self._combine(factors, k) + noise

    def _combine(self, factors: tuple[Tensor, Tensor], k: int) -> Tensor:
        per_row = self.layout.per_row
        return per_row(factors[0][k]) * self.start + per_row(factors[1][k]) * self.stop


class EOPC(AddOn):
    name = "eopc"
    summary = "after each task, optimizes a path from the previous model and averages points on it; needs exemplars"
    paper = "Optimizing Mode Connectivity for Class Incremental Learning, https://openreview.net/forum?id=ml9EmtlMiy"
    Options = EOPCOptions
    options: EOPCOptions

    start: Tensors  # the model before the task, with rows for the new classes
    coefficients: dict[str, nn.Parameter]  # a and b
    path: Path | None

    def __init__(self, options: EOPCOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.start, self.coefficients, self.path = {}, {}, None
        self._statistics: dict[str, Any] = {}

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        if not (method.exemplars and issubclass(method, ImageMethod)):
            return f"the path is optimized on exemplars of all classes seen, and {method.name} has none."
        return merge_incompatibility(cls.name, method, others)

    def memory(self) -> dict[str, int]:
        weights = sum(parameter.numel() for parameter in self.method.model.parameters())
        return {"positions": 4 * self.options.positions * weights}

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        if task.index == 0:
            return stages
        main, o = next(stage for stage in stages if stage.role == "main"), self.options
        path = Stage(
            name="eopc-path",
            role="path",
            epochs=o.epochs,
            batch_size=o.batch_size,
            groups=(Group(("addons.eopc",), o.lr),),
            optimizer=Optimizer("sgd", momentum=0.0),
            source=main.source,
            views=main.views[:1],
            batchnorm="frozen",
            owner=self.name,
            loss=self.loss,
        )
        return before_measurements(stages, path)

    def begin_task(self, task: Task) -> None:
        """Copy the model before the task, and draw rows for the new classes."""
        self.start = copy_weights(self.method.model)
        for name, tensor in self.start.items():
            if name.startswith(f"head.blocks.{task.index}."):
                drawn = torch.randn(tensor.shape, generator=self.world.generator, device=tensor.device)
                self.start[name] = drawn / math.sqrt(len(tensor)) if tensor.dim() > 1 else torch.zeros_like(tensor)

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        if stage.owner != self.name:
            return None
        method = cast(ImageMethod, self.method)
        if len(method.store.get("memory", ())) < task.n_seen:  # most methods herd later, in `end_task`
            method.herd_new(task)
        count = sum(1 for _ in method.model.parameters())
        self.coefficients = {name: nn.Parameter(torch.zeros(count, ORDER, device=self.world.device)) for name in "ab"}
        return method.balanced_rows(task)

    def _path(self) -> Path:
        """The path between the ends; built again after resuming."""
        if self.path is None:
            self.path = Path(self.start, self.method.model, self._positions())
        return self.path

    def _positions(self) -> list[float]:
        return linspace(0.1, 0.95, self.options.positions)

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None:
        if stage.owner == self.name:
            self._path()

    def loss(self, batch: Batch) -> Terms:
        o, task, model, path = self.options, self.method.task, self.method.model, self._path()
        with torch.no_grad():
            start: Tensor = functional_call(model, self.start, (batch.images,)).features
            stop: Tensor = model(batch.images).features
        lengths = torch.full_like(path.t, o.radius)
        points = path.points(path.t, self.coefficients["a"], self.coefficients["b"], lengths, self.world.generator)
        rows = []
        for t, statistics, weights in zip(self._positions(), path.statistics, points, strict=True):
            output = functional_call(model, {**path.layout.unpack(weights), **statistics}, (batch.images,))
            end = start if t < o.cut_off else stop
            logits = self.method.class_logits(output.logits)
            rows.append(path_loss(logits, output.features, end, batch.labels, task.n_old, t, o.cut_off))
        ce, features = (torch.stack(column).mean() for column in zip(*rows, strict=True))
        return {"ce": ce, "features": features}

    def gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        """Project onto the plane in which every row sums to 0."""
        if stage.owner == self.name:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))

    @torch.no_grad()
    def end_stage(self, task: Task, stage: Stage) -> None:
        """Replace the model by the average of points on the path."""
        if stage.owner != self.name:
            return
        o, path, generator = self.options, self._path(), self.world.generator
        t = path.t.new_tensor(linspace(o.center - o.gap / 2, o.center + o.gap / 2, o.members))
        lengths = o.ensemble_radius * torch.rand(len(t), generator=generator, device=t.device)
        total = torch.zeros_like(path.start)
        for point in path.points(t, self.coefficients["a"], self.coefficients["b"], lengths, generator):
            total += point / o.members
        # Statistics are linear in t, so their average over the points is their value at the center.
        average = {**path.layout.unpack(total), **path.statistics_at(o.center)}
        live = float_tensors(self.method.model)
        for name, tensor in average.items():
            live[name].copy_(tensor)
        self.path = None
        self.method.refresh(task)

    def end_task(self, task: Task) -> None:
        self._statistics = {f"max_{name}": float(f"{c.abs().max():.5g}") for name, c in self.coefficients.items()}
        self.start, self.coefficients = {}, {}

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.coefficients.items()

    def state(self) -> dict[str, Tensor]:
        return pack_state(start=self.start, bends={name: c.detach() for name, c in self.coefficients.items()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.start, self.path = unpack_state(state, "start"), None
        self.coefficients = {name: nn.Parameter(tensor) for name, tensor in unpack_state(state, "bends").items()}

    def statistics(self) -> dict[str, Any]:
        return self._statistics
