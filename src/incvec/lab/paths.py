"""Straight lines between two states of a network, theta(x) = (1 - x) theta_a + x theta_b.

Two solutions are linearly connected where nothing is lost between them. `path` walks the line for any model
of yours; `snapshot_model` rebuilds what a run had after one of its tasks, so that the same can be done there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from incvec.config import RunConfig
from incvec.contracts import Method, Task
from incvec.data import Dataset
from incvec.engine.build import Parts, build, pick_device
from incvec.engine.files import read_tensors
from incvec.engine.seeds import derive
from incvec.errors import CheckpointError, ConfigError, DataError
from incvec.presets import resolve

Value = TypeVar("Value")
State = Mapping[str, Tensor]
CHUNK = 500  # test images a launch


def positions(points: int = 51) -> list[float]:
    """x at each point of a path: evenly spaced, 0 and 1 included."""
    if points < 2:
        raise ValueError(f"a path has its two ends at least; {points} point(s) were asked for")
    return [step / (points - 1) for step in range(points)]


def path(
    model: nn.Module, state_a: State, state_b: State, evaluate: Callable[[nn.Module], Value], points: int = 51
) -> list[Value]:
    """What `evaluate(model)` says at `points` states on the straight line from `state_a` to `state_b`.

    The states are state dicts of `model` (its own live one will do: they are copied first). Every floating
    tensor is interpolated, BatchNorm's running statistics included; integer buffers are those of the nearer
    end. The ends are the given states bit for bit. `evaluate` may return a number, a mapping, anything, and
    may put the model into `eval()`: weights, buffers and modes are afterwards as they were before.

        before = copy.deepcopy(model.state_dict())
        train(model)
        curve = path(model, before, model.state_dict(), test_accuracy)
        barrier = max((1 - x) * curve[0] + x * curve[-1] - y for x, y in zip(positions(), curve))
    """
    live = tensors_of(model.state_dict())
    a, b = fitted(state_a, live, "state_a"), fitted(state_b, live, "state_b")
    found = []
    with kept(model, live), torch.no_grad():
        for x in positions(points):
            for name, tensor in live.items():
                tensor.copy_(between(a[name], b[name], x))
            found.append(evaluate(model))
    return found


def between(a: Tensor, b: Tensor, x: float) -> Tensor:
    """(1 - x) a + x b, exactly a at 0 and b at 1; of integers the nearer one."""
    if a.is_floating_point() and 0 < x < 1:
        return torch.lerp(a, b, x)
    return a if x < 0.5 else b


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state dict without whatever else modules put there (`get_extra_state`)."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def fitted(state: State, live: State, title: str) -> dict[str, Tensor]:
    """A copy of the state on the model's devices, once its names and shapes are known to fit."""
    given = tensors_of(state)
    missing, strange = [n for n in live if n not in given], [n for n in given if n not in live]
    if missing or strange:
        raise ValueError(
            f"{title} does not belong to this model: it lacks {some(missing)} and has {some(strange)} besides. "
            "Where a head has grown in between, grow the older model first, then take its state."
        )
    for name, tensor in live.items():
        if given[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)} in {title}, {tuple(tensor.shape)} in the model: "
                "both ends need the model's own shapes"
            )
    return {name: given[name].detach().to(tensor, copy=True) for name, tensor in live.items()}


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "nothing"


@contextmanager
def kept(model: nn.Module, live: State) -> Iterator[None]:
    """Put every tensor and every module's mode back at the end, whatever happens in between."""
    saved = {name: tensor.detach().clone() for name, tensor in live.items()}
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(saved[name])
        for module, training in modes:
            module.training = training


@dataclass
class Rebuilt:
    """A method as a run had it after a task, and what is needed to evaluate it."""

    config: RunConfig
    parts: Parts
    task: Task  # the last one its structure was grown for

    @property
    def method(self) -> Method:
        return self.parts.method

    @property
    def model(self) -> nn.Module:
        return self.parts.method.model

    def state(self) -> dict[str, Tensor]:
        """A copy of the deployed model's tensors."""
        return {name: tensor.detach().clone() for name, tensor in tensors_of(self.model.state_dict()).items()}


