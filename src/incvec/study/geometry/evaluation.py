"""Accuracy and loss of many states at once, each a weighted sum of a few given states.

A point is one row of weights over the given states: (1 - x, x) on a line, three weights on a plane. On a GPU, the
weighted sum and the forward passes over all test images are one CUDA graph, replayed for each point (`graph`). They run
eagerly (`loop`) on a CPU, for recalibration, and if the capture fails. The numbers are the same.

A point that is one of the given states is evaluated as it is, in the batches of a run's own evaluation. So the ends of
a path have exactly the accuracies of the snapshots.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from incvec.data import ImageSource
from incvec.data.source import inference_batch_size
from incvec.engine.capture import capture_graph
from incvec.errors import DataError
from incvec.ivt.batchnorm import recalibrate
from incvec.nets.heads import ProxyHead
from incvec.records import commit
from incvec.study.geometry.snapshots import Snapshot
from incvec.study.geometry.states import State, preserved, weighted_sum

Backend = Literal["auto", "graph", "loop"]
BatchNormMode = Literal["interpolate", "recalibrate"]
Progress = Callable[[str, int, int], None]  # name, points done, points in all
RECALIBRATION_IMAGES = 2000
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


EvaluationBatch = tuple[Tensor, Tensor, Tensor]  # images, labels, tasks as one-hot vectors
Totals = tuple[Tensor, Tensor]  # by task: the number of correct images, and the sum of their losses


@dataclass
class StateEvaluator:
    """Evaluates weighted sums of states of one snapshot's model on the test images of its tasks.

    Args:
        snapshot: the method, grown for all tasks that are evaluated.
        images: test images per task, evenly spaced over its rows and so over its classes; all by default.
        tasks: the tasks to evaluate; by default all that the method has grown for.
        n_classes: classes to distinguish; all by default.
        backend: `graph`, `loop`, or the one that suits the device; `used` is the one chosen.
        batchnorm: interpolate the running statistics, or measure them at every point.
    """

    snapshot: Snapshot
    images: int | None = None
    tasks: Sequence[int] | None = None
    n_classes: int | None = None
    backend: Backend = "auto"
    batchnorm: BatchNormMode = "interpolate"

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ValueError(f"unknown backend {self.backend!r}; expected one of {', '.join(get_args(Backend))}")
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
        if self.batchnorm == "recalibrate" or (self.backend == "auto" and not self._images_fit_on_gpu()):
            self.used = "loop"
        elif self.backend == "auto":
            self.used = "graph"

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
        self,
        states: Sequence[State],
        weights: Sequence[Sequence[float]],
        progress: Callable[[int, int], None] | None = None,
    ) -> Scores:
        """Scores at sum_k w_k states[k] for every row w of `weights`; calls `progress(points done, points in all)`."""
        device = self.world.device
        corners = [{f"model.{name}": t.to(device) for name, t in state.items()} for state in states]
        correct = torch.zeros(len(weights), len(self.counts), dtype=torch.float64, device=device)
        loss = torch.zeros_like(correct)
        ends = {i: list(row).index(1) for i, row in enumerate(weights) if 1 in row and sum(w != 0 for w in row) == 1}
        inner = [i for i in range(len(weights)) if i not in ends]
        evaluate_point = self._point_function(corners) if inner else None
        for done, i in enumerate([*ends, *inner], start=1):
            if i in ends:
                correct[i], loss[i] = self._evaluate_state(corners[ends[i]], self._batches())
            elif evaluate_point is not None:
                correct[i], loss[i] = evaluate_point(weights[i])
            if progress is not None:
                if device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # report points that the device has finished
                progress(done, len(weights))
        counts = torch.tensor(self.counts, dtype=torch.float64, device=device)
        return Scores((100 * correct / counts).tolist(), (loss / counts).tolist())

    def _point_function(self, corners: Sequence[State]) -> Callable[[Sequence[float]], Totals]:
        """Evaluates a point given by its weights."""
        if self.used == "graph":
            try:
                return self._captured(corners)
            except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                message = (str(error).splitlines() or [type(error).__name__])[0][:200]
                warnings.warn(f"points are evaluated without a CUDA graph: {message}", stacklevel=3)
                self.used = "loop"
        return lambda weights: self._evaluate_state(self._sum(corners, weights), self._batches())

    def _images_fit_on_gpu(self) -> bool:
        if self.world.device.type != "cuda":
            return False
        size = 4 * torch.Size(self.world.image_shape).numel() * len(self.rows)
        return size <= torch.cuda.mem_get_info(self.world.device)[0] // 4

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

    def _evaluate_state(self, state: State, batches: Iterable[EvaluationBatch]) -> Totals:
        if self.batchnorm == "recalibrate":
            state = self.recalibrated(state)
        correct: Any = 0
        loss: Any = 0
        for images, labels, tasks in batches:
            with self.world.autocast():
                logits, factor = functional_call(self.classifier, dict(state), (images,))
                logits = logits[:, : self.n_classes]
                hits = (logits.argmax(1) == labels).double()
                losses = F.cross_entropy((factor * logits).double(), labels, reduction="none")
                correct, loss = correct + hits @ tasks, loss + losses @ tasks
        return correct, loss

    def _batches(self) -> Iterator[EvaluationBatch]:
        """The test images in the batches of a run's own evaluation."""
        test = self.snapshot.parts.test
        size = inference_batch_size(test)
        for rows, tasks in zip(self.rows.split(size), self.task_one_hot.split(size), strict=True):
            with self.world.autocast():
                batch = test.fetch(rows, None, ("test",))
            yield batch.images, batch.labels, tasks

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
        size = min(inference_batch_size(train), len(rows))
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
