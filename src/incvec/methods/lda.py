"""LDA: linear discriminant analysis on a frozen backbone, class by class (Hayes and Kanan, CVPR Workshops 2020,
https://arxiv.org/abs/1909.01520). No exemplars.

With z the features of an image, raised to a power, mu_c their mean in class c and S their covariance within classes,
shrunk towards a multiple of the identity, an image is scored by

    w_c z + b_c,   w_c = S^-1 mu_c,   b_c = -w_c mu_c / 2

which is, up to a constant, the log-probability of class c if classes are Gaussians with a common covariance. They are
too certain, so they are divided by a temperature. It is fitted to new images that were held out of the statistics, a
fourth at a time. Means, counts and the sum of squares are all that is stored. They are sums over images, so learning
class by class gives the same decisions as learning all classes at once.

The square root of non-negative features makes them more Gaussian, as in Yang et al. (ICLR 2021,
https://arxiv.org/abs/2101.06395); negative ones keep their sign. The authors' shrinkage is 1e-4 and they normalize
nothing; with few photos per class a larger one is better.

With `features=stages` the features are those of the backbone together with the mean and the standard deviation over
positions of every channel of its earlier stages, which see details that the last stage has lost. S is then shrunk
towards one multiple of the identity for each stage and kind, since their scales differ.

The backbone is frozen, and without pre-trained weights its features are random. `adapt_epochs` trains it on the classes
of the first task with a linear classifier that is then discarded, as in first-session adaptation (Panos et al., ICCV
2023, https://arxiv.org/abs/2303.13199).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.calibration import fit_temperature
from incvec.config import Ints, TrainOptions
from incvec.contracts import Batch, Output, Stage, Task, Terms
from incvec.data.select import class_means
from incvec.methods.common import ImageMethod, extract_features
from incvec.nets import Backbone, Classifier, Features, Head, LinearHead, build_backbone, to_float32

FOLDS = 4
CPU_PIXELS = 4 * 224**2  # per forward pass


class LDAOptions(TrainOptions):
    """The training settings apply to `adapt_epochs`."""

    shrinkage: float = Field(0.5, gt=0, le=1, description="share of the identity in the covariance")
    power: float = Field(0.5, gt=0, le=1, description="of the features; 1: unchanged")
    features: Literal["last", "stages"] = Field(
        "last", description="those of the backbone; or also mean and standard deviation of its earlier stages' maps"
    )
    adapt_epochs: int = Field(0, ge=0, description="epochs that train the backbone on the classes of the first task")
    batch_size: int = Field(32, ge=1)
    lr: float = Field(0.01, gt=0)
    weight_decay: float = Field(1e-4, ge=0)
    schedule: Literal["constant", "cosine", "steps"] = "cosine"
    milestones: Ints = ()
    brightness: float = Field(0.0, ge=0, lt=1, description="jitter factor drawn from 1 ± this")


def signed_power(features: Tensor, power: float) -> Tensor:
    """|x|^power with the sign of x."""
    return features.sign() * features.abs().pow(power)


class PowerHead(LinearHead):
    """logits = W sign(h) |h|^power + b."""

    def __init__(self, width: int, power: float) -> None:
        super().__init__(width)
        self.power = power

    def scores(self, features: Tensor) -> Tensor:
        return super().scores(signed_power(features, self.power))


def stage_features(output: Features) -> list[Tensor]:
    """The backbone's features, then the mean and the standard deviation over positions of each earlier stage's map."""
    parts = [to_float32(output.features)]
    for stage_map in output.maps[:-1]:
        deviation, mean = torch.std_mean(to_float32(stage_map), (2, 3), correction=0)
        parts += [mean, deviation]
    return parts


class StageClassifier(Classifier):
    """A head on `stage_features`. `widths` are those of its parts, for images of the given shape."""

    def __init__(self, backbone: Backbone, power: float, image_shape: Sequence[int]) -> None:
        nn.Module.__init__(self)
        with torch.no_grad():
            parts = stage_features(backbone.eval()(torch.zeros(1, *image_shape)))
        self.widths = [part.shape[1] for part in parts]
        self.backbone = backbone.train()
        self.head = PowerHead(sum(self.widths), power)

    def features(self, images: Tensor) -> Tensor:
        return torch.cat(stage_features(self.backbone(images)), 1)

    def forward(self, images: Tensor) -> Output:
        output = self.backbone(images)
        features = torch.cat(stage_features(output), 1)
        return Output(output.maps, features, self.head(features))


def discriminants(
    means: Tensor, scatter: Tensor, count: Tensor, shrinkage: float, widths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Rows w_c and biases b_c from the class means, the summed squares within classes and the number of images.

    S = (1 - shrinkage) covariance + shrinkage mean(diagonal) I, in float64. With `widths`, the features have parts of
    these widths, and each has its own mean of the diagonal.
    """
    mu, covariance = means.double(), scatter.double() / count.clamp(min=1)
    parts = covariance.diagonal().split(list(widths or [len(covariance)]))
    scale = torch.cat([part.mean().expand_as(part) for part in parts])
    scale = torch.where(scale > 0, scale, 1.0)  # one image per class: nearest class mean
    rows = torch.linalg.solve((1 - shrinkage) * covariance + shrinkage * torch.diag(scale), mu.T).T
    return rows.to(means.dtype), (-0.5 * (rows * mu).sum(1)).to(means.dtype)


