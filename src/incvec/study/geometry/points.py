"""Accuracy and loss of many states at once: every state is a weighted sum of a few given ones.

A point is a row of weights over the given states: (1 - x, x) on a line, three weights on a plane. There are three
ways to the same numbers:

- `graph`, on a GPU: the sum of the states and all test images are one CUDA graph, replayed for each point.
- `vmap`, on a CPU with tiny images: many points a launch by `functional_call`, in pieces that fit the memory. With real
  images a convolution with other weights for every point is slower than one point at a time.
- `loop`, one launch after the other: everywhere else, for what goes through neither, and where BatchNorm is measured
  anew at each point.

A point that is one of the given states itself is always evaluated alone and as it is, in the pieces of a run's own
evaluation: so the ends of a path have the snapshots' own accuracies, exactly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from incvec.addons.merging import class_outputs
from incvec.data import ImageSource
from incvec.data.source import chunk
from incvec.errors import DataError
from incvec.nets.heads import ProxyHead
from incvec.study.geometry.paths import State, blend
from incvec.study.geometry.snapshots import Rebuilt

Way = Literal["auto", "graph", "vmap", "loop"]
Statistics = Literal["interpolate", "recalibrate"]
TINY = 256  # values of an image up to which a CPU gains by many points a launch
SHARE = 1024  # bytes set aside for each value of an image and point: some sixteen maps of sixteen channels
CPU_BYTES = 1 << 30
RECALIBRATION = 2000  # training images
_norm = nn.modules.batchnorm._BatchNorm


class Scores(NamedTuple):
    """By point and task: percent right, and mean cross-entropy."""

    accuracy: list[list[float]]
    loss: list[list[float]]

    def pooled(self, sizes: Sequence[int], tasks: Sequence[int]) -> tuple[list[float], list[float]]:
        """Over the test images of some tasks, which have so many of them: accuracies and losses by point."""
        total = sum(sizes[t] for t in tasks)
        found = [[sum(sizes[t] * row[t] for t in tasks) / total for row in rows] for rows in self]
        return found[0], found[1]


class Scorer(nn.Module):
    """images -> one output a class, and the factor it has in the loss (PODNet's learned scale; 1 elsewhere)."""

    def __init__(self, model: nn.Module, n_classes: int) -> None:
        super().__init__()
        self.model = model
        self.n_classes = n_classes

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = class_outputs(self.model(images).logits, self.n_classes)
        head = getattr(self.model, "head", None)
        return logits, head.scale if isinstance(head, ProxyHead) else logits.new_ones(())


class Piece(NamedTuple):
    """Some test images, their labels, and a 1 in the column of the task each belongs to."""

    images: Tensor
    labels: Tensor
    member: Tensor


@dataclass
class Points:
    """Evaluates weighted sums of states of one rebuilt method, on the test images of its tasks so far.

    `images` takes that many of each task only, evenly spaced over its rows (which lie class by class), so that
    all classes are there alike. `tasks` are the tasks looked at, all up to the one the method has grown for unless
    given; `n_classes` is how many classes are told apart (all of them unless given).
    """

    rebuilt: Rebuilt
    images: int | None = None
    tasks: Sequence[int] | None = None
    n_classes: int | None = None
    way: Way = "auto"
    batchnorm: Statistics = "interpolate"

    def __post_init__(self) -> None:
        parts = self.rebuilt.parts
        self.chosen = list(range(self.rebuilt.task.index + 1)) if self.tasks is None else list(self.tasks)
        rows = [parts.test.rows_of(parts.tasks[t].first, parts.tasks[t].last) for t in self.chosen]
        self.sizes = [len(each) for each in rows]  # what tasks weigh among one another, however many are looked at
        if self.images is not None:
            rows = [spaced(each, self.images) for each in rows]
        self.rows = torch.cat(rows)
        self.counts = [len(each) for each in rows]
        task = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(self.counts)).to(self.rows.device)
        self.member = F.one_hot(task, len(rows)).double()
        self.scorer = Scorer(self.rebuilt.model, self.rebuilt.task.n_seen).eval()
        self.buffers = {f"model.{name}" for name, _ in self.rebuilt.model.named_buffers()}
        self.used = self.way

    # Many points ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self, states: Sequence[State], weights: Sequence[Sequence[float]], told: Callable[[int], None] | None = None
    ) -> Scores:
        """Scores at sum_k w_k states[k] for every row w of `weights`; `told` hears how many points are done."""
        device = self.rebuilt.parts.world.device
        corners = [{f"model.{n}": t.to(device) for n, t in state.items()} for state in states]
        right = torch.zeros(len(weights), len(self.counts), dtype=torch.float64, device=device)
        lost = torch.zeros_like(right)
        alone = [i for i, row in enumerate(weights) if sum(w != 0 for w in row) == 1 and 1 in row]
        inner = sorted(set(range(len(weights))) - set(alone))
        done = 0

        def keep(rows: Sequence[int], found: tuple[Tensor, Tensor]) -> None:
            nonlocal done
            right[rows], lost[rows] = found[0], found[1]
            done += len(rows)
            if told is not None:
                told(done)

        for i in alone:
            keep([i], self._one(dict(corners[list(weights[i]).index(1)]), self._pieces()))
        if self.batchnorm == "recalibrate":
            self.used = "loop"
        elif self.used == "auto":
            self.used = self._quickest()
        if inner and self.used == "graph":
            try:
                replay = self._captured(corners, [weights[i] for i in inner])
            except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                self._one_by_one(error)
            else:
                for number, i in enumerate(inner):
                    keep([i], replay(number))
                    if told is not None and device.type == "cuda":
                        torch.cuda.current_stream().synchronize()  # a point is done once the device has done it
                inner = []
        width = self._width(len(inner))
        while inner and self.used == "vmap":
            try:
                keep(inner[:width], self._many(corners, [weights[i] for i in inner[:width]]))
            except torch.OutOfMemoryError:
                if width == 1:
                    raise
                width //= 2
                continue
            except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                self._one_by_one(error)
                break
            inner = inner[width:]
        for i in inner:
            keep([i], self._one(self._sum(corners, weights[i]), self._pieces()))
        counts = torch.tensor(self.counts, dtype=torch.float64, device=device)
        return Scores((100 * right / counts).tolist(), (lost / counts).tolist())

    def _quickest(self) -> Way:
        """By the device and the images' size, so that numbers do not depend on a clock."""
        world = self.rebuilt.parts.world
        size = torch.Size(world.image_shape).numel()
        if world.device.type == "cuda":
            return "graph" if 4 * size * len(self.rows) <= torch.cuda.mem_get_info(world.device)[0] // 4 else "loop"
        return "vmap" if size <= TINY else "loop"

    def _one_by_one(self, error: BaseException) -> None:
        warnings.warn(f"points are evaluated one by one: {first_line(error)}", stacklevel=3)
        self.used = "loop"

    def _budget(self) -> int:
        """Images a launch, over all points of it."""
        world = self.rebuilt.parts.world
        free = torch.cuda.mem_get_info(world.device)[0] // 2 if world.device.type == "cuda" else CPU_BYTES
        return max(1, free // (SHARE * torch.Size(world.image_shape).numel()))

    def _width(self, points: int) -> int:
        return max(1, min(points, self._budget() // min(chunk(self.rebuilt.parts.test), len(self.rows))))

    # A point, or some -----------------------------------------------------------------------------------

    def _sum(self, corners: Sequence[State], weights: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """sum_k w_k corner_k, statistics within the range the corners have."""
        return {name: blend([corner[name] for corner in corners], weights, name in self.buffers) for name in corners[0]}

    def _captured(
        self, corners: Sequence[State], weights: Sequence[Sequence[float]]
    ) -> Callable[[int], tuple[Tensor, Tensor]]:
        """A function that scores the n-th of the points, with all images prepared beforehand: one launch on a GPU."""
        device = self.rebuilt.parts.world.device
        rows = torch.tensor(weights, dtype=torch.float64, device=device)
        given = rows[0].clone()
        pieces = list(self._pieces())

        def score() -> tuple[Tensor, Tensor]:
            return self._one(self._sum(corners, given), pieces)

        replay = captured(score, device) if device.type == "cuda" else score

        def nth(number: int) -> tuple[Tensor, Tensor]:
            given.copy_(rows[number])
            return replay()

        return nth

    def _many(self, corners: Sequence[State], weights: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
        points = [self._sum(corners, row) for row in weights]
        stacked = {name: torch.stack([point[name] for point in points]) for name in points[0]}
        del points
        return self._add_up(lambda piece: vmap(lambda state: self._score(state, piece))(stacked), self._pieces())

    def _one(self, state: dict[str, Tensor], pieces: Iterable[Piece]) -> tuple[Tensor, Tensor]:
        if self.batchnorm == "recalibrate":
            state = self._recalibrated(state)
        return self._add_up(lambda piece: tuple(v[None] for v in self._score(state, piece)), pieces)

    def _pieces(self) -> Iterator[Piece]:
        """The test images in the pieces of a run's own evaluation."""
        parts = self.rebuilt.parts
        size = chunk(parts.test)
        for start in range(0, len(self.rows), size):
            with parts.world.autocast():
                batch = parts.test.fetch(self.rows[start : start + size], None, ("test",))
            yield Piece(batch.images, batch.labels, self.member[start : start + size])

    def _add_up(self, score: Callable[[Piece], Any], pieces: Iterable[Piece]) -> tuple[Tensor, Tensor]:
        right: Any = 0
        lost: Any = 0
        for piece in pieces:
            with self.rebuilt.parts.world.autocast():
                r, value = score(piece)
            right, lost = right + r, lost + value
        return right, lost

    def _score(self, state: State, piece: Piece) -> tuple[Tensor, Tensor]:
        """By task: how many are right, and the sum of their losses."""
        logits, factor = functional_call(self.scorer, dict(state), (piece.images,))
        logits = logits[:, : self.n_classes]
        right = (logits.argmax(1) == piece.labels).double()
        lost = F.cross_entropy((factor * logits).double(), piece.labels, reduction="none")
        return right @ piece.member, lost @ piece.member

    def _recalibrated(self, state: State) -> dict[str, Tensor]:
        """The state with BatchNorm's statistics measured at it: batch means and variances over training images of
        all classes grown, averaged.

        The images are cropped and flipped as in training, at every point alike: a padded crop has borders that the
        statistics know of, and without them ResNet-32 loses six points on CIFAR-100.
        """
        parts = self.rebuilt.parts
        train = parts.world.train
        if not isinstance(train, ImageSource):
            raise DataError("BatchNorm cannot be recalibrated here: the training images are no image source.")
        rows = spaced(train.rows_of(0, self.rebuilt.task.n_seen), RECALIBRATION)
        fresh = {name: t.clone() if name in self.buffers else t for name, t in state.items()}
        norms: list[Any] = [module for module in self.scorer.modules() if isinstance(module, _norm)]
        before = [(module.training, module.momentum) for module in norms]
        size = min(chunk(train), len(rows))
        generator = torch.Generator(rows.device).manual_seed(0)
        try:
            for module in norms:
                module.train()
            for number, start in enumerate(range(0, len(rows) - size + 1, size), start=1):
                part = rows[start // size :: len(rows) // size][:size]  # all classes in every batch
                for module in norms:
                    module.momentum = 1 / number
                with parts.world.autocast():
                    functional_call(self.scorer, fresh, (train.fetch(part, generator, ("train",)).images,))
        finally:
            for module, (training, momentum) in zip(norms, before, strict=True):
                module.train(training)
                module.momentum = momentum
        return fresh


def captured(score: Callable[[], tuple[Tensor, Tensor]], device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """The function as a CUDA graph; what it gives is overwritten by the next call."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        score()  # compiles kernels and chooses algorithms
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = score()

    def replay(read: Callable[[], tuple[Tensor, Tensor]] = score) -> tuple[Tensor, Tensor]:
        graph.replay()  # reads the tensors `score` has, so they have to live as long as this function
        return found

    return replay


def spaced(rows: Tensor, count: int) -> Tensor:
    """`count` of the rows, evenly spaced; all where there are no more."""
    if count >= len(rows):
        return rows
    return rows[torch.arange(count, device=rows.device) * len(rows) // count]


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
