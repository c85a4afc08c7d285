"""The interfaces that methods, add-ons and the engine share. Read this first.

How a run works:

1. The stream splits a data set into `Task`s. Labels are positions in the class order.
2. For each task, a `Method` returns the `Stage`s to train and the loss of each.
3. The engine trains each stage on `Batch`es that it fetches from a `Source`. `AddOn`s are called at fixed points.
4. Evaluation adds one row to the accuracy matrix.

A method contains no training loop, and an add-on works with any method: they are combined by name in a configuration.

A loss is static tensor code: no `.item()`, no boolean indexing, no branch on a tensor's value; use masks. So the engine
can capture a whole training step as one CUDA graph, and the same code runs eagerly on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

Role = Literal["main", "balance", "align", "path", "measure"]
Terms = Mapping[str, Tensor]
Loss = Callable[["Batch"], Terms]


# Data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One step of the stream. Labels are positions in the class order, so a task's classes are a range."""

    index: int  # 0 is the base task
    first: int  # label of the task's first class
    last: int  # one more than the label of its last class

    @property
    def n_old(self) -> int:
        """The number of classes of earlier tasks. Samples of old classes are those with `labels < n_old`."""
        return self.first

    @property
    def n_new(self) -> int:
        return self.last - self.first

    @property
    def n_seen(self) -> int:
        """The number of classes of this task and earlier ones."""
        return self.last

    @property
    def classes(self) -> range:
        return range(self.first, self.last)


class Batch(NamedTuple):
    """Samples fetched from a source: one or more views of each, its label and its index.

    Old samples are those with `labels < task.n_old`, never "those from the exemplar memory". So the oracle, which
    trains on all past images, needs no special case.
    """

    views: tuple[Tensor, ...]
    labels: Tensor
    indices: Tensor

    @property
    def images(self) -> Tensor:
        """The first view."""
        return self.views[0]


@runtime_checkable
class Source(Protocol):
    """Rows on the device that are fetched by index, in static tensor code.

    The current task, the exemplar memory and the oracle's past are index tensors into the same source.
    """

    labels: Tensor  # label of every row, on the device
    row: tuple[int, ...]  # shape of a stored row

    def fetch(self, indices: Tensor, generator: torch.Generator | None, views: Sequence[str]) -> Batch:
        """The named views of the given rows. `generator` may be None only for views that draw nothing."""
        ...


class Output(NamedTuple):
    """The output of a model: feature maps of its stages, pooled features (float32) and logits (float32)."""

    maps: tuple[Tensor, ...]
    features: Tensor
    logits: Tensor


class Input(NamedTuple):
    """The input that a pre-trained network expects: squares of `size` pixels, (x - mean) / std with x in [0, 1]."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


# Stages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer: every trainable parameter whose name starts with one of the prefixes.

    Names are those of `Method.named_parameters()`, such as `model.backbone` or `model.head.blocks.2`. Parameters of an
    add-on are called `addons.NAME.…`. A prefix ends at a dot: `blocks.1` does not match `blocks.10`.
    """

    prefixes: tuple[str, ...]
    lr: float
    weight_decay: float = 0.0

    def owns(self, name: str) -> bool:
        return any(name == prefix or name.startswith(prefix + ".") for prefix in self.prefixes)


