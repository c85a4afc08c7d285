"""The contracts every room shares: read this first.

A run goes: the stream cuts a data set into `Task`s; for each task a `Method` names its `Stage`s; the engine
trains each stage on `Batch`es fetched from a `Source`, while `AddOn`s listen; evaluation fills one row of the
accuracy matrix. Losses are static tensor code (no `.item()`, no boolean indexing, no branch on a value), so
that the engine can capture a whole step as one CUDA graph; the same code runs eagerly on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

Role = Literal["main", "balance", "align", "path", "measure"]
Terms = Mapping[str, Tensor]
Loss = Callable[["Batch"], Terms]


@dataclass(frozen=True)
class Task:
    """One step of the stream. Labels are positions in the class order, so a task's classes are a range."""

    index: int  # 0 is the base task
    first: int  # label of the task's first class; also the number of old classes
    last: int  # one past the label of its last class; also the number of classes seen
    of: int  # number of tasks in the run

    @property
    def n_old(self) -> int:
        return self.first

    @property
    def n_new(self) -> int:
        return self.last - self.first

    @property
    def n_seen(self) -> int:
        return self.last

    @property
    def classes(self) -> range:
        return range(self.first, self.last)


class Batch(NamedTuple):
    """What a source hands out. Old samples are those with `labels < task.n_old`, never those from memory."""

    views: tuple[Tensor, ...]
    labels: Tensor
    indices: Tensor

    @property
    def images(self) -> Tensor:
        return self.views[0]


@runtime_checkable
class Source(Protocol):
    """Rows that can be fetched by index, on the device, in static tensor code."""

    labels: Tensor  # label of every row, on the device
    row: tuple[int, ...]  # shape of a row as it is stored

    def fetch(self, indices: Tensor, generator: torch.Generator | None, views: Sequence[str]) -> Batch:
        """The named views of the given rows; `generator` may be None only for views that draw nothing."""
        ...


class Output(NamedTuple):
    """What a model returns: stage maps, pooled features (float32), logits (float32)."""

    maps: tuple[Tensor, ...]
    features: Tensor
    logits: Tensor


class Input(NamedTuple):
    """The images a pre-trained network was made for: squares of `size` pixels, (x - mean) / std of x in [0, 1]."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """A parameter group: every trainable parameter of the method whose dotted name starts with a prefix.

    Names are those of `Method.named_parameters()`, such as `model.backbone` or `model.head.blocks.2`;
    an add-on's own parameters are called `addons.NAME.…`.
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

    `spu_cosine` is 0 in the first epoch; epoch e from 1 on has (1 + cos(pi (e - 1) / (cycle - 1))) / 2.
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
    """A stretch of training, as data. Without an optimizer it is a measuring pass.

    A measuring pass with groups runs backward (so that `gradients` hooks have something to collect) and steps
    nothing; one without groups runs its loss without gradients (BatchNorm recalibration).
    """

    name: str
    role: Role
    epochs: int
    batch_size: int
    groups: tuple[Group, ...] = ()
    optimizer: Optimizer | None = None
    schedule: Schedule = Schedule()
    source: str = "train"
    views: tuple[str, ...] = ("train",)
    batchnorm: Literal["train", "frozen"] = "train"
    eager: str | None = None  # why this stage cannot be captured, where it cannot
    owner: str | None = None  # the add-on that inserted it; None: the method's own
    loss: Loss | None = field(default=None, compare=False)  # None: the method's `loss`

    def describe(self) -> dict[str, Any]:
        """A plain, hashable-by-JSON account of the stage, for keys and records."""
        skip = {"loss"}
        plain: dict[str, Any] = {k: v for k, v in vars(self).items() if k not in skip}
        plain["groups"] = [vars(g) for g in self.groups]
        plain["optimizer"] = None if self.optimizer is None else vars(self.optimizer)
        plain["schedule"] = vars(self.schedule)
        plain["loss"] = None if self.loss is None else getattr(self.loss, "__qualname__", repr(self.loss))
        return plain

    def replace(self, **changes: Any) -> Stage:
        return replace(self, **changes)


