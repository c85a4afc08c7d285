"""GeoDL: the flow kernel is the integral along the geodesic; its loss replaces LUCIR's distillation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.data import Dataset
from incvec.methods.geodl import GeoDL, flow_kernel, geodesic_loss, principal_basis
from tests.conftest import make_run, quick
from tests.methods.tools import in_task


def points(seed: int, n: int = 6, d: int = 10) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def two_bases(near: float = 0.5) -> tuple[Tensor, Tensor]:
    first = points(0)
    return principal_basis(first, 4), principal_basis(first + near * points(1), 4)


def integrated(start: Tensor, end: Tensor, steps: int = 2000) -> Tensor:
    """Numerical integral of the projections along the geodesic in the direction of the Grassmann logarithm."""
    tangent = (end - start @ (start.T @ end)) @ torch.linalg.inv(start.T @ end)
    u, s, v = torch.linalg.svd(tangent, full_matrices=False)
    angles = s.atan()
    total = torch.zeros(len(start), len(start), dtype=start.dtype)
    for step in range(steps):
        x = (step + 0.5) / steps
        frame = start @ v.T @ torch.diag((x * angles).cos()) + u @ torch.diag((x * angles).sin())
        total += frame @ frame.T / steps
    return total


def test_basis_is_orthonormal_and_spans_the_samples() -> None:
    features = points(2, n=4)
    basis = principal_basis(features, 4)
    torch.testing.assert_close(basis.T @ basis, torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(features @ basis @ basis.T, features)
    plane = principal_basis(features, 2)
    residual = (features - features @ plane @ plane.T).square().sum()
    singular = torch.linalg.svdvals(features)
    torch.testing.assert_close(residual, singular[2:].square().sum())  # the smallest residual of any plane


@pytest.mark.parametrize("near", [0.05, 0.5, 3.0])
def test_kernel_is_the_integral_along_the_geodesic(near: float) -> None:
    start, end = two_bases(near)
    torch.testing.assert_close(flow_kernel(start, end), integrated(start, end), rtol=0, atol=1e-6)


def test_kernel_does_not_depend_on_the_choice_of_bases() -> None:
    start, end = two_bases()
    turn = torch.linalg.qr(points(5, 4, 4)).Q
    torch.testing.assert_close(flow_kernel(start @ turn, end @ turn.T), flow_kernel(start, end))


def test_kernel_of_one_subspace_is_its_projection() -> None:
    start, _ = two_bases()
    torch.testing.assert_close(flow_kernel(start, start), start @ start.T)
    single = start.float()
    torch.testing.assert_close(flow_kernel(single, single), single @ single.T, rtol=0, atol=1e-6)


def test_kernel_of_lines_at_a_right_angle() -> None:
    """From e1 to e2: the mean of cos^2 and of sin^2 is 1/2, that of cos sin over a quarter turn is 1/pi."""
    e1, e2 = torch.eye(3, dtype=torch.float64)[:, :1], torch.eye(3, dtype=torch.float64)[:, 1:2]
    expected = torch.tensor([[0.5, 1 / math.pi, 0], [1 / math.pi, 0.5, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(flow_kernel(e1, e2), expected)


def test_geodesic_losses() -> None:
    old, new = points(3, 3, 4), points(4, 3, 4)
    root = points(6, 4, 4)
    kernel = root @ root.T

    def product(a: Tensor, b: Tensor) -> float:
        return sum(float(a[i] * kernel[i, j] * b[j]) for i in range(4) for j in range(4))

    cosine = squared = 0.0
    for s, t in zip(old, new, strict=True):
        cosine += (1 - product(s, t) / math.sqrt(product(s, s) * product(t, t))) / 3
        squared += product(s - t, s - t) / 3
    assert math.isclose(geodesic_loss(old, new, kernel).item(), cosine, rel_tol=1e-9)
    assert math.isclose(geodesic_loss(old, new, kernel, "released").item(), squared, rel_tol=1e-9)
    assert abs(geodesic_loss(old, old, kernel).item()) < 1e-12


@pytest.mark.parametrize("form", ["paper", "released"])
def test_increment_loss(form: str, few: Dataset, tmp_path: Path) -> None:
    method = in_task(GeoDL, few, tmp_path, 2, geodl={"form": form, "lambda_margin": 1.0})
    assert method.teacher is not None
    batch = method.world.train.fetch(method.rows_of([3, 4, 5])[30:42], None, ("test",))
    terms = method.loss(batch)
    assert list(terms) == ["ce", "geodesic", "margin"]
    with torch.no_grad():
        maps = [model(batch.images).maps[-1].double() for model in (method.teacher, method.model)]
    old, new = (
        F.normalize(torch.stack([m[:, :, i : i + 2, j : j + 2].mean((2, 3)) for i in (0, 2) for j in (0, 2)], 2)
                    .flatten(1), dim=1)
        for m in maps
    )  # fmt: skip
    assert old.shape == (12, 32)
    kernel = integrated(*(torch.linalg.svd(f.T).U[:, :10] for f in (old, new)))
    expected = 5 * math.sqrt(4 / 2) * geodesic_loss(old, new, kernel, form)
    torch.testing.assert_close(terms["geodesic"].detach().double(), expected, rtol=1e-3, atol=1e-5)


def test_kernel_carries_no_gradient(few: Dataset, tmp_path: Path) -> None:
    method = in_task(GeoDL, few, tmp_path)
    old = F.normalize(points(7, 6, 32).float(), dim=1)
    new = F.normalize(points(8, 6, 32).float(), dim=1).requires_grad_()
    (found,) = torch.autograd.grad(method.geodesic(old, new), new)
    with torch.no_grad():
        kernel = flow_kernel(principal_basis(old, 4), principal_basis(new, 4))
    (expected,) = torch.autograd.grad(geodesic_loss(old, new, kernel), new)
    torch.testing.assert_close(found, expected)


def test_increments_run_eagerly_with_a_reason(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("geodl"))
    next(iter(run.events()))
    method, tasks = run.parts.method, run.parts.tasks
    assert [stage.eager for stage in method.stages(tasks[0])] == [None]
    assert all(stage.eager and "synchronizes" in stage.eager for stage in method.stages(tasks[1]))