@dataclass(frozen=True)
class Optimizer:
    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factors by epoch, as data.

    `spu_cosine` is that of SPU's code: 0 in epoch 0, then (1 + cos(pi (e - 1) / (cycle - 1))) / 2 in epoch e.
    """

    kind: Literal["constant", "cosine", "steps", "spu_cosine"] = "constant"
    milestones: tuple[int, ...] = ()  # epochs, for "steps"
    gamma: float = 0.1
    cycle: int | None = None  # epochs, for "spu_cosine"; None: those of the stage

    def factors(self, epochs: int) -> Tensor:
        """A float32 tensor with one factor per epoch."""
        epoch = torch.arange(epochs, dtype=torch.float64)
        if self.kind == "cosine":
            factors = 0.5 * (1 + torch.cos(torch.pi * epoch / max(epochs, 1)))
        elif self.kind == "spu_cosine":
            length = max((epochs if self.cycle is None else self.cycle) - 1, 1)
            factors = 0.5 * (1 + torch.cos(torch.pi * (epoch - 1) / length)) * (epoch >= 1)
        elif self.kind == "steps":
            passed = sum((epoch >= milestone).double() for milestone in self.milestones)
            factors = self.gamma ** (passed + torch.zeros_like(epoch))
        else:
            factors = torch.ones_like(epoch)
        return factors.float()


@dataclass(frozen=True)
class Stage:
    """A period of training, as data. Add-ons select stages by their role.

    A stage without an optimizer is a measuring pass. With parameter groups it runs the backward pass, so that
    `gradients` hooks can collect gradients, but no optimizer step. Without groups it runs its loss without gradients,
    for example to re-estimate BatchNorm's statistics.
    """

    name: str
    role: Role
    epochs: int
    batch_size: int
    groups: tuple[Group, ...] = ()
    optimizer: Optimizer | None = None
    schedule: Schedule = Schedule()
    source: str = "train"  # a name in `World.sources`
    views: tuple[str, ...] = ("train",)
    batchnorm: Literal["train", "frozen"] = "train"
    eager: str | None = None  # why this stage cannot be captured as a CUDA graph, if it cannot
    owner: str | None = None  # the add-on that inserted it; None: the method
    loss: Loss | None = field(default=None, compare=False)  # None: `Method.loss`

    def describe(self) -> dict[str, Any]:
        """Everything that determines the stage's training, as JSON values: part of the key of a shared base."""
        values: dict[str, Any] = dict(vars(self))
        values["groups"] = [vars(group) for group in self.groups]
        values["optimizer"] = None if self.optimizer is None else vars(self.optimizer)
        values["schedule"] = vars(self.schedule)
        values["eager"] = self.eager is not None
        values["loss"] = None if self.loss is None else getattr(self.loss, "__qualname__", repr(self.loss))
        return values

    def replace(self, **changes: Any) -> Stage:
        return replace(self, **changes)


# The surroundings of a method or add-on -----------------------------------------------------------------------


def no_probe(batches: int) -> None:
    """`World.probe` while no stage is being trained: there are no batches."""


@dataclass
class World:
    """Engine services available to a method or an add-on. The engine sets all fields; `add_source` is the only way to
    change something.
    """

    device: torch.device
    tasks: tuple[Task, ...]  # the whole stream, including tasks that `stop_after` leaves out
    sources: Mapping[str, Source]  # "train", and those added by `add_source`
    generator: torch.Generator  # for all draws; reseeded at every epoch and before begin and end hooks
    image_shape: tuple[int, int, int]  # what the network sees
    oracle: bool = False  # whether every stage trains on all images of the classes seen
    class_names: tuple[str, ...] = ()  # by label; do not use those of future tasks
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # the run's mixed precision
    # `probe(n)` evaluates the stage's loss once, on up to n batches of the current epoch put together, without
    # gradients and without a step: for add-ons that have changed weights and measure statistics in `end_epoch`. Every
    # call and every process sees the same samples and the same draws. The modules are in the stage's mode, so BatchNorm
    # may update its running statistics, and `generator` is reseeded.
    probe: Callable[[int], None] = no_probe
    # The diagonal batch Fisher of the base task's last epoch, by parameter name of `Method.model`. For add-ons, in
    # `end_task` of the base task; None at any other time.
    base_fisher: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        self.sources = MappingProxyType(dict(self.sources))

    @property
    def train(self) -> Source:
        """The training images."""
        return self.sources["train"]

    def add_source(self, name: str, source: Source) -> None:
        """Add a source, such as cached features, or replace one that was added before.

        A stage uses it with `Stage.source=name`. Sources are not saved: add it again in `Method.restored`.
        """
        if name == "train":
            raise ValueError('the source "train" holds the training images and cannot be replaced; use another name')
        self.sources = MappingProxyType({**self.sources, name: source})


# Methods and add-ons ------------------------------------------------------------------------------------------


