"""Many states at once: all backends give the numbers of the plain model, and the ends are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.data import Dataset
from incvec.engine.build import build, grow
from incvec.engine.run import finish
from incvec.nets.heads import ProxyHead
from incvec.presets import resolve
from incvec.study.geometry import Scores, Snapshot, StateEvaluator, evaluation, load_snapshot
from incvec.study.geometry.evaluation import Backend, evenly_spaced
from incvec.study.geometry.states import State, weighted_sum
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import FinishedRuns


def two_ends(run: Path, data: Dataset) -> tuple[Snapshot, list[State]]:
    """The last snapshot of a run, and its states after the first and the last task."""
    end = load_snapshot(run, 2, data)
    return end, [load_snapshot(run, 0, data, grow_to=2).state(), end.state()]


def evaluate_single_images(images: Tensor, labels: Tensor, model: torch.nn.Module) -> tuple[float, float]:
    """Accuracy in percent and mean cross-entropy, one image after the other."""
    correct, loss = 0, 0.0
    with torch.no_grad():
        for image, label in zip(images, labels.tolist(), strict=True):
            logits = model(image[None]).logits[0]
            head = model.get_submodule("head")
            scale = float(head.scale) if isinstance(head, ProxyHead) else 1.0
            correct += int(logits.argmax()) == label
            loss -= float(F.log_softmax(scale * logits.double(), 0)[label])
    return 100 * correct / len(labels), loss / len(labels)


def test_backends_agree_with_single_images(runs: FinishedRuns, few: Dataset) -> None:
    end, (a, b) = two_ends(runs.plain, few)
    weights = [(0.7, 0.3), (0.25, 0.75)]
    scores = StateEvaluator(end, backend="loop").evaluate([a, b], weights)
    assert StateEvaluator(end, backend="graph").evaluate([a, b], weights) == scores  # captured on a GPU only
    for number, (w, v) in enumerate(weights):
        with torch.no_grad():
            for name, live in end.model.state_dict().items():
                live.copy_(w * a[name] + v * b[name])
        for t, task in enumerate(end.parts.tasks):
            batch = end.parts.test.fetch(end.parts.test.rows_of(task.first, task.last))
            accuracy, loss = evaluate_single_images(batch.images, batch.labels, end.model)
            assert scores.accuracy[number][t] == pytest.approx(accuracy, abs=1e-9)
            assert scores.loss[number][t] == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_and_loop_agree_on_resnet32() -> None:
    """PODNet on noise."""
    generator = torch.Generator().manual_seed(0)

    def images(count: int) -> Tensor:
        return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)

    norm = ((0.5,) * 3, (0.25,) * 3)
    data = Dataset(
        "cifar100", images(2000), torch.arange(2000) % 100, images(100), torch.arange(100),
        tuple(map(str, range(100))), 4, True, "noise", {"default": norm, "lucir": norm},
    )  # fmt: skip
    config = resolve({"method": "podnet", "dataset": "cifar100", "device": "cuda", "precision": "fp32"})
    parts = build(config, data, torch.Generator("cuda"), torch.device("cuda"))
    for task in parts.tasks:
        grow(parts, task, 0)
    snapshot = Snapshot(config, parts, parts.tasks[-1])
    a = snapshot.state()
    b = {name: tensor * 1.1 for name, tensor in a.items()}
    default, loop = StateEvaluator(snapshot, images=2), StateEvaluator(snapshot, images=2, backend="loop")
    one, two = (each.evaluate([a, b], [(0.75, 0.25), (0.5, 0.5)]) for each in (default, loop))
    assert (default.used, loop.used) == ("graph", "loop")
    torch.testing.assert_close(torch.tensor(one.loss), torch.tensor(two.loss), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["graph", "loop"])
def test_ends_have_the_accuracies_of_the_record(runs: FinishedRuns, few: Dataset, backend: Backend) -> None:
    for name in ("plain", "ivt", "oracle"):
        end, states = two_ends(getattr(runs, name), few)
        evaluator = StateEvaluator(end, backend=backend)
        scores = evaluator.evaluate(states, [(1, 0), (0.5, 0.5), (0, 1)])
        assert scores.accuracy[-1] == runs.records[name]["classifiers"]["cnn"]["accuracy"][2]
        assert evaluator.used == backend
    first = load_snapshot(runs.plain, 0, few)  # not grown for later classes: its own accuracy
    scores = StateEvaluator(first).evaluate([first.state()], [(1,)])
    assert scores.accuracy[0] == runs.records["plain"]["classifiers"]["cnn"]["accuracy"][0]


def test_model_that_cannot_be_captured_is_evaluated_eagerly(
    runs: FinishedRuns, few: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, states = two_ends(runs.plain, few)
    expected = StateEvaluator(end, backend="loop").evaluate(states, [(0.5, 0.5)])

    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(evaluation, "capture", fail)
    evaluator = StateEvaluator(end, backend="graph")
    with pytest.warns(UserWarning, match="without a CUDA graph: operation not permitted"):
        assert evaluator.evaluate(states, [(0.5, 0.5)]) == expected
    assert evaluator.used == "loop"


def test_unknown_backend_is_refused(runs: FinishedRuns, few: Dataset) -> None:
    with pytest.raises(ValueError, match="unknown backend 'vmap'; expected one of auto, graph, loop"):
        StateEvaluator(load_snapshot(runs.plain, 0, few), backend="vmap")  # type: ignore[arg-type]


def test_subset_of_images_is_spread_over_the_classes(runs: FinishedRuns, few: Dataset) -> None:
    assert evenly_spaced(torch.arange(10), 4).tolist() == [0, 2, 5, 7]
    assert evenly_spaced(torch.arange(3), 9).tolist() == [0, 1, 2]
    end = load_snapshot(runs.plain, 2, few)
    evaluator = StateEvaluator(end, images=6)
    assert evaluator.counts == [6, 6, 6]
    assert torch.bincount(end.parts.test.labels[evaluator.rows]).tolist() == [3] * 6


def test_pooled_scores_weigh_tasks_by_their_images() -> None:
    scores = Scores([[50.0, 100.0, 0.0]], [[1.0, 4.0, 7.0]])
    assert scores.pooled([10, 30, 5], [0, 1]) == ([87.5], [3.25])


def test_recalibration_measures_batchnorm_statistics_at_the_point(runs: FinishedRuns, few: Dataset) -> None:
    """A state with wrong running statistics becomes as good as the original one; the model is left unchanged."""
    first = load_snapshot(runs.plain, 0, few)
    state = first.state()
    wrong = {n: t + 3 if n.endswith("running_mean") else t.clone() for n, t in state.items()}
    evaluator = StateEvaluator(first, batchnorm="recalibrate")
    expected = evaluator.evaluate([state], [(1,)])
    assert evaluator.evaluate([wrong], [(1,)]) == expected
    assert StateEvaluator(first).evaluate([wrong], [(1,)]).loss[0][0] > expected.loss[0][0]
    assert all(torch.equal(first.model.state_dict()[name], value) for name, value in state.items())
    name = next(f"model.{name}" for name in state if name.endswith("stem.norm.running_mean"))
    measured = evaluator.recalibrated({f"model.{name}": t for name, t in wrong.items()})[name]
    train = first.parts.world.train
    rows = torch.nonzero(train.labels < first.task.n_seen).flatten()
    conv = first.model.get_submodule("backbone.stem.conv")
    with torch.no_grad():
        augmented = train.fetch(rows, torch.Generator().manual_seed(0), ("train",)).images
        means = [conv(images).mean((0, 2, 3)) for images in (augmented, train.fetch(rows).images)]
    torch.testing.assert_close(measured, means[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(measured, means[1], rtol=1e-4, atol=1e-5)


def test_weighted_sum() -> None:
    a, b, c = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 0.0]), torch.tensor([2.0, 2.0])
    assert weighted_sum([a, b, c], (0.5, 0.25, 0.25), bounded=True).tolist() == [1.75, 2.5]
    assert weighted_sum([a, b, c], (2.0, -1.0, 0.0), bounded=False).tolist() == [-1.0, 8.0]
    assert weighted_sum([a, b, c], (2.0, -1.0, 0.0), bounded=True).tolist() == [1.0, 4.0]  # variances stay positive
    assert torch.equal(weighted_sum([a, b, c], (0.0, 1.0, 0.0), bounded=True), b)
    assert weighted_sum([torch.tensor(3), torch.tensor(8)], (0.4, 0.6), bounded=True).item() == 8


def test_weighted_sum_with_weights_in_a_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 4, generator=generator) for _ in range(3)]
    counts = [torch.tensor(3), torch.tensor(8), torch.tensor(5)]
    for weights in ((0.5, 0.2, 0.3), (0.1, 1.7, -0.8), (-0.25, 0.25, 1.0)):
        given = torch.tensor(weights, dtype=torch.float64)
        for bounded in (False, True):
            assert torch.equal(weighted_sum(tensors, given, bounded), weighted_sum(tensors, weights, bounded))
        expected = sum(w * tensor for w, tensor in zip(weights, tensors, strict=True))
        assert torch.equal(weighted_sum(tensors, given, False), expected)
        assert torch.equal(weighted_sum(counts, given, True), counts[weights.index(max(weights))])


@pytest.mark.parametrize("method", ["podnet", "finetune"])
def test_graph_of_a_plane(method: str, few: Dataset, tmp_path: Path) -> None:
    """With negative weights, and a point that is one of the states."""
    finish(make_run(few, tmp_path, quick(method)))
    end, (first, last) = two_ends(tmp_path, few)
    states = [first, last, {name: tensor * 1.01 for name, tensor in first.items()}]
    weights = [(1.25, -0.5, 0.25), (1.0, 0.0, 0.0), (-0.25, 1.25, 0.0)]
    expected = StateEvaluator(end, backend="loop").evaluate(states, weights)
    done: list[tuple[int, int]] = []
    evaluator = StateEvaluator(end, backend="graph")
    assert evaluator.evaluate(states, weights, lambda *counts: done.append(counts)) == expected
    assert evaluator.used == "graph"
    assert done == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(("method", "addons"), [("pass", ()), ("finetune", ("magmax",)), ("ssre", ()), ("icarl", ())])
def test_other_methods_and_addons(method: str, addons: tuple[str, ...], few: Dataset, tmp_path: Path) -> None:
    """Rotation outputs, deployed merges, adapters, nearest means: the ends have the accuracies of the logits."""
    record = finish(make_run(few, tmp_path, quick(method, *addons)))
    end, states = two_ends(tmp_path, few)
    scores = StateEvaluator(end).evaluate(states, [(1, 0), (0.5, 0.5), (0, 1)])
    assert scores.accuracy[-1] == record["classifiers"]["cnn"]["accuracy"][2]
    assert torch.isfinite(torch.tensor(scores.loss)).all()
