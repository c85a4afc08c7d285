"""EOPC: the path, its loss and gradient, the average that replaces the model, and the exemplars."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.addons.eopc import EOPC, Layout, angles, coefficients, linspace, orthogonal_noise, path_loss, velocities
from incvec.contracts import Batch, Stage, Task
from incvec.data import Dataset
from incvec.engine.build import check_names
from incvec.engine.run import Run, finish
from incvec.errors import ConfigError
from incvec.methods.common import ImageMethod
from incvec.presets import resolve
from tests.addons.tools import Tensors, run_on, same, snapshot, stage_names, state_of, watch
from tests.conftest import quick


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


# The path -----------------------------------------------------------------------------------------------


def balanced(*shape: int, seed: int = 0) -> Tensor:
    values = draws(*shape, seed=seed).double()
    return values - values.mean(1, keepdim=True)


def test_coefficients() -> None:
    a, b = draws(3, 4).double(), draws(3, 4, seed=1).double()
    t = torch.tensor([0.2, 0.9], dtype=torch.float64)
    start, stop = coefficients(t, a, b)
    for k in range(2):
        for row in range(3):
            here = t[k].item()
            w = [math.pi / 2 * (4 * n + 1) for n in range(4)]
            first = 1 - here + sum(a[row, n].item() * math.cos(w[n] * here) for n in range(4))
            last = here + sum(b[row, n].item() * math.sin(w[n] * here) for n in range(4))
            assert start[k, row].item() == pytest.approx(first)
            assert stop[k, row].item() == pytest.approx(last)


def test_rows_that_sum_to_zero_keep_the_ends() -> None:
    start, stop = coefficients(torch.tensor([0.0, 1.0], dtype=torch.float64), balanced(5, 4), balanced(5, 4, seed=1))
    one, zero = torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    assert torch.allclose(start, torch.stack([one, zero]), atol=1e-12)
    assert torch.allclose(stop, torch.stack([zero, one]), atol=1e-12)


def test_velocities_are_the_derivatives() -> None:
    a, b = balanced(3, 4), balanced(3, 4, seed=1)
    t = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    step = 1e-6
    for fast, ahead, behind in zip(
        velocities(t, a, b), coefficients(t + step, a, b), coefficients(t - step, a, b), strict=True
    ):
        assert torch.allclose(fast, (ahead - behind) / (2 * step), atol=1e-6)


def test_angles() -> None:
    w, wt = angles(torch.tensor([1.0, 0.5]))
    assert (w * 2 / math.pi).tolist() == pytest.approx([1, 5, 9, 13])
    assert wt.shape == (2, 1, 4)


def test_linspace_includes_both_ends() -> None:
    assert linspace(0.1, 0.95, 10) == pytest.approx(torch.linspace(0.1, 0.95, 10).tolist())
    assert linspace(0.7, 0.8, 1) == [0.75]


def test_noise_is_orthogonal_and_has_the_given_norm() -> None:
    tangent, noise = draws(4, 5).double(), draws(4, 5, seed=1).double()
    result = orthogonal_noise(tangent, noise, torch.tensor(6.0, dtype=torch.float64))
    assert (result * tangent).sum().item() == pytest.approx(0, abs=1e-12)
    assert result.norm().item() == pytest.approx(6)
    rest = noise - result * (result * noise).sum() / 36  # parallel to the tangent
    assert abs(F.cosine_similarity(rest.flatten(), tangent.flatten(), dim=0).item()) == pytest.approx(1)
    assert torch.equal(orthogonal_noise(torch.zeros(3), torch.zeros(3), torch.tensor(1.0)), torch.zeros(3))


def test_pack_and_unpack_a_layout() -> None:
    tensors = {"a": draws(3, 100), "b": draws(1).reshape(()), "c": draws(512), "d": draws(2, 3, 3, 3)}
    layout = Layout(tensors)
    matrix = layout.pack(tensors)
    assert matrix.shape == (2 + 1 + 2 + 1, 256)
    same(layout.unpack(matrix), tensors)
    assert layout.mask.sum().item() == sum(t.numel() for t in tensors.values())
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    scaled = layout.unpack(layout.per_row(factors) * matrix)
    for factor, (name, tensor) in zip((1, 2, 3, 4), tensors.items(), strict=True):
        assert torch.allclose(scaled[name], factor * tensor)
    (gradient,) = torch.autograd.grad(sum(t.sum() for t in scaled.values()), factors)  # type: ignore[arg-type]
    assert torch.allclose(gradient, torch.stack([t.sum() for t in tensors.values()]), atol=1e-4)


# The loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.1, 0.6, 0.75, 0.9])
def test_path_loss(t: float) -> None:
    logits, features, end = draws(4, 3), draws(4, 6, seed=1), draws(4, 6, seed=2)
    labels = torch.tensor([0, 2, 1, 2])  # classes 0 and 1 are old
    ce, distance = path_loss(logits, features, end, labels, 2, t, cut_off=0.75)
    rows = [0, 2] if t < 0.75 else [0, 1, 2, 3]
    each = [-math.log(math.exp(logits[i, labels[i]]) / sum(math.exp(z) for z in logits[i].tolist())) for i in rows]
    assert ce.item() == pytest.approx((abs(t - 0.5) + 0.1) * sum(each) / len(rows), rel=1e-5)
    cosines = [
        sum(x * y for x, y in zip(f.tolist(), e.tolist(), strict=True)) / (f.norm().item() * e.norm().item())
        for f, e in zip(features, end, strict=True)
    ]
    assert distance.item() == pytest.approx(sum(1 - c for c in cosines) / 4, rel=1e-4)


def test_no_cross_entropy_before_the_cut_off_without_old_samples() -> None:
    ce, _ = path_loss(draws(2, 3), draws(2, 3), draws(2, 3, seed=1), torch.tensor([2, 2]), 2, 0.2, cut_off=0.75)
    assert ce.item() == 0


def test_loss_and_gradient(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared tensor by tensor with a copy of the network at each position, with the same noise."""
    checked: list[int] = []

    def check(self: EOPC, batch: Batch) -> None:
        if len(checked) == 4:  # the first steps are enough
            return
        checked.append(1)
        state = self.world.generator.get_state()
        terms = original(self, batch)
        parameters = [self.coefficients["a"], self.coefficients["b"]]
        gradients = torch.autograd.grad(sum(terms.values()), parameters)  # type: ignore[arg-type]
        self.world.generator.set_state(state)
        ce, features, expected = expected_loss(self, batch, 3)
        assert terms["ce"].item() == pytest.approx(ce, rel=1e-4)
        assert terms["features"].item() == pytest.approx(features, rel=1e-4)
        for gradient, other in zip(gradients, expected, strict=True):
            assert torch.allclose(gradient, other, rtol=1e-3, atol=1e-6)
        assert gradients[0].abs().max() > 0
        self.world.generator.set_state(state)

    original = EOPC.loss
    watch(monkeypatch, EOPC, "loss", before=check)
    run_on(few, tmp_path, "podnet", "eopc", eopc={"lr": 1.0})
    assert len(checked) == 4