class Method(nn.Module):
    """A method of class-incremental learning: losses and stages, never a training loop.

    The engine calls, for each task: `grow`, `begin_task`; for each stage `begin_stage`, training with `loss` and
    `gradients`, `end_stage`; then `end_task`, `begin_evaluation` and `forward` on the test images. Hooks run once. A
    resumed run does not repeat those that have run; instead it calls `grow` for every task so far, loads the state and
    calls `restored`.

    The state is `state_dict()`, including the teacher, plus `store`. The network changes by adding named parameters,
    never by renaming or resizing them: `head.blocks[t]` holds the rows of task t. All random draws use
    `self.world.generator`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]  # title and address
    Options: ClassVar[type]  # a subclass of `config.Options`
    exemplars: ClassVar[bool] = False  # whether it stores images of old classes
    joint: ClassVar[bool] = False  # whether all classes are trained as one task, whatever the stream
    pretrained: ClassVar[bool] = False  # whether `model` starts from pre-trained weights; then tasks have equal sizes
    trains: ClassVar[bool] = True  # whether it has any stages
    own_terms: ClassVar[tuple[str, ...]] = ("ce",)  # loss terms of the main stage that classify the task's samples
    later_settings: ClassVar[tuple[str, ...]] = ()  # options that do not affect the base task's own stages
    frozen_encoder: ClassVar[bool] = False  # whether `encode` never changes, so that test images are encoded once

    task: Task  # the current one; the engine sets it before `grow`
    model: nn.Module  # the deployed network: add-ons teleport, merge and interpolate its parameters
    teacher: nn.Module | None  # the model before this task, always in eval mode
    auxiliary: nn.Module  # trained, but discarded after the task: add-ons ignore it
    store: dict[str, Tensor]  # everything else to save: prototypes, statistics, exemplar indices, masks

    def __init__(self, options: Any, world: World) -> None:
        super().__init__()
        self.options = options
        self.world = world
        self.teacher = None
        self.auxiliary = nn.Module()
        self.store = {}

    @classmethod
    def input(cls, options: Any) -> Input | None:
        """The images that the network expects. None: those of the data set, with its normalization."""
        return None

    @classmethod
    def uses_batch_contrast(cls, options: Any) -> bool:
        """Whether the loss compares the samples of a batch, so that it has no gradient on a single sample."""
        return False

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def memory(self) -> Mapping[str, int]:
        """The least number of bytes that an option makes the largest tensor take, by option.

        A run whose options do not fit into the device's memory is refused before it trains.
        """
        return {}

    # Hooks, in the order in which they are called -------------------------------------------------------

    def grow(self, task: Task) -> None:
        """Add the structure for the task and copy the teacher. No data: resumed runs and the study call it, too."""

    def begin_task(self, task: Task) -> None:
        """Initialize values from data: imprint new rows, compute statistics."""

    def stages(self, task: Task) -> list[Stage]:
        """The stages of the task: a pure function of the task and the options."""
        raise TypeError(f"{type(self).__name__} does not define stages")

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        """Prepare the stage and return the indices of the rows it trains on."""
        raise TypeError(f"{type(self).__name__} does not define begin_stage, needed for stage {stage.name!r}")

    def loss(self, batch: Batch) -> Terms:
        """Named loss terms. The engine sums them for the backward pass and logs each one."""
        raise TypeError(f"{type(self).__name__} does not define a loss")

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Transform `.grad` in place, before add-ons and the optimizer see it (PODNet's clamp, SPU's mask)."""

    def end_stage(self, task: Task, stage: Stage) -> None: ...

    def end_task(self, task: Task) -> None:
        """The weights are final: fold layers, select exemplars, compute prototypes."""

    def begin_evaluation(self, task: Task) -> None:
        """Compute what the classifiers need from the current weights: class means, text features."""

    def refresh(self, task: Task) -> None:
        """An add-on has replaced the weights after the task's stages: repeat selections that depend on them."""

    def restored(self) -> None:
        """Weights and store were loaded from a file: rebuild what is not saved, such as added sources."""

    # Classification -------------------------------------------------------------------------------------

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The names of the classifiers in the result of `forward`, in its order. The first one is reported."""
        return ("cnn",)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Scores over the classes seen, by classifier."""
        raise TypeError(f"{type(self).__name__} does not define forward")

    def class_logits(self, logits: Tensor) -> Tensor:
        """One logit per class seen, selected from the outputs of `model`.

        The identity unless the head has several outputs per class, as with rotation labels. Add-ons and the study
        use it to classify with any weights of `model`.
        """
        return logits

    def encode(self, images: Tensor) -> Tensor:
        """With `frozen_encoder`: the part of `forward` that never changes."""
        raise TypeError(f"{type(self).__name__} does not define encode")

    def classify(self, encoded: Tensor) -> dict[str, Tensor]:
        """With `frozen_encoder`: the rest of it. `forward(images)` equals `classify(encode(images))`."""
        raise TypeError(f"{type(self).__name__} does not define classify")


