"""GeoDL: distillation along the geodesic between old and new features (Simon et al., CVPR 2021,
https://arxiv.org/abs/2104.08572).

LUCIR with another distillation loss. The features of a batch under the old and the new model span two subspaces P_s and
P_t. The flow kernel G = integral_0^1 Pi(x) Pi(x)^T dx sums the projections along the geodesic Pi(x) of the Grassmann
manifold from one to the other. The loss is the mean of 1 - <f_old, f_new>_G / (|f_old|_G |f_new|_G), with weight
lambda sqrt(old classes / new classes). G carries no gradient. The features are the last map, averaged to 2x2 positions.

Only the authors' ImageNet code is public. It approximates G: 60 directions of the complement of P_s, one iteration for
the inverses in a generalized SVD, and each sample's mean subtracted. Here G is exact, over the whole complement, from
one SVD. Their code trains without LUCIR's margin loss, and so does this. The module it finally imports uses the
squared distance (f_old - f_new)^T G (f_old - f_new) of the normalized features instead of the cosine:
`form="released"`. Their subspaces have rank batch - 2; here at most half the dimension, because larger subspaces
always intersect. lambda is 10 in the released ImageNet command. None is released for CIFAR-100, so it is LUCIR's 5
(whose ImageNet value is 10, too). With several ranks the subspaces are those of each local batch.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from incvec.contracts import Batch, Output, Stage, Task
from incvec.methods.lucir import LUCIR, LUCIROptions

EAGER = "a singular value decomposition synchronizes with the device, which a captured step cannot"


class GeoDLOptions(LUCIROptions):
    form: Literal["paper", "released"] = Field("paper", description="cosine, or squared distance, under G")
    positions: int = Field(2, ge=1, description="height and width that the last map is averaged to")
    rank: int | None = Field(None, ge=1, description="of the subspaces; null: batch - 2, at most half the dimension")
    lambda_margin: float = Field(0.0, ge=0, description="weight of LUCIR's margin loss, which the released code omits")


def principal_basis(features: Tensor, rank: int) -> Tensor:
    """Orthonormal columns [d, rank]: the first left singular vectors of the transposed features [n, d]."""
    directions: Tensor = torch.linalg.svd(features.mT, full_matrices=False).U
    return directions[:, :rank]


def flow_kernel(start: Tensor, end: Tensor) -> Tensor:
    """G = integral_0^1 Pi(x) Pi(x)^T dx along the geodesic from span(start) to span(end), both [d, k] orthonormal.

    With start^T end = U_1 cos(theta) V^T, the geodesic is Pi(x) = A cos(x theta) - B sin(x theta), where A = start U_1
    and -B sin(theta) = end V - A cos(theta) is the part of the end's directions outside the start. Hence

        G = 1/2 [A B] [[L_1, L_2], [L_2, L_3]] [A B]^T,
        L_1 = 1 + sin(2 theta) / 2 theta,  L_2 = (cos(2 theta) - 1) / 2 theta,  L_3 = 1 - sin(2 theta) / 2 theta.

    A direction that both subspaces share has theta = 0, and then B does not matter.
    """
    u, cosine, v = torch.linalg.svd(start.mT @ end)
    a = start @ u
    outside = end @ v.mT - a * cosine
    sine = torch.linalg.vector_norm(outside, dim=0)
    b = -outside / sine.clamp(min=torch.finfo(sine.dtype).tiny)
    theta = torch.atan2(sine, cosine)
    half = torch.sinc(2 * theta / math.pi) / 2  # sin(2 theta) / (4 theta), and its limit at 0
    mixed = -theta.sin() * torch.sinc(theta / math.pi) / 2  # (cos(2 theta) - 1) / (4 theta)
    kernel: Tensor = (a * (0.5 + half) + b * mixed) @ a.mT + (a * mixed + b * (0.5 - half)) @ b.mT
    return kernel


def geodesic_loss(old: Tensor, new: Tensor, kernel: Tensor, form: str = "paper") -> Tensor:
    """The mean of 1 - <s, t>_G / (|s|_G |t|_G) over the rows s of `old` and t of `new`; `released`: of |s - t|_G^2."""
    if form == "released":
        difference = old - new
        return ((difference @ kernel) * difference).sum(1).mean()
    projected = new @ kernel
    inner, new_square = (projected * old).sum(1), (projected * new).sum(1)
    old_square = ((old @ kernel) * old).sum(1)
    return (1 - inner * (new_square * old_square).clamp(min=1e-12).rsqrt()).mean()


class GeoDL(LUCIR):
    name = "geodl"
    summary = "LUCIR with distillation along the geodesic between the subspaces of old and new features"
    paper = "On Learning the Geodesic Path for Incremental Learning, https://arxiv.org/abs/2104.08572"
    Options: ClassVar[type] = GeoDLOptions
    options: GeoDLOptions

    def stages(self, task: Task) -> list[Stage]:
        stages = super().stages(task)
        return stages if task.index == 0 else [stage.replace(eager=EAGER) for stage in stages]

    def retention_loss(self, batch: Batch, output: Output, old: Output) -> dict[str, Tensor]:
        o, task = self.options, self.task
        weight = o.lambda_base * math.sqrt(task.n_old / task.n_new)
        with torch.autocast(batch.labels.device.type, enabled=False):
            loss = self.geodesic(self.unit_vectors(old.maps[-1]), self.unit_vectors(output.maps[-1]))
        terms = {"geodesic": weight * loss}
        if o.lambda_margin:
            terms["margin"] = super().retention_loss(batch, output, old)["margin"]
        return terms

    def memory(self) -> dict[str, int]:
        dimension = self.model.backbone.width * self.options.positions**2
        return {"positions": 4 * dimension**2}  # the geodesic flow kernel

    def unit_vectors(self, maps: Tensor) -> Tensor:
        """The pooled last map of each sample as one unit vector."""
        return F.normalize(F.adaptive_avg_pool2d(maps.float(), self.options.positions).flatten(1), dim=1)

    def geodesic(self, old: Tensor, new: Tensor) -> Tensor:
        samples, dimension = new.shape
        rank = self.options.rank or max(min(samples - 2, dimension // 2), 1)
        with torch.no_grad():
            kernel = flow_kernel(principal_basis(old, rank), principal_basis(new, rank))
        return geodesic_loss(old, new, kernel, self.options.form)
