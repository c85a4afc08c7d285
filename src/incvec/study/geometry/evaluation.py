"""Accuracy and loss of many states at once, each a weighted sum of a few given states.

A point is one row of weights over the given states: (1 - x, x) on a line, three weights on a plane. The backends give
the same numbers:

- `graph`, on a GPU: the weighted sum and all test images in one CUDA graph, replayed for each point.
- `vmap`, on a CPU with tiny images: many points per launch through `functional_call`, as many as fit into memory. For
  larger images, convolutions with different weights for each point are slower than one point at a time.
- `loop`: one point at a time. Used otherwise, if the model supports neither of the two, and for recalibration.

A point that is one of the given states is always evaluated by itself, in the batches of a run's own evaluation. So the
ends of a path have exactly the accuracies of the snapshots.
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

from incvec.data import ImageSource
from incvec.data.source import chunk
from incvec.engine.capture import capture_graph
from incvec.errors import DataError
from incvec.nets.batchnorm import recalibrate
from incvec.nets.heads import ProxyHead
from incvec.records import commit
from incvec.study.geometry.snapshots import Snapshot
from incvec.study.geometry.states import State, preserved, weighted_sum

Backend = Literal["auto", "graph", "vmap", "loop"]
BatchNormMode = Literal["interpolate", "recalibrate"]
Progress = Callable[[str, int, int], None]  # name, points done, points in all
MAX_VMAP_VALUES = 256  # values of an image up to which `vmap` is faster on a CPU
BYTES_PER_VALUE = 1024  # activations for each value of an image and point: about sixteen maps of sixteen channels
CPU_MEMORY = 1 << 30
RECALIBRATION_IMAGES = 2000
UNSUPPORTED = (RuntimeError, ValueError, NotImplementedError, TypeError)  # raised by vmap and by graph capture
LOSS = "mean cross-entropy of the logits over all classes of the end's task (PODNet's and MRFA's with their scale)"
BARRIER = (
    "max over the points x of (1-x) y(0) + x y(1) - y(x) for an accuracy, of y(x) - (1-x) y(0) - x y(1) for a loss; "
    "0 if the curve stays on the better side"
)


@dataclass(frozen=True)
class EvaluationOptions:
    """How the points of paths and planes are evaluated."""

    points: int = 51
    images: int | None = None  # test images per task; all by default
    batchnorm: BatchNormMode = "interpolate"
    start: Literal["oracle", "own"] = "oracle"
    backend: Backend = "auto"
    device: str | None = None

    def metadata(self) -> dict[str, Any]:
        """For the JSON file of a figure."""
        return {
            "points": self.points,
            "images_per_task": self.images,
            "batchnorm": self.batchnorm,
            "loss_is": LOSS,
            "barrier_is": BARRIER,
            "commit": commit(),
            "torch": torch.__version__,
        }


class Scores(NamedTuple):
    """By point and task: accuracy in percent, and mean cross-entropy."""

    accuracy: list[list[float]]
    loss: list[list[float]]

    def pooled(self, sizes: Sequence[int], tasks: Sequence[int]) -> tuple[list[float], list[float]]:
        """Accuracy and loss by point over several tasks, weighted by their number of test images."""
        total = sum(sizes[t] for t in tasks)
        accuracy, loss = ([sum(sizes[t] * row[t] for t in tasks) / total for row in rows] for rows in self)
        return accuracy, loss


class Classifier(nn.Module):
    """images -> one logit per class, and their factor in the loss (PODNet's learned scale, otherwise 1)."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.model = snapshot.model
        self.class_logits = snapshot.method.class_logits

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.class_logits(self.model(images).logits)
        head = getattr(self.model, "head", None)
        return logits, head.scale if isinstance(head, ProxyHead) else logits.new_ones(())


class EvaluationBatch(NamedTuple):
    images: Tensor
    labels: Tensor
    tasks: Tensor  # one-hot


Totals = tuple[Tensor, Tensor]  # by task: the number of correct images, and the sum of their losses


@dataclass
class StateEvaluator:
    """Evaluates weighted sums of states of one snapshot's model on the test images of its tasks.

    Args:
        snapshot: the method, grown for all tasks that are evaluated.
        images: test images per task, evenly spaced over its rows and so over its classes; all by default.
        tasks: the tasks to evaluate; by default all that the method has grown for.
        n_classes: classes to distinguish; all by default.
        backend: see the module; `used` is the one chosen.
        batchnorm: interpolate the running statistics, or measure them at every point.
        memory: bytes for one launch of `vmap`; by default 1 GiB, or half of the free memory of a GPU.
    """

    snapshot: Snapshot
    images: int | None = None
    tasks: Sequence[int] | None = None
    n_classes: int | None = None
    backend: Backend = "auto"
    batchnorm: BatchNormMode = "interpolate"
    memory: int | None = None

    def __post_init__(self) -> None:
        parts = self.snapshot.parts
        tasks = range(self.snapshot.task.index + 1) if self.tasks is None else self.tasks
        rows = [parts.test.rows_of(parts.tasks[t].first, parts.tasks[t].last) for t in tasks]
        self.sizes = [len(each) for each in rows]  # the weights of the tasks, also if `images` limits their images
        if self.images is not None:
            rows = [evenly_spaced(each, self.images) for each in rows]
        self.rows = torch.cat(rows)
        self.counts = [len(each) for each in rows]
        task = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(self.counts)).to(self.rows.device)
        self.task_one_hot = F.one_hot(task, len(rows)).double()
        self.classifier = Classifier(self.snapshot).eval()
        self.buffers = {name for name, _ in self.classifier.named_buffers()}
        self.world = parts.world
        self.used = self.backend

    def metadata(self) -> dict[str, Any]:
        """For the JSON file of a figure."""
        return {
            "counts": self.counts,
            "device": str(self.world.device),
            "precision": self.snapshot.parts.precision,
            "evaluated": self.used,
        }

    @torch.no_grad()
    def evaluate(
        self, states: Sequence[State], weights: Sequence[Sequence[float]], progress: Callable[[int], None] | None = None
    ) -> Scores:
        """Scores at sum_k w_k states[k] for every row w of `weights`; `progress` receives the number of points done."""
        device = self.world.device
        corners = [{f"model.{name}": t.to(device) for name, t in state.items()} for state in states]
        correct = torch.zeros(len(weights), len(self.counts), dtype=torch.float64, device=device)
        loss = torch.zeros_like(correct)
        done = 0
        for rows, totals in self._totals(corners, weights):
            correct[rows], loss[rows] = totals
            done += len(rows)
            if progress is not None:
                if device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # report points that the device has finished
                progress(done)
        counts = torch.tensor(self.counts, dtype=torch.float64, device=device)
        return Scores((100 * correct / counts).tolist(), (loss / counts).tolist())

    def _totals(
        self, corners: Sequence[State], weights: Sequence[Sequence[float]]
    ) -> Iterator[tuple[list[int], Totals]]:
        """Rows of `weights` and their totals, in the order of evaluation."""
        ends = {i: list(row).index(1) for i, row in enumerate(weights) if 1 in row and sum(w != 0 for w in row) == 1}
        for i, corner in ends.items():
            yield [i], self._evaluate_state(dict(corners[corner]), self._batches())
        pending = [i for i in range(len(weights)) if i not in ends]
        if self.batchnorm == "recalibrate":
            self.used = "loop"
        elif self.used == "auto":
            self.used = self._fastest_backend()
        try:
            if pending and self.used == "graph":
                evaluate_point = self._captured(corners)
                while pending:
                    yield pending[:1], evaluate_point(weights[pending[0]])
                    del pending[0]
            width = self._points_per_launch(len(pending))
            while pending and self.used == "vmap":
                try:
                    yield pending[:width], self._evaluate_many(corners, [weights[i] for i in pending[:width]])
                except torch.OutOfMemoryError:
                    if width == 1:
                        raise
                    width //= 2
                else:
                    del pending[:width]
        except UNSUPPORTED as error:
            message = (str(error).splitlines() or [type(error).__name__])[0][:200]
            warnings.warn(f"points are evaluated one by one: {message}", stacklevel=3)
            self.used = "loop"
        for i in pending:
            yield [i], self._evaluate_state(self._sum(corners, weights[i]), self._batches())

    def _fastest_backend(self) -> Backend:
        """By device and image size, never by timing, so that numbers are reproducible."""
        values = torch.Size(self.world.image_shape).numel()
        if self.world.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.world.device)[0]
            return "graph" if 4 * values * len(self.rows) <= free // 4 else "loop"
        return "vmap" if values <= MAX_VMAP_VALUES else "loop"

    def _points_per_launch(self, points: int) -> int:
        memory = self.memory
        if memory is None:
            cuda = self.world.device.type == "cuda"
            memory = torch.cuda.mem_get_info(self.world.device)[0] // 2 if cuda else CPU_MEMORY
        images = memory // (BYTES_PER_VALUE * torch.Size(self.world.image_shape).numel())
        return max(1, min(points, images // min(chunk(self.snapshot.parts.test), len(self.rows))))

    def _sum(self, corners: Sequence[State], weights: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """sum_k w_k corners[k], BatchNorm statistics within the range of the corners."""
        names = corners[0]
        return {n: weighted_sum([corner[n] for corner in corners], weights, n in self.buffers) for n in names}

    def _captured(self, corners: Sequence[State]) -> Callable[[Sequence[float]], Totals]:
        """A function of a point's weights that replays one CUDA graph over all test images (plain code on a CPU)."""
        current = torch.zeros(len(corners), dtype=torch.float64, device=self.world.device)
        current[0] = 1
        batches = list(self._batches())
        replay = capture(lambda: self._evaluate_state(self._sum(corners, current), batches), self.world.device)

        def evaluate_point(weights: Sequence[float], inputs: Any = (corners, batches)) -> Totals:
            current.copy_(torch.tensor(weights, dtype=torch.float64))  # `inputs` keeps the graph's tensors alive
            return replay()

        return evaluate_point

    def _evaluate_many(self, corners: Sequence[State], weights: Sequence[Sequence[float]]) -> Totals:
        points = [self._sum(corners, row) for row in weights]
        stacked = {name: torch.stack([point[name] for point in points]) for name in points[0]}
        del points
        return self._add_up(lambda batch: vmap(lambda state: self._score(state, batch))(stacked), self._batches())

    def _evaluate_state(self, state: dict[str, Tensor], batches: Iterable[EvaluationBatch]) -> Totals:
        if self.batchnorm == "recalibrate":
            state = self.recalibrated(state)
        return self._add_up(lambda batch: self._score(state, batch), batches)

    def _batches(self) -> Iterator[EvaluationBatch]:
        """The test images in the batches of a run's own evaluation."""
        test = self.snapshot.parts.test
        size = chunk(test)
        for rows, tasks in zip(self.rows.split(size), self.task_one_hot.split(size), strict=True):
            with self.world.autocast():
                batch = test.fetch(rows, None, ("test",))
            yield EvaluationBatch(batch.images, batch.labels, tasks)

    def _add_up(self, score: Callable[[EvaluationBatch], Totals], batches: Iterable[EvaluationBatch]) -> Totals:
        correct: Any = 0
        loss: Any = 0
        for batch in batches:
            with self.world.autocast():
                more_correct, more_loss = score(batch)
            correct, loss = correct + more_correct, loss + more_loss
        return correct, loss

    def _score(self, state: State, batch: EvaluationBatch) -> Totals:
        logits, factor = functional_call(self.classifier, dict(state), (batch.images,))
        logits = logits[:, : self.n_classes]
        correct = (logits.argmax(1) == batch.labels).double()
        loss = F.cross_entropy((factor * logits).double(), batch.labels, reduction="none")
        return correct @ batch.tasks, loss @ batch.tasks

    @torch.no_grad()
    def recalibrated(self, state: State) -> dict[str, Tensor]:
        """The state with BatchNorm statistics measured at its weights, on training images of all classes.

        The images are augmented as in training: without the borders of padded crops, ResNet-32 loses six points on
        CIFAR-100. Every point sees the same images.
        """
        train = self.world.train
        if not isinstance(train, ImageSource):
            raise DataError("BatchNorm cannot be recalibrated: the training set of this method has no images.")
        rows = evenly_spaced(train.rows_of(0, self.snapshot.task.n_seen), RECALIBRATION_IMAGES)
        size = min(chunk(train), len(rows))
        count = len(rows) // size
        parts = [rows[k::count][:size] for k in range(count)]  # all classes in every batch
        generator = torch.Generator(rows.device).manual_seed(0)
        with preserved(self.classifier) as live, self.world.autocast():
            for name, tensor in live.items():
                tensor.copy_(state[name])
            recalibrate(self.classifier, (train.fetch(part, generator, ("train",)).images for part in parts))
            return {name: tensor.clone() for name, tensor in live.items()}


def capture(function: Callable[[], Totals], device: torch.device) -> Callable[[], Totals]:
    return capture_graph(function, device=device) if device.type == "cuda" else function


def evenly_spaced(rows: Tensor, count: int) -> Tensor:
    """`count` of the rows, or all if there are fewer."""
    if count >= len(rows):
        return rows
    return rows[torch.arange(count, device=rows.device) * len(rows) // count]
