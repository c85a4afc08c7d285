"""RAPF: representation adjustment and parameter fusion (Huang et al., ECCV 2024, https://arxiv.org/abs/2407.14143).

Both towers are frozen. One square matrix A on the image vectors x is trained; the sentences t_c of the classes are the
classifier:

    logits = exp(s) cos(A x, t_c) over the classes seen

Old classes are drawn from their Gaussians in the space before A. Every step trains with cross-entropy on the batch and
on draws of a few old classes. For each pair of an old class i and a new class j whose sentences are closer than a
threshold, it also minimizes mean relu(cos(A x, t_j) - cos(A x, t_i) + 0.1) on draws of class i. After a task the new
matrix is fused with the old one, W_old = U S V', P = U' W_new, D = |P - S V'|, R = min(D / max D + b, 1):

    W = U (P R + S V' (1 - R))

The authors iterate over the old classes in shuffled cycles; here each step draws a few at random. They use 2 per step
for tasks of 10 classes of CIFAR-100 and 4 for tasks of 5, with 20 draws each: 2,000 draws per epoch. Here it is 2,000
for tasks of any size. Their network runs in half precision. For FGVC-Aircraft they give no setting, so ours is that of
CIFAR-100. The learning rates are theirs, not the IVT paper's: a matrix from scratch would hardly change at 5e-6.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from incvec.class_statistics import class_gaussians, draw
from incvec.config import Ints
from incvec.contracts import Batch, Stage, Task, Terms
from incvec.data.gaussians import FeatureSource
from incvec.data.prompts import sentences
from incvec.methods.common import extract_features
from incvec.methods.dual import DualMethod, DualOptions
from incvec.nets.dual import TwoTower

SOURCE = "vectors"


class RAPFOptions(DualOptions):
    templates: str = "good"
    caption: str = "a good photo of a {}."
    epochs: int = Field(15, ge=1)
    batch_size: int = Field(100, ge=1)
    lr: float = Field(1e-3, gt=0)
    schedule: Literal["constant", "cosine", "steps"] = "steps"
    milestones: Ints = (4, 10)
    draws: int = Field(2000, ge=1, le=10**6, description="approximate number of draws of old classes per epoch")
    old_classes: int | None = Field(None, ge=1, description="old classes per step; overrides `draws`")
    samples: int = Field(20, ge=1, description="draws per old class; twice as many for close pairs")
    threshold: float = Field(0.55, ge=0, description="distance between sentences below which classes are close")
    margin: float = 0.1
    fusion: float = Field(0.6, ge=0, description="b, the minimum share of the new matrix")
    ridge: float = Field(1e-4, gt=0)


def draws_per_step(draws: int, steps: int, n_old: int, samples: int) -> tuple[int, int]:
    """Old classes per step and draws per class, for a total of `draws` in the steps of an epoch.

    About `samples` per class: more if there are too few old classes, fewer if there are too many steps.
    """
    per_step = draws / steps
    classes = min(max(round(per_step / samples), 1), n_old)
    return classes, max(round(per_step / classes), 1)


def fuse(old: Tensor, new: Tensor, minimum: float) -> Tensor:
    """U (P R + S V' (1 - R)); equal matrices are not changed."""
    u, s, vt = torch.linalg.svd(old.double())
    q, p = s[:, None] * vt, u.T @ new.double()
    difference = (p - q).abs()
    r = (difference / difference.max().clamp(min=1e-300) + minimum).clamp(max=1)
    fused: Tensor = u @ (p * r + q * (1 - r))
    return fused.to(new)


def close_pairs(texts: Tensor, n_old: int, threshold: float) -> Tensor:
    """All pairs (old, new) closer than the threshold, [P, 2]. Synchronizes with the device: for hooks only."""
    distances = torch.cdist(texts[:n_old], texts[n_old:])
    pairs: Tensor = (distances < threshold).nonzero() + torch.tensor([0, n_old], device=texts.device)
    return pairs


def separation(vectors: Tensor, texts: Tensor, pairs: Tensor, margin: float) -> Tensor:
    """mean relu(cos(x, t_new) - cos(x, t_old) + margin) for unit vectors, the same number per pair."""
    pairs = pairs.repeat_interleave(len(vectors) // len(pairs), 0)
    old, new = ((vectors * texts.index_select(0, side)).sum(1) for side in pairs.unbind(1))
    return F.relu(new - old + margin).mean()


class RAPF(DualMethod):
    name = "rapf"
    summary = "a matrix on frozen towers, trained with class Gaussians and separated pairs, fused by SVD"
    paper = (
        "Class-Incremental Learning with CLIP: Adaptive Representation Adjustment and Parameter Fusion, "
        "https://arxiv.org/abs/2407.14143"
    )
    Options = RAPFOptions
    options: RAPFOptions
    frozen_encoder = True

    def make_model(self) -> Any:
        dual = self.build_dual()
        adapter = nn.Linear(dual.width, dual.width, bias=False, device="meta")
        uniform = torch.rand(dual.width, dual.width, generator=self.world.generator, device=self.world.generator.device)
        adapter.weight = nn.Parameter((2 * uniform.cpu() - 1) * dual.width**-0.5)
        return TwoTower(dual, sentences(self.options.caption, self.world.class_names), adapter)

    # Stages ---------------------------------------------------------------------------------------------

    def trained_parameters(self, task: Task) -> tuple[str, ...]:
        return ("model.adapter",)

    def stages(self, task: Task) -> list[Stage]:
        return [self.main_stage(task, source=SOURCE)]

    def begin_task(self, task: Task) -> None:
        self.store["before"] = cast(Tensor, self.model.adapter.weight).detach().clone()

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        rows = self.training_rows(task)
        self.model.eval()
        with torch.no_grad():
            vectors = self.model.dual.embed_images(extract_features(self.model, self.world, rows))
            texts = self.model.texts()
        self.store |= {"vectors": vectors, "labels": self.world.train.labels[rows], "texts": texts}
        self.store["pairs"] = close_pairs(texts, task.n_old, self.options.threshold)
        self.restored()
        return torch.arange(len(rows), device=rows.device)

    def restored(self) -> None:
        """Add the source of cached vectors."""
        if "vectors" in self.store:
            self.world.add_source(SOURCE, FeatureSource(self.store["vectors"], self.store["labels"]))

    def end_stage(self, task: Task, stage: Stage) -> None:
        adapter = cast(nn.Parameter, self.model.adapter.weight)
        if task.index > 0:
            with torch.no_grad():
                adapter.copy_(fuse(self.store["before"], adapter, self.options.fusion))

    def end_task(self, task: Task) -> None:
        o, labels = self.options, self.store["labels"]
        means, factors = class_gaussians(self.store["vectors"], labels, task.classes, o.ridge)
        self.append_to_store(task, means=means, factors=factors)
        for name in ("vectors", "labels", "texts", "pairs", "before"):
            del self.store[name]

    # Losses ---------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        return {"samples": 4 * 2 * self.options.samples * self.model.dual.width}

    def old_draws(self) -> tuple[int, int]:
        """Old classes per step and draws per class; constant within a stage."""
        o, rows = self.options, len(self.store["vectors"])
        if o.old_classes is not None:
            return o.old_classes, o.samples
        return draws_per_step(o.draws, rows // min(o.batch_size, rows), self.task.n_old, o.samples)

    def loss(self, batch: Batch) -> Terms:
        o, store, generator = self.options, self.store, self.world.generator
        vectors, labels, n_old = batch.images, batch.labels, self.task.n_old
        if n_old > 0:
            classes, each = self.old_draws()
            old = torch.rand(n_old, generator=generator, device=labels.device).argsort()[:classes]
            vectors = torch.cat([vectors, draw(store["means"], store["factors"], old, generator, each)])
            labels = torch.cat([labels, old.repeat_interleave(each)])
        logits = self.model.dual.similarities(self.model.adapted(vectors), store["texts"])
        terms = {"ce": F.cross_entropy(logits, labels)}
        if len(store["pairs"]) > 0:  # a shape, constant within a stage
            close = draw(store["means"], store["factors"], store["pairs"][:, 0], generator, 2 * o.samples)
            terms["separation"] = separation(self.model.adapted(close), store["texts"], store["pairs"], o.margin)
        return terms