class AddOn:
    """Changes the training of any method through hooks, such as IVT or a merge of weights.

    Begin hooks are called on the method first, then on the add-ons; end hooks on the add-ons first, so that the method
    selects exemplars and prototypes with the final weights. With several add-ons, hooks are called in the order given.

    All runs share the method's stages of the base task, so an add-on must not change them. There it is called only for
    `plan`, for stages that it appends, for `end_task` and for what follows it (`statistics`, `deployed`, `state`). From
    the second task on it is called for everything. `begin_epoch` may run once more before a captured stage.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    Options: ClassVar[type]

    def __init__(self, options: Any, world: World, method: Method) -> None:
        self.options = options
        self.world = world
        self.method = method

    @classmethod
    def incompatibility(cls, method: type[Method], others: Sequence[str]) -> str | None:
        """Why the add-on cannot be combined with the method, or follow those other add-ons. None if it can."""
        return None

    @classmethod
    def incompatible_options(cls, options: Any, method: type[Method], method_options: Any) -> str | None:
        """Why these options cannot be combined with the method and its options. None if they can."""
        return None

    def notice(self) -> str | None:
        """A warning about options that are valid but probably not intended, shown before training."""
        return None

    def memory(self) -> Mapping[str, int]:
        """As `Method.memory`."""
        return {}

    # Hooks, in the order in which they are called -------------------------------------------------------

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        """The stages with those of the add-on inserted (`owner=self.name`). In the base task only at the end."""
        return stages

    def begin_task(self, task: Task) -> None: ...

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        """The rows of a stage that it owns; None for other stages."""
        return None

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None:
        """`epoch` counts from 1, as in the paper. Allocate or zero what `gradients` accumulates."""

    def gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        """Read or change `.grad` in each step, after the method's transform. Part of the captured step."""

    def uses_own_gradients(self, stage: Stage) -> bool:
        """Whether `own_gradients` is to be called in the epoch that begins, at the cost of a second backward pass."""
        return False

    def own_gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        """Read `.grad` of the method's `own_terms` alone, before each step's other gradients. Part of the step."""

    def end_epoch(self, task: Task, stage: Stage, epoch: int, optimizer: torch.optim.Optimizer | None) -> None:
        """The epoch's steps are queued; change weights here. Without host synchronization."""

    def end_stage(self, task: Task, stage: Stage) -> None: ...

    def end_task(self, task: Task) -> None:
        """The task's stages are done. For the base task, `world.base_fisher` is available."""

    def deployed(self, task: Task) -> Mapping[str, Tensor] | None:
        """Weights of `method.model` to evaluate and save as a snapshot in place of the trained ones, if any."""
        return None

    # State ----------------------------------------------------------------------------------------------

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Trainable parameters of its own stages, by name."""
        return ()

    def state(self) -> dict[str, Tensor]:
        """Everything needed to resume, as flat tensors. Sums that start at `begin_epoch` are not needed."""
        return {}

    def snapshot(self) -> dict[str, Tensor]:
        """The part of `state` to save with each task's snapshot; override it if all of it is too large."""
        return self.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. The structure of the method has been grown before."""

    def statistics(self) -> dict[str, Any]:
        """Plain numbers about the task that ended, for the record."""
        return {}
