"""The plane through three states: theta(a, b) = origin + a u + b v, u and v orthonormal by Gram-Schmidt.

    u = (first - origin) / |first - origin|
    v = w / |w|,    w = (second - origin) - <second - origin, u> u

So the origin lies at (0, 0), the first state at (|first - origin|, 0), and the second where its coordinates say.
Any other state is projected: its coordinates, and how far from the plane it lies. Coordinates are of parameters
only; buffers (BatchNorm's statistics) go with the weights that the three states have at a point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from incvec.study.geometry.paths import State, Value, blend, fitted, kept, tensors_of


@dataclass(frozen=True)
class Plane:
    """Coordinates (a, b) in units of distance, and the weights of (origin, first, second) at them."""

    origin: State
    first: State
    second: State
    names: tuple[str, ...]  # of the parameters
    length: float  # |first - origin|
    along: float  # <second - origin, u>
    height: float  # |w|

    @classmethod
    def through(cls, origin: State, first: State, second: State, names: Iterable[str]) -> Plane:
        """The plane of three states that do not lie on one line."""
        chosen = tuple(names)
        one, two = (difference(origin, state, chosen) for state in (first, second))
        length = float(one.norm())
        if length == 0:
            raise ValueError("the plane needs three different states: the first is the origin itself")
        along = float(one @ two) / length
        rest = float((two - (along / length) * one).norm())
        if rest <= 1e-7 * max(length, float(two.norm())):
            raise ValueError("the plane needs three states that do not lie on one line: the second lies on that of u")
        return cls(origin, first, second, chosen, length, along, rest)

    def weights(self, a: float, b: float) -> tuple[float, float, float]:
        """Of origin, first and second at (a, b); they add up to 1."""
        q = b / self.height
        p = (a - q * self.along) / self.length
        return 1 - p - q, p, q

    def project(self, state: State) -> tuple[float, float, float]:
        """Coordinates of any state, and its distance from the plane."""
        one, two, other = (difference(self.origin, s, self.names) for s in (self.first, self.second, state))
        u = one / self.length
        v = (two - self.along * u) / self.height
        a, b = float(other @ u), float(other @ v)
        return a, b, float((other - a * u - b * v).norm())

    @property
    def corners(self) -> tuple[tuple[float, float], ...]:
        """Coordinates of origin, first and second."""
        return (0.0, 0.0), (self.length, 0.0), (self.along, self.height)


def difference(a: State, b: State, names: Sequence[str]) -> Tensor:
    """b - a as one vector, in float64."""
    return torch.cat([(b[name].double() - a[name].double()).flatten() for name in names])


def frame(points: Sequence[tuple[float, float]], margin: float = 0.25) -> tuple[tuple[float, float], ...]:
    """Ranges of a and b that hold all points, with a margin as a share of the larger extent."""
    extents = [(min(axis), max(axis)) for axis in zip(*points, strict=True)]
    room = margin * max(high - low for low, high in extents)
    return tuple((low - room, high + room) for low, high in extents)


def ticks(low: float, high: float, count: int) -> list[float]:
    return [low + (high - low) * k / (count - 1) for k in range(count)]


def plane(
    model: nn.Module,
    origin: State,
    first: State,
    second: State,
    evaluate: Callable[[nn.Module], Value],
    size: int = 41,
    margin: float = 0.25,
) -> tuple[list[float], list[float], list[list[Value]]]:
    """What `evaluate(model)` says on a grid around three states: a's, b's, and a row of values for each b.

    As in `path`: states are copied first, the model is afterwards as it was before.
    """
    live = tensors_of(model.state_dict())
    states = [fitted(s, live, t) for s, t in zip((origin, first, second), ("origin", "first", "second"), strict=True)]
    parameters = [name for name, _ in model.named_parameters()]
    found = Plane.through(states[0], states[1], states[2], parameters)
    ranges = frame(found.corners, margin)
    columns, rows = (ticks(low, high, size) for low, high in ranges)
    values: list[list[Value]] = []
    with kept(model, live), torch.no_grad():
        for b in rows:
            values.append([])
            for a in columns:
                weights = found.weights(a, b)
                for name, tensor in live.items():
                    tensor.copy_(blend([state[name] for state in states], weights, name not in parameters))
                values[-1].append(evaluate(model))
    return columns, rows, values