def no_probe(batches: int) -> None:
    """Where no stage is under way there is nothing to see."""


@dataclass
class World:
    """What a method or add-on may use of its surroundings. The engine fills it; nothing flows back."""

    device: torch.device
    tasks: tuple[Task, ...]
    sources: Mapping[str, Source]  # "train" always; `add_source` adds others
    generator: torch.Generator  # reseeded by the engine at every hook and epoch; draws go through it
    image_shape: tuple[int, int, int]
    oracle: bool = False
    class_names: tuple[str, ...] = ()  # by label; those of classes to come are nobody's business yet
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # the engine's mixed precision
    # The stage's loss (which keeps no state) on so many batches of its epoch at most, as one, without gradients or
    # steps: for add-ons that have moved weights and measure. All ranks see the same, and the same each time.
    probe: Callable[[int], None] = no_probe

    # The diagonal batch Fisher of the base task's last epoch, by parameter name of `method.model`. Available to
    # `AddOn.end_task` of the base task, None at any other time.
    base_fisher: Mapping[str, Tensor] | None = None

    @property
    def train(self) -> Source:
        return self.sources["train"]

    def add_source(self, name: str, source: Source) -> None:
        """Register a source of the method's own, such as cached features, or replace an earlier one of that name.

        A stage selects it with `Stage.source=name`. The training images stay what the engine loaded.
        """
        if name == "train":
            raise ValueError('the source "train" holds the training images and cannot be replaced; use another name')
        self.sources = {**self.sources, name: source}


