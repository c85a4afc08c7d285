"""Increment vector transformation as an add-on: the plug-in, listening to the engine.

Every `interval` epochs of the main stage the deployed parameters are teleported towards where the task began,
theta <- anchor + S (theta - anchor), S = (Fbar_{t-1} + Fbar_t)^-1 Fbar_t. Balanced and alignment stages are left
alone unless `stages` names their roles; there F_t stays the main stage's. F_1 is the batch Fisher of the base
task's last epoch, which every run shares, or a measuring pass over single samples (`first_fisher="sample"`).

The anchor, Fbar and F take three times the trained parameters in float32: 3 x 0.6 GB for CLIP ViT-B/16. `memory="host"`
keeps the first two in host memory and streams them at a teleport. A snapshot holds Fbar, as large as the model once
more, which a run that begins there and the lab's `curvature` need; of pre-trained models only with `snapshot_fisher`.

The last teleport may leave BatchNorm's running statistics behind the weights: `batchnorm` keeps them, moves them
with the mean S of their layer (`interpolate`), or measures them anew after the main stage (`recalibrate`). Those that
the method holds fixed (SSRE) stay as they are. `map` goes further: what is teleported is the affine map that a layer
is, by the statistics of some batches seen as one, and the new map is told by theirs again, so that training goes on
from the function that was teleported (see affine.py). The others leave it to training to make up for a weight that
went back while the batches it is normalized by stayed. `layer` does as `map`, for a convolution and its norm together:
their product goes back, by the convolution's S. The two differ little as long as filters keep their lengths; where
some have nearly vanished, as in ResNet-18's last stage, slopes taken back by themselves may explode (docs/findings.md).

Algorithm 1 ends on a teleport wherever the interval divides the epochs, so that what is delivered has not trained
since: `last="skip"` leaves that one out. It says nothing of the classifier, whose old rows have a past and are
teleported while the new ones stand still, which shifts the balance between old and new classes; `head="keep"`
teleports the backbone alone. (PODNet and LUCIR do not train their old rows, so there the two hardly differ.) The
presets for photographs and networks trained from scratch do both. Three hosts have their own: PODNet, whose balanced
stage follows the last teleport, keeps to the letter; PASS and FCS, which see new classes alone, do both with
`batchnorm="layer"` (on CIFAR-100 `"map"`). Without a preset it is the letter. A teleport in another stage that `stages`
names moves what the task has trained, a backbone that rests there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from incvec.addons.affine import Affine, Folded, feeding, moments, norms_of, renormalize
from incvec.config import Options
from incvec.contracts import AddOn, Batch, Group, Method, Role, Stage, Task, Terms, World
from incvec.ivt import IVT, scale

BATCHES = 4  # whose statistics, all at once, tell a map
MAPS = ("map", "layer")  # ways of BatchNorm that take maps back
MAX_TESTED_WIDTH = 64  # features of the widest network, ResNet-32, that `map` has done well with


class IVTOptions(Options):
    interval: int | None = Field(10, ge=1, description="epochs between teleports; null: once, at the stage's end")
    structure: Literal["diagonal", "kernel"] = "diagonal"
    first_fisher: Literal["batch", "sample"] = "batch"
    optimizer_state: Literal["keep", "reset"] = Field("keep", description="of teleported parameters, at a teleport")
    batchnorm: Literal["keep", "interpolate", "recalibrate", "map", "layer"] = "keep"
    last: Literal["teleport", "skip"] = Field("teleport", description="after a stage's last epoch, where one is due")
    head: Literal["teleport", "keep"] = Field("teleport", description="the classifier's old rows, at a teleport")
    memory: Literal["device", "host"] = Field("device", description="where the anchor and Fbar lie")
    snapshot_fisher: bool | None = Field(
        None, description="whether a task's snapshot holds Fbar; null: where the model is trained from scratch"
    )
    stages: Annotated[tuple[Role, ...], Field(strict=False)] = ("main",)


class IVTAddOn(AddOn):
    name = "ivt"
    summary = "teleports the parameters every few epochs along the transformed increment vector"
    paper = "Closing the Oracle Gap: Increment Vector Transformation for CIL, https://arxiv.org/abs/2509.21898"
    Options = IVTOptions
    options: IVTOptions

    def __init__(self, options: IVTOptions, world: World, method: Method) -> None:
        super().__init__(options, world, method)
        self.plugin = IVT(
            method.model,
            interval=None,  # the engine counts a stage's epochs
            structure=options.structure,
            memory=options.memory,
            listen=False,  # and calls `accumulate` inside its step
        )
        self.buffers: dict[str, Tensor] = {}  # BatchNorm's statistics at the anchor, where they or maps go back
        self.sums: dict[str, Tensor] = {}  # and their sums, where one epoch measures them anew: never saved
        self._statistics_of_task: dict[str, Any] = {}

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        if not method.trains:
            return f"{method.name} trains nothing: there is no increment."
        return f"{method.name} trains all classes as one task: there is no increment." if method.joint else None

    @classmethod
    def incompatible_options(cls, options: Any, method: type[Method], method_options: Any) -> str | None:
        if options.first_fisher == "sample" and method.uses_batch_contrast(method_options):
            return (
                f"first_fisher=sample takes gradients of single images, but {method.name}'s loss contrasts the images "
                "of a batch: alone in it, an image has none to tell apart, and its gradient is 0. Use "
                "ivt.first_fisher=batch."
            )
        if options.structure == "kernel" and options.batchnorm == "interpolate":
            return (
                "batchnorm=interpolate takes a layer's statistics back by the mean of its weights' S, but with "
                "structure=kernel the weights go back by blocks, and the two do not fit. Use ivt.batchnorm=recalibrate."
            )
        if options.interval is None and options.last == "skip":
            return (
                "with interval=null the one teleport is at the end, and last=skip leaves that out, so it never "
                "teleports. Use ivt.last=teleport, or an interval."
            )
        return None

    def notice(self) -> str | None:
        return " ".join(filter(None, (self._too_wide(), self._idle()))) or None

    def _too_wide(self) -> str:
        width = getattr(getattr(self.method.model, "backbone", None), "width", 0)
        if self.options.batchnorm != "map" or width <= MAX_TESTED_WIDTH:
            return ""
        return (
            f"ivt.batchnorm=map was tried with {MAX_TESTED_WIDTH} features and fewer; this network has {width}, and "
            "such ones may break with it (docs/findings.md). Use ivt.batchnorm=layer."
        )

    def _idle(self) -> str:
        epochs, o = getattr(self.method.options, "epochs", None), self.options
        if epochs is None or o.interval is None or o.stages != ("main",):
            return ""
        left_out = o.last == "skip" and epochs % o.interval == 0
        if epochs // o.interval > left_out:
            return ""
        skipped = ", and ivt.last=skip leaves out the one after the last" if left_out else ""
        remedy = ", or ivt.last=teleport" if left_out else ""
        return (
            f"ivt changes nothing in this run: an increment has {epochs} epoch(s), a teleport comes every {o.interval}"
            f"{skipped}. Use a smaller ivt.interval{remedy}."
        )

    # Stages of its own ----------------------------------------------------------------------------------

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        o = self.options
        main = self._main(stages)
        if task.index == 0:
            kernel = o.structure == "kernel"  # the shared F_1 is diagonal: blocks need a pass of their own
            if o.first_fisher == "batch" and not kernel:
                return stages
            size = 1 if o.first_fisher == "sample" else main.batch_size
            groups = tuple(Group(group.prefixes, 0.0) for group in main.groups)
            return [*stages, self._measure(main, "fisher", size, groups, None)]
        if o.batchnorm != "recalibrate" or main.batchnorm == "frozen":  # statistics the method holds fixed stay so
            return stages
        place = 1 + max(i for i, stage in enumerate(stages) if stage.role == "main")
        recalibrate = self._measure(main, "recalibrate", main.batch_size, (), self._forward)
        return [*stages[:place], recalibrate, *stages[place:]]

    def _measure(self, main: Stage, name: str, batch_size: int, groups: tuple[Group, ...], loss: Any) -> Stage:
        still = batch_size == 1 or main.batchnorm == "frozen"
        frozen: Literal["train", "frozen"] = "frozen" if still else "train"
        return Stage(
            name=f"ivt-{name}",
            role="measure",
            epochs=1,
            batch_size=batch_size,
            groups=groups,
            source=main.source,
            views=main.views,
            batchnorm=frozen,
            owner=self.name,
            loss=loss or main.loss,
            eager="it averages BatchNorm's batch statistics" if name == "recalibrate" else None,
        )

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        if stage.owner != self.name:
            return None
        if stage.name == "ivt-fisher":
            self._anchor()
            self.buffers = {name: buffer.clone() for name, buffer in self._statistics()}  # measuring changes nothing
        else:
            self.sums = {name: torch.zeros_like(buffer) for name, buffer in self._statistics()}
            self.sums["count"] = torch.zeros((), device=self.world.device)
            for module in self._norms().values():
                module.momentum = 1.0  # so that the running statistics are the batch's own
        return self.method.begin_stage(task, self._main(self.method.stages(task)))

    @staticmethod
    def _main(stages: Sequence[Stage]) -> Stage:
        return next(stage for stage in stages if stage.role == "main")

    def _forward(self, batch: Batch) -> Terms:
        """The main stage's loss in train mode, the batch's statistics added up.

        The loss, since it decides what the network sees of a batch: turned images, mixed ones, pushed features.
        """
        terms = (self._main(self.method.stages(self.method.task)).loss or self.method.loss)(batch)
        for name, buffer in self._statistics():
            self.sums[name] += buffer
        self.sums["count"] += 1
        return terms

    def _norms(self) -> dict[str, Any]:
        return norms_of(self.method.model)

    def _statistics(self) -> list[tuple[str, Tensor]]:
        kinds = ("running_mean", "running_var")
        return [(f"{name}.{kind}", getattr(m, kind)) for name, m in self._norms().items() for kind in kinds]

    # Listening ------------------------------------------------------------------------------------------

    def _anchor(self) -> None:
        self.method.model.requires_grad_(True)  # the stage before may have frozen some; the next one settles it
        self.plugin.begin_task()

    def begin_task(self, task: Task) -> None:
        self._anchor()
        if self.options.batchnorm in ("interpolate", *MAPS):
            self.buffers = {name: buffer.clone() for name, buffer in self._statistics()}

    def _collects(self, stage: Stage) -> bool:
        return stage.role == "main" or stage.name == "ivt-fisher"

    def _ends(self, task: Task, stage: Stage, epoch: int) -> bool:
        """Whether F of this epoch is used: a teleport follows it, or it is the stage's last.

        Between such epochs the sums run on unheeded, and no time is spent on them.
        """
        return epoch == stage.epochs or self._teleports(task, stage, epoch)

    def _teleports(self, task: Task, stage: Stage, epoch: int) -> bool:
        if task.index == 0 or stage.owner is not None or stage.role not in self.options.stages:
            return False
        interval = stage.epochs if self.options.interval is None else self.options.interval
        return epoch % interval == 0 and not (epoch == stage.epochs and self.options.last == "skip")

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None:
        fresh = epoch == 1 or self._ends(task, stage, epoch - 1)  # the sums are closed, and a step may be captured now
        if self._collects(stage) and (fresh or self._ends(task, stage, epoch)):
            self.plugin.begin_epoch()

    def gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        if self._collects(stage):
            self.plugin.accumulate([p for name, p in parameters.items() if name.startswith("model.")])

    def end_epoch(self, task: Task, stage: Stage, epoch: int, optimizer: torch.optim.Optimizer | None) -> None:
        if self._collects(stage) and self._ends(task, stage, epoch):
            self.plugin.end_epoch()
        if self._teleports(task, stage, epoch):
            self._interpolate_statistics()
            if self.options.batchnorm in MAPS and self._norms():
                self._teleport_maps(stage)
            else:
                self.plugin.teleport(self._left)
            if self.options.optimizer_state == "reset" and optimizer is not None:
                self._forget(optimizer)

    @property
    def _left(self) -> tuple[str, ...]:
        """Name prefixes of what is not teleported."""
        return ("head.",) if self.options.head == "keep" else ()

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Zero the optimizer's state of what is teleported; new rows keep theirs."""
        names = {n for n in self.plugin.cumulative.keys() & self.plugin.fisher.keys() if not n.startswith(self._left)}
        moved = [p for name, p in self.method.model.named_parameters() if name in names]
        state = [t for parameter in moved for t in optimizer.state.get(parameter, {}).values()]
        if state:
            torch._foreach_zero_(state)

    def _interpolate_statistics(self) -> None:
        """buffer <- old + mean(S) (buffer - old), S that of the layer's own weight."""
        if self.options.batchnorm != "interpolate":
            return
        for name, module in self._norms().items():
            of_weight = self._scale_of(f"{name}.weight")
            if of_weight is None:
                continue
            s = of_weight.mean()
            for kind in ("running_mean", "running_var"):
                buffer, old = getattr(module, kind), self.buffers[f"{name}.{kind}"]
                buffer.copy_(old + s * (buffer - old))

    def _scale_of(self, name: str) -> Tensor | None:
        """S of a parameter; None for one that is new, or rests: it is not teleported."""
        old, new = self.plugin.cumulative.get(name), self.plugin.fisher.get(name)
        return None if old is None or new is None else scale(old.to(new.device), new)

    def _look(self, stage: Stage) -> None:
        """At images to measure statistics on; none where the stage has them fixed."""
        if stage.batchnorm == "train":
            self.world.probe(BATCHES)

    @torch.no_grad()
    def _teleport_maps(self, stage: Stage) -> None:
        """A teleport after which each layer is the map of the anchor and S times the way to the one it trains as."""
        look, layers = partial(self._look, stage), self.options.batchnorm == "layer"
        present = moments(self._norms().values(), look)
        fed = feeding(self.method.model, partial(self.world.probe, 1)) if layers else {}
        names = {module: name for name, module in self.method.model.named_modules()}
        maps: dict[Any, Affine] = {}
        folded: dict[Any, tuple[str, Folded]] = {}
        for name, norm in self._norms().items():
            of_weight, of_bias = self._scale_of(f"{name}.weight"), self._scale_of(f"{name}.bias")
            if of_weight is None or of_bias is None:
                continue
            here = norm.weight.device
            weight, bias = (self.plugin.anchor[f"{name}.{kind}"].to(here) for kind in ("weight", "bias"))
            mean, var = (self.buffers[f"{name}.{kind}"] for kind in ("running_mean", "running_var"))
            old = Affine.of(weight, bias, mean, var, norm.eps)
            mean, var = present.get(norm, (norm.running_mean, norm.running_var))
            new = Affine.of(norm.weight, norm.bias, mean, var, norm.eps)
            maps[norm] = new.teleported(old, (of_weight, of_bias))
            own = f"{names[fed[norm]]}.weight" if norm in fed else ""
            if own in self.plugin.cumulative and own in self.plugin.fisher:
                there = self.plugin.anchor[own].to(here)
                folded[norm] = own, Folded(fed[norm].weight, there, new, old, of_weight)
        self.plugin.teleport(self._left, {own: product.anchor for own, product in folded.values()})
        for norm, (_, product) in folded.items():
            maps[norm] = maps[norm]._replace(slope=product.part())
        if maps:
            renormalize(maps, look)

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.name == "ivt-fisher":
            for name, buffer in self._statistics():
                buffer.copy_(self.buffers[name])
            self.buffers = {}
        if stage.name == "ivt-recalibrate":
            for name, module in self._norms().items():
                module.momentum = 0.1
                for kind in ("running_mean", "running_var"):
                    getattr(module, kind).copy_(self.sums[f"{name}.{kind}"] / self.sums["count"])
            self.sums = {}

    def end_task(self, task: Task) -> None:
        measured = self.options.first_fisher == "sample" or self.options.structure == "kernel"
        if task.index == 0 and not measured:
            assert self.world.base_fisher is not None
            self._anchor()
            self.plugin.set_fisher(self.world.base_fisher)
        self._statistics_of_task = self._account() if task.index > 0 else {}
        self.plugin.end_task()
        self.buffers = {}

    # State ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        found = dict(self.plugin.state_dict())
        return found | {f"buffers/{name}": tensor for name, tensor in self.buffers.items()}

    def snapshot(self) -> dict[str, Tensor]:
        asked = self.options.snapshot_fisher
        return self.state() if (not self.method.pretrained if asked is None else asked) else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.buffers = {n.removeprefix("buffers/"): t.clone() for n, t in state.items() if n.startswith("buffers/")}
        self.plugin.load_state_dict({n: t for n, t in state.items() if not n.startswith("buffers/")})

    def statistics(self) -> dict[str, Any]:
        return self._statistics_of_task

    @torch.no_grad()
    def _account(self) -> dict[str, Any]:
        """By part of the network: mean S of the last epoch's F_t, F_t against Fbar_{t-1}, distance traveled."""
        parameters = dict(self.method.model.named_parameters())
        parts: dict[str, list[tuple[Tensor, ...]]] = {}
        for name, new in self.plugin.fisher.items():
            old = self.plugin.cumulative.get(name)
            if old is None or old.shape != parameters[name].shape:
                continue
            old, anchor = (tensor.to(new.device) for tensor in (old, self.plugin.anchor[name]))
            moved = (parameters[name] - anchor).square().sum()
            row = (scale(old, new).sum(), new.sum(), old.sum(), moved, torch.tensor(float(old.numel())))
            for part in ("all", ".".join(name.split(".")[:3])):
                parts.setdefault(part, []).append(tuple(value.double().cpu() for value in row))
        found = {}
        for part, rows in parts.items():
            s, fresh, past, far, count = (float(torch.stack(column).sum()) for column in zip(*rows, strict=True))
            found[part] = {
                "scale": round(s / count, 5),
                "fisher_ratio": float(f"{fresh / past:.5g}") if past > 0 else None,
                "distance": float(f"{far**0.5:.5g}"),
            }
        return found