def expected_loss(addon: EOPC, batch: Batch, count: int) -> tuple[float, float, list[Tensor]]:
    live, task, o = addon.method.model, addon.method.task, addon.options
    start = {name: addon.start[name] for name, _ in live.named_parameters()}
    stop = {name: p.detach() for name, p in live.named_parameters()}
    a, b = addon.coefficients["a"].detach(), addon.coefficients["b"].detach()
    gradients = [torch.zeros_like(a), torch.zeros_like(b)]
    network = copy.deepcopy(live).eval()

    def load(parameters: Tensors, t: float) -> nn.Module:
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(parameters[name])
            for name, buffer in network.named_buffers():
                buffer.copy_((1 - t) * addon.start[name] + t * dict(live.named_buffers())[name])
        return network.requires_grad_(True)

    with torch.no_grad():
        ends = [load(start, 0)(batch.images).features, load(stop, 1)(batch.images).features]
    sums = [0.0, 0.0]
    w = [math.pi / 2 * (4 * n + 1) for n in range(4)]
    for k in range(count):
        t = 0.1 + 0.85 * k / (count - 1)
        point, tangent = {}, {}
        for row, name in enumerate(start):
            c = 1 - t + sum(a[row, n] * math.cos(w[n] * t) for n in range(4))
            d = t + sum(b[row, n] * math.sin(w[n] * t) for n in range(4))
            dc = -1 - sum(a[row, n] * w[n] * math.sin(w[n] * t) for n in range(4))
            dd = 1 + sum(b[row, n] * w[n] * math.cos(w[n] * t) for n in range(4))
            point[name] = c * start[name] + d * stop[name]
            tangent[name] = dc * start[name] + dd * stop[name]
        layout = Layout(stop)
        drawn = layout.unpack(torch.randn(layout.mask.shape, generator=addon.world.generator))
        along = sum((drawn[n] * tangent[n]).sum() for n in start) / sum(tangent[n].square().sum() for n in start)
        noise = {n: drawn[n] - along * tangent[n] for n in start}
        length = math.sqrt(sum(noise[n].square().sum().item() for n in start))
        output = load({n: point[n] + o.radius / length * noise[n] for n in start}, t)(batch.images)
        counted = batch.labels < task.n_old if t < o.cut_off else batch.labels >= 0
        ce = (abs(t - 0.5) + 0.1) * F.cross_entropy(output.logits[counted], batch.labels[counted])
        distance = (1 - F.cosine_similarity(output.features, ends[t >= o.cut_off], dim=1)).mean()
        at_point = torch.autograd.grad(ce + distance, list(network.parameters()), allow_unused=True)
        for row, (name, g) in enumerate(zip(start, at_point, strict=True)):
            for n in range(4):
                if g is not None:
                    gradients[0][row, n] += math.cos(w[n] * t) * (g * start[name]).sum() / count
                    gradients[1][row, n] += math.sin(w[n] * t) * (g * stop[name]).sum() / count
        sums = [sums[0] + ce.item() / count, sums[1] + distance.item() / count]
    return sums[0], sums[1], gradients


