"""Many states at once: the same numbers one by one, under vmap, and by the plain model; ends exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.nets.heads import ProxyHead
from incvec.study.geometry import snapshot_model
from incvec.study.geometry.paths import blend
from incvec.study.geometry.points import Points, Scores, spaced
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import Finished


def restated(images: Tensor, labels: Tensor, model: torch.nn.Module) -> tuple[float, float]:
    """Percent right and mean cross-entropy, one image after the other."""
    right, lost = 0, 0.0
    with torch.no_grad():
        for image, label in zip(images, labels.tolist(), strict=True):
            logits = model(image[None]).logits[0]
            head = model.get_submodule("head")
            scale = float(head.scale) if isinstance(head, ProxyHead) else 1.0
            right += int(logits.argmax()) == label
            lost -= float(F.log_softmax(scale * logits.double(), 0)[label])
    return 100 * right / len(labels), lost / len(labels)


def test_both_ways_agree_with_single_images(finished: Finished, few: Dataset) -> None:
    end = snapshot_model(finished.plain, 2, few)
    a, b = snapshot_model(finished.plain, 0, few, grow_to=2).state(), end.state()
    weights = [(0.7, 0.3), (0.25, 0.75)]
    by_vmap = Points(end, way="vmap").evaluate([a, b], weights)
    by_loop = Points(end, way="loop").evaluate([a, b], weights)
    assert Points(end, way="graph").evaluate([a, b], weights) == by_loop  # on a GPU captured, here step by step
    for number, (w, v) in enumerate(weights):
        with torch.no_grad():
            for name, live in end.model.state_dict().items():
                live.copy_(w * a[name] + v * b[name])
        for t, task in enumerate(end.parts.tasks):
            batch = end.parts.test.fetch(end.parts.test.rows_of(task.first, task.last))
            accuracy, loss = restated(batch.images, batch.labels, end.model)
            for scores in (by_vmap, by_loop):
                assert scores.accuracy[number][t] == pytest.approx(accuracy, abs=1e-9)
                assert scores.loss[number][t] == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("way", ["graph", "vmap", "loop"])
def test_the_ends_are_the_records_own_accuracies(finished: Finished, few: Dataset, way: str) -> None:
    for name in ("plain", "ivt", "oracle"):
        run, record = getattr(finished, name), finished.records[name]
        end = snapshot_model(run, 2, few)
        start = snapshot_model(run, 0, few, grow_to=2).state()
        points = Points(end, way=way)  # type: ignore[arg-type]
        scores = points.evaluate([start, end.state()], [(1, 0), (0.5, 0.5), (0, 1)])
        assert scores.accuracy[-1] == record["classifiers"]["cnn"]["accuracy"][2]
        assert points.used == way
    # at the start, before it knows other classes, the older model is its own snapshot
    first = snapshot_model(finished.plain, 0, few)
    own = Points(first).evaluate([first.state()], [(1,)])
    assert own.accuracy[0] == finished.records["plain"]["classifiers"]["cnn"]["accuracy"][0]


def test_what_will_not_go_through_vmap_is_done_one_by_one(
    finished: Finished, few: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = snapshot_model(finished.plain, 2, few)
    start = snapshot_model(finished.plain, 1, few, grow_to=2).state()
    weights = [(1, 0), (0.6, 0.4), (0, 1)]
    expected = Points(end, way="loop").evaluate([start, end.state()], weights)
    plain = type(end.model).forward

    def branching(self: torch.nn.Module, images: Tensor) -> object:
        output = plain(self, images)
        return output if float(output[1].sum()) < float("inf") else None  # a value is read: vmap incompatibility

    monkeypatch.setattr(type(end.model), "forward", branching)
    points = Points(end, way="vmap")
    with pytest.warns(UserWarning, match="one by one"):
        found = points.evaluate([start, end.state()], weights)
    assert points.used == "loop"
    assert found == expected


def test_pieces_of_points_change_nothing(finished: Finished, few: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    end = snapshot_model(finished.plain, 2, few)
    start = snapshot_model(finished.plain, 0, few, grow_to=2).state()
    weights = [(1 - x / 6, x / 6) for x in range(7)]
    whole = Points(end, way="vmap").evaluate([start, end.state()], weights)
    monkeypatch.setattr(Points, "_width", lambda self, points: 2)
    heard: list[int] = []
    pieces = Points(end, way="vmap").evaluate([start, end.state()], weights, heard.append)
    assert pieces.accuracy == whole.accuracy
    torch.testing.assert_close(torch.tensor(pieces.loss), torch.tensor(whole.loss))
    assert heard == [1, 2, 4, 6, 7]


def test_a_subset_is_spread_over_the_classes(finished: Finished, few: Dataset) -> None:
    assert spaced(torch.arange(10), 4).tolist() == [0, 2, 5, 7]
    assert spaced(torch.arange(3), 9).tolist() == [0, 1, 2]
    end = snapshot_model(finished.plain, 2, few)
    points = Points(end, images=6)
    labels = end.parts.test.labels[points.rows]
    assert points.counts == [6, 6, 6]
    assert torch.bincount(labels).tolist() == [3] * 6


def test_pooling_weighs_tasks_by_their_images() -> None:
    scores = Scores([[50.0, 100.0, 0.0]], [[1.0, 4.0, 7.0]])
    assert scores.pooled([10, 30, 5], [0, 1]) == ([87.5], [3.25])


def test_recalibration_measures_the_statistics_at_the_point(finished: Finished, few: Dataset) -> None:
    """A model whose running statistics were spoilt is as good as new; its own weights stay."""
    first = snapshot_model(finished.plain, 0, few)
    state = first.state()
    spoilt = {n: t + 3 if n.endswith("running_mean") else t.clone() for n, t in state.items()}
    good = Points(first, batchnorm="recalibrate").evaluate([state], [(1,)])
    again = Points(first, batchnorm="recalibrate").evaluate([spoilt], [(1,)])
    kept = Points(first).evaluate([spoilt], [(1,)])
    assert again == good
    assert kept.loss[0][0] > good.loss[0][0]
    live = first.model.state_dict()
    assert all(torch.equal(live[name], value) for name, value in state.items())
    norm = next(name for name in state if name.endswith("stem.norm.running_mean"))
    points = Points(first, batchnorm="recalibrate")
    fresh = points._recalibrated({f"model.{name}": t for name, t in spoilt.items()})
    train = first.parts.world.train
    rows = torch.nonzero(train.labels < first.task.n_seen).flatten()
    conv = first.model.get_submodule("backbone.stem.conv")
    with torch.no_grad():
        as_trained = train.fetch(rows, torch.Generator().manual_seed(0), ("train",)).images
        means = [conv(images).mean((0, 2, 3)) for images in (as_trained, train.fetch(rows).images)]
    torch.testing.assert_close(fresh[f"model.{norm}"], means[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(fresh[f"model.{norm}"], means[1], rtol=1e-4, atol=1e-5)


def test_sums_of_states() -> None:
    a, b, c = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 0.0]), torch.tensor([2.0, 2.0])
    assert blend([a, b, c], (0.5, 0.25, 0.25), bounded=True).tolist() == [1.75, 2.5]
    assert blend([a, b, c], (2.0, -1.0, 0.0), bounded=False).tolist() == [-1.0, 8.0]
    assert blend([a, b, c], (2.0, -1.0, 0.0), bounded=True).tolist() == [1.0, 4.0]  # a variance stays one
    assert torch.equal(blend([a, b, c], (0.0, 1.0, 0.0), bounded=True), b)
    assert blend([torch.tensor(3), torch.tensor(8)], (0.4, 0.6), bounded=True).item() == 8


def test_sums_by_weights_on_the_device() -> None:
    draw = torch.Generator().manual_seed(0)
    corners = [torch.randn(3, 4, generator=draw) for _ in range(3)]
    counts = [torch.tensor(3), torch.tensor(8), torch.tensor(5)]
    for weights in ((0.5, 0.2, 0.3), (0.1, 1.7, -0.8), (-0.25, 0.25, 1.0)):
        given = torch.tensor(weights, dtype=torch.float64)
        for bounded in (False, True):
            assert torch.equal(blend(corners, given, bounded), blend(corners, weights, bounded))
        plain = sum(w * corner for w, corner in zip(weights, corners, strict=True))
        assert torch.equal(blend(corners, given, False), plain)
        assert torch.equal(blend(counts, given, True), counts[weights.index(max(weights))])


@pytest.mark.parametrize("method", ["podnet", "finetune"])
def test_a_plane_replayed(method: str, few: Dataset, tmp_path: Path) -> None:
    """Weights below 0 among them, and a point that is one of the states."""
    finish(make_run(few, tmp_path, quick(method)))
    end = snapshot_model(tmp_path, 2, few)
    start = snapshot_model(tmp_path, 0, few, grow_to=2).state()
    states = [start, end.state(), {name: tensor * 1.01 for name, tensor in start.items()}]
    weights = [(1.25, -0.5, 0.25), (1.0, 0.0, 0.0), (-0.25, 1.25, 0.0)]
    expected = Points(end, way="loop").evaluate(states, weights)
    heard: list[int] = []
    points = Points(end, way="graph")
    assert points.evaluate(states, weights, heard.append) == expected
    assert points.used == "graph"
    assert heard == [1, 2, 3]


def test_what_cannot_be_captured_is_done_one_by_one(
    finished: Finished, few: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = snapshot_model(finished.plain, 2, few)
    states = [snapshot_model(finished.plain, 0, few, grow_to=2).state(), end.state()]
    expected = Points(end, way="loop").evaluate(states, [(0.5, 0.5)])

    def refused(self: Points, *given: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Points, "_captured", refused)
    points = Points(end, way="graph")
    with pytest.warns(UserWarning, match="one by one: operation not permitted"):
        assert points.evaluate(states, [(0.5, 0.5)]) == expected
    assert points.used == "loop"


@pytest.mark.parametrize(("method", "addons"), [("pass", ()), ("finetune", ("magmax",)), ("ssre", ()), ("icarl", ())])
def test_other_methods_and_addons(method: str, addons: tuple[str, ...], few: Dataset, tmp_path: Path) -> None:
    """Rotated outputs, deployed merges, adapters, nearest means: the ends are those of the logits all the same."""
    record = finish(make_run(few, tmp_path, quick(method, *addons)))
    end = snapshot_model(tmp_path, 2, few)
    start = snapshot_model(tmp_path, 0, few, grow_to=2).state()
    scores = Points(end, way="vmap").evaluate([start, end.state()], [(1, 0), (0.5, 0.5), (0, 1)])
    assert scores.accuracy[-1] == record["classifiers"]["cnn"]["accuracy"][2]
    assert torch.isfinite(torch.tensor(scores.loss)).all()


def test_too_little_memory_means_fewer_points_a_launch(
    finished: Finished, few: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = snapshot_model(finished.plain, 2, few)
    start = snapshot_model(finished.plain, 0, few, grow_to=2).state()
    weights = [(1 - x / 5, x / 5) for x in range(6)]
    whole = Points(end, way="vmap").evaluate([start, end.state()], weights)
    plain = Points._many
    widths: list[int] = []

    def narrow(self: Points, corners: object, rows: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
        widths.append(len(rows))
        if len(rows) > 1:
            raise torch.OutOfMemoryError("full")
        return plain(self, corners, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(Points, "_many", narrow)
    found = Points(end, way="vmap").evaluate([start, end.state()], weights)
    assert widths == [4, 2, 1, 1, 1, 1]
    assert found.accuracy == whole.accuracy