class Method(nn.Module):
    """Losses and stages, never a loop. State is `state_dict()` plus `store`, the teacher included.

    Order of a task: `grow`, `begin_task`, then for each stage `begin_stage`, training, `end_stage`, and
    `end_task`, `begin_evaluation`. Begin hooks run once and are not run again on resume.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]  # title and address
    Options: ClassVar[type]
    exemplars: ClassVar[bool] = False  # whether it keeps old images
    joint: ClassVar[bool] = False  # whether all classes come as one task, whatever the stream
    pretrained: ClassVar[bool] = False  # whether `model` knows something when it is made: then tasks are all equal
    trains: ClassVar[bool] = True  # whether it has stages at all
    frozen_encoder: ClassVar[bool] = False  # whether `encode` never changes: test images pass once

    task: Task  # the one under way; the engine sets it before `grow`
    model: nn.Module  # what is deployed: teleported, merged, interpolated
    teacher: nn.Module | None  # the model before this task, always in eval mode
    auxiliary: nn.Module  # trained, but lives one task: never anchored
    store: dict[str, Tensor]

    def __init__(self, options: Any, world: World) -> None:
        super().__init__()
        self.options = options
        self.world = world
        self.teacher = None
        self.auxiliary = nn.Module()
        self.store = {}

    @classmethod
    def input(cls, options: Any) -> Input | None:
        """What the views have to hand out; None: the data set's own size and normalization."""
        return None

    @classmethod
    def uses_batch_contrast(cls, options: Any) -> bool:
        """Whether the loss compares the samples of a batch, so that a batch of one has no gradient."""
        return False

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def grow(self, task: Task) -> None:
        """Structure for the task, no data; a teacher is split off here. Resume and the lab call it too."""

    def begin_task(self, task: Task) -> None:
        """Values: imprint the new rows, take statistics."""

    def stages(self, task: Task) -> list[Stage]:
        """A pure function of the task and the options."""
        raise TypeError(f"{type(self).__name__} names no stages")

    def begin_stage(self, task: Task, stage: Stage) -> Tensor:
        """Prepare the stage and return the indices it trains on."""
        raise TypeError(f"{type(self).__name__} gives stage {stage.name!r} no indices")

    def loss(self, batch: Batch) -> Terms:
        """Named terms; the engine sums and logs them."""
        raise TypeError(f"{type(self).__name__} has no loss")

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Transform `.grad` in place (PODNet's clamp, SPU's mask) before add-ons and the optimizer see it."""

    def end_stage(self, task: Task, stage: Stage) -> None: ...

    def end_task(self, task: Task) -> None:
        """Fold, herd, take prototypes: the weights are final now."""

    def restored(self) -> None:
        """Weights and store were loaded from a file: make again what is kept elsewhere (rows added to a source)."""

    def refresh(self, task: Task) -> None:
        """An add-on has replaced the weights after the task's stages: choose again what the old ones chose."""

    def begin_evaluation(self, task: Task) -> None:
        """Class means, text features: whatever the classifiers need, from the weights at hand."""

    def class_logits(self, logits: Tensor) -> Tensor:
        """One logit per class seen, selected from the outputs of `model`.

        The identity unless the head has several outputs per class, as with rotation labels. Add-ons and the study
        use it to classify with any weights of `model`.
        """
        return logits

    def encode(self, images: Tensor) -> Tensor:
        """The part of `forward` that never changes, of a method that `rests`."""
        raise TypeError(f"{type(self).__name__} has no part that rests")

    def classify(self, encoded: Tensor) -> dict[str, Tensor]:
        """The other part: `forward(images)` is `classify(encode(images))`."""
        raise TypeError(f"{type(self).__name__} has no part that rests")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Scores over the classes seen, by classifier; the first one is the reported one."""
        raise TypeError(f"{type(self).__name__} has no classifier")


class AddOn:
    """Listens to the engine; composes with any method by name.

    The base task's own stages belong to the method alone, so that every run can share them: there an add-on
    hears only `plan` (stages it appends), those stages, and `end_task`. From the second task on it hears all.
    Begin hooks: method, then add-ons; end hooks: add-ons, then method.
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
        """Why this add-on makes no sense with that method, or after those add-ons; None where it does."""
        return None

    @classmethod
    def incompatible_options(cls, options: Any, method: type[Method], method_options: Any) -> str | None:
        """Why these options make no sense with that method and its options; None where they do."""
        return None

    def notice(self) -> str | None:
        """What is possible with these options, but hardly meant: told before anything is trained."""
        return None

    def plan(self, task: Task, stages: list[Stage]) -> list[Stage]:
        """The stages with its own inserted (`owner` set to its name); in the base task only at the end."""
        return stages

    def begin_task(self, task: Task) -> None: ...

    def begin_stage(self, task: Task, stage: Stage) -> Tensor | None:
        """Returns the indices of a stage that it owns, None for others."""
        return None

    def begin_epoch(self, task: Task, stage: Stage, epoch: int) -> None: ...

    def gradients(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        """Runs inside the (captured) step, after the method's transform: device code only."""

    def end_epoch(self, task: Task, stage: Stage, epoch: int, optimizer: torch.optim.Optimizer | None) -> None:
        """`epoch` counts from 1, as in the paper. No host synchronization here."""

    def end_stage(self, task: Task, stage: Stage) -> None: ...

    def end_task(self, task: Task) -> None:
        """The task's stages are done. On the base task, `world.base_fisher` is available."""

    def deployed(self, task: Task) -> Mapping[str, Tensor] | None:
        """Weights (names of `method.model`) to evaluate and snapshot instead of the trained ones, if any."""
        return None

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Trainable parameters of its own stages."""
        return ()

    def state(self) -> dict[str, Tensor]:
        """Everything it needs to go on, as flat tensors. What its step accumulates starts at `begin_epoch`."""
        return {}

    def snapshot(self) -> dict[str, Tensor]:
        """What a task's snapshot keeps of it: all it needs to go on, unless that is too large to keep every time."""
        return self.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore from what `state` gave; called once the structure has been grown."""

    def statistics(self) -> dict[str, Any]:
        """Plain numbers about the task just ended, for the record."""
        return {}