class Statistics(NamedTuple):
    """Of each class the number of samples [C] and their mean [C, d]; of all, the squares around the means [d, d]."""

    counts: Tensor
    means: Tensor
    scatter: Tensor


def empty_statistics(n_classes: int, like: Tensor) -> Statistics:
    width = like.shape[1]
    return Statistics(like.new_zeros(n_classes), like.new_zeros(n_classes, width), like.new_zeros(width, width))


def add_samples(old: Statistics, z: Tensor, labels: Tensor) -> Statistics:
    """The statistics with further samples, of old classes or new ones."""
    present = labels.unique()
    position = torch.searchsorted(present, labels)
    count, mean = torch.zeros_like(old.counts), torch.zeros_like(old.means)
    count[present] = torch.bincount(position).to(count)
    mean[present] = class_means(z, position, len(present))
    total = old.counts + count
    centered, shift = z - mean[labels], mean - old.means
    between = (old.counts * count / total.clamp(min=1))[:, None] * shift
    scatter = old.scatter + centered.T @ centered + shift.T @ between
    return Statistics(total, old.means + (count / total.clamp(min=1))[:, None] * shift, scatter)


class LDA(ImageMethod):
    name = "lda"
    summary = "linear discriminant analysis on a frozen backbone, no exemplars, nothing to forget"
    paper = (
        "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis, https://arxiv.org/abs/1909.01520"
    )
    Options = LDAOptions
    options: LDAOptions
    uses_teacher = False
    trains = False  # no increment: after the first task only statistics change

    def make_model(self) -> Any:
        if self.options.features == "last":
            return super().make_model()
        shape = self.world.image_shape
        backbone = build_backbone(self.options.net, channels=shape[0], generator=self.world.generator)
        return StageClassifier(backbone, self.options.power, shape)

    def make_head(self, width: int) -> Head:
        return PowerHead(width, self.options.power)

    def grow(self, task: Task) -> None:
        super().grow(task)
        if task.index == 0 and self.options.adapt_epochs:
            classifier = nn.Linear(self.model.backbone.width, task.n_new, device="meta")
            classifier.to_empty(device=self.world.device)
            nn.init.zeros_(classifier.weight)
            nn.init.zeros_(classifier.bias)
            self.auxiliary.classifier = classifier
        elif task.index == 1:
            self.auxiliary = nn.Module()

    def stages(self, task: Task) -> list[Stage]:
        if task.index > 0 or self.options.adapt_epochs == 0:
            return []
        changes: dict[str, Any] = {"name": "adapt", "epochs": self.options.adapt_epochs}
        return [self.main_stage(task, **changes)]

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        return ("model.backbone", "auxiliary")

    def loss(self, batch: Batch) -> Terms:
        classifier: Any = self.auxiliary.classifier
        return {"ce": F.cross_entropy(classifier(to_float32(self.model.backbone(batch.images).features)), batch.labels)}

    def end_task(self, task: Task) -> None:
        self.update(self.rows_of(task.classes), task.n_seen)

    @torch.no_grad()
    def update(self, rows: Tensor, n_classes: int) -> None:
        """Add the images of these rows to the statistics of their classes, old or new, and solve for the head."""
        height, width = self.world.image_shape[1:]
        # On a CPU, larger batches spend their time on allocating memory.
        batch = max(1, CPU_PIXELS // (height * width)) if self.world.device.type == "cpu" else None
        features = extract_features(self.model, self.world, rows, batch=batch)
        z = signed_power(features, self.options.power).double()
        labels, n_known = self.world.train.labels[rows], len(self.store.get("counts", ()))
        old = empty_statistics(n_classes, z)
        if n_known:
            old.counts[:n_known], old.means[:n_known] = self.store["counts"], self.store["prototypes"]
            old.scatter.copy_(self.store["scatter"])
        new = add_samples(old, z, labels)
        self.store |= {"counts": new.counts.float(), "prototypes": new.means.float(), "scatter": new.scatter.float()}
        weight, bias = self._discriminants(new)
        temperature = self._held_out_temperature(old, z, labels)
        weight, bias = weight / temperature, bias / temperature
        first = 0
        for index, block in enumerate(self.model.head):
            last = first + len(block.weight)
            self.model.head.set_block(index, weight[first:last], bias[first:last])
            first = last

    def _discriminants(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        widths = self.model.widths if isinstance(self.model, StageClassifier) else None
        counts, means, scatter = statistics
        return discriminants(means, scatter, counts.sum(), self.options.shrinkage, widths)

    def _held_out_temperature(self, old: Statistics, z: Tensor, labels: Tensor) -> float:
        """The temperature of samples scored by the statistics without them, a fold of every class at a time."""
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=len(old.counts))
        fold = torch.empty_like(labels)
        fold[order] = (torch.arange(len(labels), device=z.device) - (counts.cumsum(0) - counts)[labels[order]]) % FOLDS
        fold[(old.counts + counts)[labels] < 2] = FOLDS  # never held out
        scores, targets = [], []
        for number in range(FOLDS):
            held_out = fold == number
            if held_out.any():
                weight, bias = self._discriminants(add_samples(old, z[~held_out], labels[~held_out]))
                scores.append(z[held_out] @ weight.T + bias)
                targets.append(labels[held_out])
        return fit_temperature(torch.cat(scores), torch.cat(targets), 1.0) if scores else 1.0