# In a run -----------------------------------------------------------------------------------------------


def test_step_is_the_projected_gradient(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """x <- x - 0.1 (g - mean of g over the row): rows keep their sum of 0."""
    before: list[dict[str, Tensor]] = []
    steps: list[tuple[Tensor, Tensor]] = []

    def record(self: EOPC, stage: Stage, parameters: dict[str, nn.Parameter]) -> None:
        if stage.owner != "eopc":
            return
        assert set(parameters) == {"addons.eopc.a", "addons.eopc.b"}
        now = {name: c.detach().clone() for name, c in self.coefficients.items()}
        if before:
            steps.append((now["a"] - before[-1]["a"], before[-1]["g"]))
        gradient = parameters["addons.eopc.a"].grad
        assert gradient is not None
        before.append({**now, "g": gradient.clone()})

    watch(monkeypatch, EOPC, "gradients", before=record)
    run_on(few, tmp_path, "podnet", "eopc", tasks=1)
    assert len(steps) >= 3
    for moved, gradient in steps:
        assert gradient.abs().max() > 0
        assert torch.allclose(moved, -0.1 * (gradient - gradient.mean(1, keepdim=True)), rtol=1e-3, atol=1e-7)
    assert before[-1]["a"].sum(1).abs().max() < 1e-6


def test_path_starts_at_the_previous_model(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Tensors] = []
    starts: list[Tensors] = []

    def record(self: EOPC, task: Task) -> None:
        begun.append(state_of(self.method.model))
        starts.append(dict(self.start))

    watch(monkeypatch, EOPC, "begin_task", after=record)
    run = run_on(few, tmp_path, "podnet", "eopc")
    assert len(starts) == 2
    for task, start, model in zip((1, 2), starts, begun, strict=True):
        previous = snapshot(run, task - 1)  # after its ensembling
        same({name: start[name] for name in previous}, previous)
        (new,) = set(start) - set(previous)
        assert new == f"head.blocks.{task}.weight"
        assert not torch.equal(start[new], model[new])
        rows = len(start[new])
        assert start[new].std().item() == pytest.approx(1 / math.sqrt(rows), rel=0.4)


def test_new_biases_are_zero_at_the_start_of_the_path(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Tensor, Tensor]] = []

    def record(self: EOPC, task: Task) -> None:
        found.append((self.start[f"head.blocks.{task.index}.weight"], self.start[f"head.blocks.{task.index}.bias"]))

    watch(monkeypatch, EOPC, "begin_task", after=record)
    run_on(few, tmp_path, "mrfa", "eopc")
    assert len(found) == 2
    for weight, bias in found:
        assert weight.any()
        assert torch.equal(bias, torch.zeros(2))


