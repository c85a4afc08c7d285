"""Increment Vector Transformation as an add-on: the plug-in, driven by the engine.

Every `interval` epochs of the main stage the deployed parameters are teleported, theta <- anchor + S (theta - anchor),
S = (Fbar_{t-1} + Fbar_t)^-1 Fbar_t, with the anchor at the beginning of the task. Balanced and alignment stages are
only teleported if `stages` includes their roles, with F_t of the main stage. F_1 is the batch Fisher of the base
task's last epoch, which all runs share, or comes from a measuring pass over single samples (`first_fisher="sample"`).

Memory: the anchor, Fbar and F are three times the trained parameters in float32, 3 x 0.6 GB for CLIP ViT-B/16.
`memory="host"` keeps the first two in host memory and streams them at a teleport. A snapshot contains Fbar, which a
run that starts there and the study's curvature need. It is as large as the model, so snapshots of pre-trained models
contain it only with `snapshot_fisher`.

BatchNorm. After the last teleport the running statistics may not fit the weights. `batchnorm` selects what happens:
`keep` leaves them; `interpolate` interpolates them with the mean S of their layer; `recalibrate` re-estimates them
after the main stage. Statistics that the method freezes (SSRE) are not changed. With these three, training has to
compensate for weights that are teleported while the batch statistics are not. `map` teleports the affine map of each
BatchNorm layer (with the statistics of a few batches as one) and recomputes weight and bias, so that training
continues from the teleported function (see affine.py). `layer` does the same for a convolution and its BatchNorm layer
together: their product is teleported with the convolution's S. The two differ little while filters keep their norms.
If some filters have nearly vanished, as in the last stage of ResNet-18, slopes teleported by themselves may explode
(docs/results.md).

Open questions of Algorithm 1. It ends with a teleport if the interval divides the epochs, so the final weights are not
trained afterwards; `last="skip"` omits this teleport. It does not mention the classifier. Its old rows are teleported
and its new rows are not, which shifts the balance between old and new classes; `head="keep"` teleports the backbone
only. (PODNet and LUCIR freeze their old rows, so it hardly matters there.) The defaults are Algorithm 1 verbatim; the
presets for photographs and networks trained from scratch use both options. Three hosts have their own presets: PODNet,
whose balanced stage follows the last teleport, uses Algorithm 1 verbatim; PASS and FCS, which only see new classes,
use both options with `batchnorm="layer"` (`"map"` on CIFAR-100). A teleport in another stage that `stages` includes
acts on all parameters trained in the task, even if that stage freezes the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from incvec.addons.affine import Affine, Folded, input_moments, preceding_layers, write_maps
from incvec.config import Options
from incvec.contracts import AddOn, Batch, Group, Method, Role, Stage, Task, Terms, World
from incvec.ivt import IVT, scale
from incvec.nets.batchnorm import STATISTICS, Recalibration, batchnorm_layers, running_statistics

PROBE_BATCHES = 4  # their statistics, as one batch, define a map
MAPS = ("map", "layer")  # values of `batchnorm` that teleport maps
MAX_TESTED_WIDTH = 64  # features of ResNet-32, the widest network for which `map` has worked


class IVTOptions(Options):
    interval: int | None = Field(10, ge=1, description="epochs between teleports; null: once, at the end of the stage")
    structure: Literal["diagonal", "kernel"] = Field("diagonal", description="of F; kernel: one block per kernel slice")
    first_fisher: Literal["batch", "sample"] = Field("batch", description="gradients of F_1: of batches or of samples")
    optimizer_state: Literal["keep", "reset"] = Field("keep", description="of teleported parameters, at a teleport")
    batchnorm: Literal["keep", "interpolate", "recalibrate", "map", "layer"] = Field(
        "keep", description="how BatchNorm layers are teleported"
    )
    last: Literal["teleport", "skip"] = Field("teleport", description="the teleport after the last epoch of a stage")
    head: Literal["teleport", "keep"] = Field("teleport", description="the classifier's old rows, at a teleport")
    memory: Literal["device", "host"] = Field("device", description="where the anchor and Fbar are stored")
    snapshot_fisher: bool | None = Field(
        None, description="store Fbar in snapshots; null: only for models trained from scratch"
    )
    stages: Annotated[tuple[Role, ...], Field(strict=False, description="roles of the stages with teleports")] = (
        "main",
    )


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
            interval=None,  # the add-on counts the epochs of a stage
            structure=options.structure,
            memory=options.memory,
            listen=False,  # the add-on calls `accumulate` within the engine's step
        )
        self.buffers: dict[str, Tensor] = {}  # running statistics at the anchor, or before the Fisher pass
        self.recalibration: Recalibration | None = None  # during its stage; never saved
        self._statistics: dict[str, Any] = {}

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        if not method.trains:
            return f"{method.name} trains nothing: there is no increment."
        return f"{method.name} trains all classes as one task: there is no increment." if method.joint else None

    @classmethod
    def incompatible_options(cls, options: Any, method: type[Method], method_options: Any) -> str | None:
        if options.first_fisher == "sample" and method.uses_batch_contrast(method_options):
            return (
                f"first_fisher=sample needs gradients of single images, but {method.name}'s loss contrasts the images "
                "of a batch: with a single image its gradient is 0. Use ivt.first_fisher=batch."
            )
        if options.structure == "kernel" and options.batchnorm == "interpolate":
            return (
                "batchnorm=interpolate uses the mean S of a layer's weights, but structure=kernel has blocks instead "
                "of S. Use ivt.batchnorm=recalibrate."
            )
        if options.interval is None and options.last == "skip":
            return (
                "interval=null has a single teleport, at the end, and last=skip omits it: ivt never teleports. Use "
                "ivt.last=teleport, or an interval."
            )
        return None

    def notice(self) -> str | None:
        return " ".join(filter(None, (self._width_notice(), self._idle_notice()))) or None

    def _width_notice(self) -> str:
        width = getattr(getattr(self.method.model, "backbone", None), "width", 0)
        if self.options.batchnorm != "map" or width <= MAX_TESTED_WIDTH:
            return ""
        return (
            f"ivt.batchnorm=map was tested with up to {MAX_TESTED_WIDTH} features; this network has {width}, and wide "
            "networks may diverge with it (docs/results.md). Use ivt.batchnorm=layer."
        )

    def _idle_notice(self) -> str:
        epochs, o = getattr(self.method.options, "epochs", None), self.options
        if epochs is None or o.interval is None or o.stages != ("main",):
            return ""
        skipped = o.last == "skip" and epochs % o.interval == 0
        if epochs // o.interval > skipped:
            return ""
        reason = ", and ivt.last=skip omits the one after the last epoch" if skipped else ""
        remedy = ", or ivt.last=teleport" if skipped else ""
        return (
            f"ivt changes nothing in this run: an increment has {epochs} epoch(s), with a teleport every {o.interval}"
            f"{reason}. Use a smaller ivt.interval{remedy}."
        )

    # Stages of the add-on -------------------------------------------------------------------------------

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        o = self.options
        main = self._main(stages)
        if task.index == 0:
            kernel = o.structure == "kernel"  # the shared F_1 is diagonal, so blocks need a pass of their own
            if o.first_fisher == "batch" and not kernel:
                return stages
            size = 1 if o.first_fisher == "sample" else main.batch_size
            groups = tuple(Group(group.prefixes, 0.0) for group in main.groups)
            return [*stages, self._measure(main, "fisher", size, groups, None)]
        if o.batchnorm != "recalibrate" or main.batchnorm == "frozen":  # statistics frozen by the method stay frozen
            return stages
        place = 1 + max(i for i, stage in enumerate(stages) if stage.role == "main")
        recalibrate = self._measure(main, "recalibrate", main.batch_size, (), self._recalibration_loss)
        return [*stages[:place], recalibrate, *stages[place:]]

    def _measure(self, main: Stage, name: str, batch_size: int, groups: tuple[Group, ...], loss: Any) -> Stage:
        return Stage(
            name=f"ivt-{name}",
            role="measure",
            epochs=1,
            batch_size=batch_size,
            groups=groups,
            source=main.source,
            views=main.views,
            batchnorm="frozen" if batch_size == 1 else main.batchnorm,
            owner=self.name,
            loss=loss or main.loss,
            eager="it averages BatchNorm's batch statistics" if name == "recalibrate" else None,
        )

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        if stage.owner != self.name:
            return None
        if stage.name == "ivt-fisher":
            self._set_anchor()
            self._save_statistics()
        else:
            self.recalibration = Recalibration(self.method.model)
        return self.method.begin_stage(task, self._main(self.method.stages(task)))

    @staticmethod
    def _main(stages: Sequence[Stage]) -> Stage:
        return next(stage for stage in stages if stage.role == "main")

    def _recalibration_loss(self, batch: Batch) -> Terms:
        """The main stage's loss in train mode: it determines the network's inputs (rotated or mixed images, ...)."""
        terms = (self._main(self.method.stages(self.method.task)).loss or self.method.loss)(batch)
        assert self.recalibration is not None
        self.recalibration.update()
        return terms

    def end_stage(self, task: Task, stage: Stage) -> None:
        if stage.name == "ivt-fisher":
            for name, buffer in running_statistics(self.method.model).items():
                buffer.copy_(self.buffers[name])
            self.buffers = {}
        if self.recalibration is not None and stage.name == "ivt-recalibrate":
            self.recalibration.finish()
            self.recalibration = None

    # Anchor and F ---------------------------------------------------------------------------------------

    def _set_anchor(self) -> None:
        self.method.model.requires_grad_(True)  # the previous stage may have frozen some; the next one sets it again
        self.plugin.begin_task()

    def _save_statistics(self) -> None:
        self.buffers = {name: buffer.clone() for name, buffer in running_statistics(self.method.model).items()}

    def begin_task(self, task: Task) -> None:
        self._set_anchor()
        if self.options.batchnorm in ("interpolate", *MAPS):
            self._save_statistics()

    def _collects(self, stage: Stage) -> bool:
        return stage.role == "main" or stage.name == "ivt-fisher"

    def _uses_fisher(self, task: Task, stage: Stage, epoch: int) -> bool:
        """Whether F of this epoch is used, by a teleport or at the end of the stage; others are not finalized."""
        return epoch == stage.epochs or self.teleports(task, stage, epoch)

    def teleports(self, task: Task, stage: Stage, epoch: int) -> bool:
        """Whether a teleport follows this epoch (from 1)."""
        if task.index == 0 or stage.owner is not None or stage.role not in self.options.stages:
            return False
        interval = stage.epochs if self.options.interval is None else self.options.interval
        return epoch % interval == 0 and not (epoch == stage.epochs and self.options.last == "skip")

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None:
        finalized = epoch == 1 or self._uses_fisher(task, stage, epoch - 1)  # a captured step needs open sums
        if self._collects(stage) and (finalized or self._uses_fisher(task, stage, epoch)):
            self.plugin.begin_epoch()

    def gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        if self._collects(stage):
            self.plugin.accumulate([p for name, p in parameters.items() if name.startswith("model.")])

    def end_task(self, task: Task) -> None:
        measured = self.options.first_fisher == "sample" or self.options.structure == "kernel"
        if task.index == 0 and not measured:
            assert self.world.base_fisher is not None
            self._set_anchor()
            self.plugin.set_fisher(self.world.base_fisher)
        self._statistics = self._task_statistics() if task.index > 0 else {}
        self.plugin.end_task()
        self.buffers = {}

    # Teleport -------------------------------------------------------------------------------------------

    def end_epoch(self, task: Task, stage: Stage, epoch: int, optimizer: torch.optim.Optimizer | None) -> None:
        if self._collects(stage) and self._uses_fisher(task, stage, epoch):
            self.plugin.end_epoch()
        if self.teleports(task, stage, epoch):
            self._interpolate_statistics()
            if self.options.batchnorm in MAPS and batchnorm_layers(self.method.model):
                self._teleport_maps(stage)
            else:
                self.plugin.teleport(self._excluded)
            if self.options.optimizer_state == "reset" and optimizer is not None:
                self._reset(optimizer)

    @property
    def _excluded(self) -> tuple[str, ...]:
        """Name prefixes of the parameters that are not teleported."""
        return ("head.",) if self.options.head == "keep" else ()

    def _reset(self, optimizer: torch.optim.Optimizer) -> None:
        """Zero the optimizer state of the teleported parameters."""
        known = self.plugin.cumulative.keys() & self.plugin.fisher.keys()
        names = {name for name in known if not name.startswith(self._excluded)}
        teleported = [p for name, p in self.method.model.named_parameters() if name in names]
        state = [t for parameter in teleported for t in optimizer.state.get(parameter, {}).values()]
        if state:
            torch._foreach_zero_(state)

    def _interpolate_statistics(self) -> None:
        """buffer <- old + mean(S) (buffer - old), with S of the layer's weight."""
        if self.options.batchnorm != "interpolate":
            return
        for name, layer in batchnorm_layers(self.method.model).items():
            weight_scale = self._scale_of(f"{name}.weight")
            if weight_scale is None:
                continue
            s = weight_scale.mean()
            for kind in STATISTICS:
                buffer, old = getattr(layer, kind), self.buffers[f"{name}.{kind}"]
                buffer.copy_(old + s * (buffer - old))

    def _scale_of(self, name: str) -> Tensor | None:
        """S of a parameter; None for new and frozen ones, which are not teleported."""
        old, new = self.plugin.cumulative.get(name), self.plugin.fisher.get(name)
        return None if old is None or new is None else scale(old.to(new.device), new)

    def _probe(self, stage: Stage) -> None:
        """Run the network on the images that define the maps; not if the stage freezes BatchNorm."""
        if stage.batchnorm == "train":
            self.world.probe(PROBE_BATCHES)

    @torch.no_grad()
    def _teleport_maps(self, stage: Stage) -> None:
        """A teleport that interpolates the maps of the BatchNorm layers instead of their weights and biases."""
        model, plugin, probe = self.method.model, self.plugin, partial(self._probe, stage)
        norms = batchnorm_layers(model)
        moments = input_moments(norms.values(), probe)
        layers = preceding_layers(model, partial(self.world.probe, 1)) if self.options.batchnorm == "layer" else {}
        names = {module: name for name, module in model.named_modules()}
        maps: dict[Any, Affine] = {}
        folded: dict[Any, tuple[str, Folded]] = {}
        for name, norm in norms.items():
            weight_scale, bias_scale = self._scale_of(f"{name}.weight"), self._scale_of(f"{name}.bias")
            if weight_scale is None or bias_scale is None:
                continue
            device = norm.weight.device
            weight, bias = (plugin.anchor[f"{name}.{kind}"].to(device) for kind in ("weight", "bias"))
            mean, var = (self.buffers[f"{name}.{kind}"] for kind in STATISTICS)
            old = Affine.from_batchnorm(weight, bias, mean, var, norm.eps)
            mean, var = moments.get(norm, (norm.running_mean, norm.running_var))
            new = Affine.from_batchnorm(norm.weight, norm.bias, mean, var, norm.eps)
            maps[norm] = new.teleported(old, (weight_scale, bias_scale))
            filters = f"{names[layers[norm]]}.weight" if norm in layers else ""
            if filters in plugin.cumulative and filters in plugin.fisher:
                anchor = plugin.anchor[filters].to(device)
                folded[norm] = filters, Folded(layers[norm].weight, anchor, new, old, weight_scale)
        plugin.teleport(self._excluded, {filters: product.anchor for filters, product in folded.values()})
        for norm, (_, product) in folded.items():
            maps[norm] = maps[norm]._replace(slope=product.unfold())
        if maps:
            write_maps(maps, probe)

    # State and statistics -------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        return dict(self.plugin.state_dict()) | {f"buffers/{name}": tensor for name, tensor in self.buffers.items()}

    def snapshot(self) -> dict[str, Tensor]:
        wanted = self.options.snapshot_fisher
        return self.state() if (not self.method.pretrained if wanted is None else wanted) else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.buffers = {n.removeprefix("buffers/"): t.clone() for n, t in state.items() if n.startswith("buffers/")}
        self.plugin.load_state_dict({n: t for n, t in state.items() if not n.startswith("buffers/")})

    def statistics(self) -> dict[str, Any]:
        return self._statistics

    @torch.no_grad()
    def _task_statistics(self) -> dict[str, Any]:
        """By part of the network: mean S with the last epoch's F_t, F_t / Fbar_{t-1}, distance from the anchor."""
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
        statistics = {}
        for part, rows in parts.items():
            s, f_new, f_old, moved_square, count = (
                float(torch.stack(column).sum()) for column in zip(*rows, strict=True)
            )
            statistics[part] = {
                "scale": round(s / count, 5),
                "fisher_ratio": float(f"{f_new / f_old:.5g}") if f_old > 0 else None,
                "distance": float(f"{moved_square**0.5:.5g}"),
            }
        return statistics