def snapshot_model(
    run: str | Path,
    task: int,
    dataset: Dataset,
    grow_to: int | None = None,
    device: str | torch.device | None = None,
) -> Rebuilt:
    """The method with the weights a run had after `task` (counted from 0).

    `run` is the run's folder. With `grow_to`, the structure is grown on for the tasks up to that one, and the
    rows of their classes have the values they had in the run when it grew them, before any imprinting (on a
    device of the same kind). `device` is the run's own unless given.
    """
    file = Path(run) / "snapshots" / f"task-{task:02d}.safetensors"
    if not file.exists():
        raise DataError(
            f"there is no snapshot {file}: the run has not come to that task, or lies elsewhere. `incvec run` "
            "with the run's own settings makes it."
        )
    tensors, meta = read_tensors(file)
    if meta.get("kind") != "snapshot":
        raise CheckpointError(f"{file} is a {meta.get('kind')}, not a snapshot of a task.")
    config = resolve(meta["config"])
    where = torch.device(device) if device is not None else pick_device(config.device)
    generator = torch.Generator(where)
    parts = build(config, dataset, generator, where)
    if parts.order != meta["class_order"]:
        raise DataError(f"{file} was made with other classes, or in another order, than {dataset.name} has.")
    last = meta["grown"] if grow_to is None else grow_to
    if not meta["grown"] <= last < len(parts.tasks):
        raise ConfigError(
            f"grow_to is {grow_to}: the snapshot has grown for task {meta['grown']}, the run's last is "
            f"{len(parts.tasks) - 1}; expected a task between them."
        )
    for each in parts.tasks[: meta["grown"] + 1]:
        grow(parts.method, each, config.seed, generator)
    fill(parts.method, tensors, file)
    for each in parts.tasks[meta["grown"] + 1 : last + 1]:
        grow(parts.method, each, config.seed, generator)
    parts.method.eval()
    return Rebuilt(config, parts, parts.tasks[last])


def grow(method: Method, task: Task, seed: int, generator: torch.Generator) -> None:
    """Structure for one more task, new rows drawn as the run drew them."""
    generator.manual_seed(derive(seed, task.index, "grow"))
    method.task = task
    method.grow(task)


def fill(method: Method, tensors: State, file: Path) -> None:
    """Copy a snapshot's weights and store into a method of the same structure."""
    live = method.state_dict(keep_vars=False)
    given = {n.removeprefix("method/"): tensor for n, tensor in tensors.items() if n.startswith("method/")}
    wanted = {name for name in live if not name.startswith("teacher.")}
    if wanted != set(given) or any(live[name].shape != tensor.shape for name, tensor in given.items()):
        odd = sorted(wanted ^ set(given)) or sorted(n for n, t in given.items() if live[n].shape != t.shape)
        raise CheckpointError(
            f"{file} does not fit {method.name} as this version builds it: {some(odd)} differ(s). "
            "Run it again with this version."
        )
    with torch.no_grad():
        for name, tensor in given.items():
            live[name].copy_(tensor)
    device = method.world.device
    method.store = {
        name.removeprefix("store/"): tensor.to(device) for name, tensor in tensors.items() if name.startswith("store/")
    }


def task_accuracy(rebuilt: Rebuilt, task: int = 0) -> Callable[[nn.Module], float]:
    """A function for `path`: percent right on the test images of one task, by the logits of all classes grown.

    Logits alone decide, since class means belong to one set of weights and not to a whole line of them.
    """
    parts = rebuilt.parts
    chosen = parts.tasks[task]
    rows = parts.test.rows_of(chosen.first, chosen.last)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        model.eval()
        right = torch.zeros((), device=parts.world.device)
        for part in rows.split(CHUNK):
            with parts.world.autocast():
                batch = parts.test.fetch(part, None, ("test",))
                logits = model(batch.images).logits
            right += (logits.argmax(1) == batch.labels).sum()
        return 100 * right.item() / len(rows)

    return evaluate