@pytest.mark.parametrize("method", ["podnet", "mrfa"])
def test_path_stage_leaves_the_network_unchanged(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensors] = []
    rows: list[int] = []

    def begin(self: EOPC, task: Task, stage: Stage) -> None:
        if stage.owner == "eopc":
            seen.append(state_of(self.method.model))
            rows.append(len(self.method.store["memory"]))

    def end(self: EOPC, task: Task, stage: Stage) -> None:
        if stage.owner == "eopc":
            same(seen[-1], state_of(self.method.model))

    watch(monkeypatch, EOPC, "begin_stage", after=begin)
    watch(monkeypatch, EOPC, "end_stage", before=end)
    run_on(few, tmp_path, method, "eopc")
    assert rows == [4, 6]  # exemplars of all classes seen


@pytest.mark.parametrize("method", ["podnet", "mrfa"])  # herding before and after the path stage
def test_average_without_noise_and_training_is_on_the_line(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[tuple[Tensors, Tensors]] = []
    results: list[Tensors] = []

    def before(self: EOPC, task: Task, stage: Stage) -> None:
        if stage.owner == "eopc":
            ends.append((dict(self.start), state_of(self.method.model)))

    def after(self: EOPC, task: Task, stage: Stage) -> None:
        if stage.owner == "eopc":
            results.append(state_of(self.method.model))

    watch(monkeypatch, EOPC, "end_stage", before=before, after=after)
    still = {"lr": 1e-30, "radius": 0.0, "ensemble_radius": 0.0, "center": 0.6, "gap": 0.2, "members": 4}
    herded: list[Tensors] = []
    watch(monkeypatch, ImageMethod, "herd_new", before=lambda self, task: herded.append(state_of(self.model)))
    run = run_on(few, tmp_path, method, "eopc", eopc=still)
    for (start, stop), result in zip(ends, results, strict=True):
        for name, value in result.items():
            assert torch.allclose(value, 0.4 * start[name] + 0.6 * stop[name], rtol=1e-4, atol=1e-5), name
    for task in (1, 2):
        same(snapshot(run, task), results[task - 1])
    same(herded[-1], results[-1])  # exemplars are selected with the average


def test_noise_of_the_members_is_within_the_radius(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one member at the center, its distance from the line is the norm of its noise."""
    lengths: list[float] = []
    lines: list[Tensors] = []

    def before(self: EOPC, task: Task, stage: Stage) -> None:
        if stage.owner == "eopc":
            live = dict(self.method.model.named_parameters())
            lines.append({n: 0.25 * self.start[n] + 0.75 * p.detach() for n, p in live.items()})

    def after(self: EOPC, task: Task, stage: Stage) -> None:
        if stage.owner == "eopc":
            live = dict(self.method.model.named_parameters())
            gaps = [(p.detach() - lines[-1][n]).square().sum() for n, p in live.items()]
            lengths.append(torch.stack(gaps).sum().sqrt().item())

    watch(monkeypatch, EOPC, "end_stage", before=before, after=after)
    run_on(few, tmp_path, "podnet", "eopc", eopc={"lr": 1e-30, "members": 1, "ensemble_radius": 3.0})
    assert len(lengths) == 2
    assert all(0 < length < 3 for length in lengths)
    assert abs(lengths[0] - lengths[1]) > 1e-3


def test_stage_and_statistics(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "podnet", "eopc")
    assert stage_names(run, 0) == ["main"]
    path = run.parts.plan(run.parts.tasks[1])[-1]
    assert (path.name, path.role, path.owner, path.batchnorm) == ("eopc-path", "path", "eopc", "frozen")
    assert path.optimizer is not None
    assert path.optimizer.momentum == 0
    assert [sorted(row["eopc"]) for row in run.progress.statistics] == [[], ["max_a", "max_b"], ["max_a", "max_b"]]
    assert run.parts.addons[0].state() == {}  # empty between tasks


def test_methods_without_exemplars_are_refused() -> None:
    for method in ("finetune", "pass", "ssre"):
        with pytest.raises(ConfigError, match=f"exemplars of all classes seen, and {method} has none"):
            check_names(resolve(quick(method, "eopc")))


def test_forgets_less_on_digits(digits: Dataset, tmp_path: Path) -> None:
    records = {}
    for addons in ([], ["eopc"]):
        given = {"method": "podnet", "addons": addons, "podnet": {"epochs": 6}, "dataset": "digits", "tasks": 2}
        run = Run(resolve(given), digits, tmp_path / "+".join(["podnet", *addons]), tmp_path / "bases")
        records[tuple(addons)] = finish(run)["metrics"]
    assert records[("eopc",)]["LA"] > records[()]["LA"]
    assert records[("eopc",)]["FM"] < records[()]["FM"]
