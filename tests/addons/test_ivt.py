"""IVT in the lab: what is teleported and when, and that each option changes what it says and nothing else."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from incvec.addons.ivt import IVTAddOn
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine import loop as stage_loop
from incvec.engine.build import check_names
from incvec.engine.run import finish
from incvec.errors import CheckpointError, ConfigError
from incvec.ivt import IVT
from incvec.methods import METHODS, find_method
from incvec.nets.resnet import Norm, Stem
from incvec.presets import changed_settings, preset, resolve
from tests.addons.tools import Tensors, record_batches, run_on, same, snapshot, state_of, watch
from tests.conftest import make_run, quick, same_record, same_weights, weights

STATISTICS = ("running_mean", "running_var")


class Teleports:
    """Every teleport of a run: the weights before and after, the anchor, Fbar, F, and where it happened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[dict[str, Any]] = []
        self.epochs: list[tuple[int, str, int]] = []
        where: list[tuple[int, str, int]] = [(0, "", 0)]

        def epoch(addon: IVTAddOn, task: Task, stage: Stage, number: int, optimizer: Any) -> None:
            where[0] = (task.index, stage.name, number)

        def before(plugin: IVT, leave: tuple[str, ...], towards: Any = None) -> None:
            kept = {"anchor": plugin.anchor, "past": plugin.cumulative, "fisher": plugin.fisher}
            copy_weights = {key: {n: t.clone() for n, t in tensors.items()} for key, tensors in kept.items()}
            self.rows.append({"before": state_of(plugin._model), "where": where[0], **copy_weights})
            self.epochs.append(where[0])

        def after(plugin: IVT, leave: tuple[str, ...], towards: Any = None) -> None:
            self.rows[-1]["after"] = state_of(plugin._model)

        watch(patch, IVTAddOn, "end_epoch", before=epoch)
        watch(patch, IVT, "teleport", before=before, after=after)

    def moved(self, row: int) -> set[str]:
        first, last = self.rows[row]["before"], self.rows[row]["after"]
        return {name for name in first if not torch.equal(first[name], last[name])}


@pytest.fixture
def teleports(monkeypatch: pytest.MonkeyPatch) -> Teleports:
    return Teleports(monkeypatch)


# What is teleported, and when ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"interval": 1}, {"interval": 3}, {"interval": None}, {"interval": 5, "last": "skip"},
        {"interval": 2, "stages": ["main", "balance"]},
    ],
    ids=str,
)  # fmt: skip
def test_f_is_that_of_one_epoch(
    options: dict[str, Any], few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every teleport and at every task's end: the mean of the squared gradients of the last epoch and no other."""
    squares: dict[str, Tensor] = {}
    steps, compared = [0], [0]

    def begin(addon: IVTAddOn, task: Task, stage: Stage, epoch: int) -> None:
        if stage.role == "main":
            squares.clear()
            steps[0] = 0

    def step(plugin: IVT, parameters: Any = None) -> None:
        steps[0] += 1
        for name, parameter in plugin._parameters.items():
            if parameter.grad is not None:
                squares[name] = squares.get(name, 0.0) + parameter.grad.double() ** 2

    def compare(plugin: IVT, leave: Any = None, towards: Any = None) -> None:
        if plugin.task > 1:  # F_1 comes from the shared base
            compared[0] += 1
            for name, total in squares.items():
                torch.testing.assert_close(plugin.fisher[name].double(), total / steps[0], rtol=1e-5, atol=0)

    watch(monkeypatch, IVTAddOn, "begin_epoch", before=begin)
    watch(monkeypatch, IVT, "accumulate", after=step)
    watch(monkeypatch, IVT, "teleport", before=compare)
    watch(monkeypatch, IVT, "end_task", before=compare)
    finish(make_run(few, tmp_path, quick("podnet", "ivt", podnet={"epochs": 5}, ivt=options)))
    teleports = {1: 5, 3: 1, None: 1, 5: 0, 2: 2 + 1}[options["interval"]]
    assert compared[0] == 2 * (teleports + 1)


def diagonal(row: dict[str, Any], name: str) -> Tensor:
    """anchor + (A + F) / (2 A + F) (theta - anchor), where A = 0: theta."""
    a, f = row["past"][name].double(), row["fisher"][name].double()
    s = torch.where(a > 0, (a + f) / (2 * a + f), torch.ones_like(a))
    anchor: Tensor = row["anchor"][name].double()
    wanted: Tensor = anchor + s * (row["before"][name].double() - anchor)
    return wanted


@pytest.mark.parametrize(
    "method", [name for name in sorted(METHODS) if find_method(name).trains and not find_method(name).joint]
)
def test_exactly_what_is_old_and_trains_is_teleported(
    method: str, few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[set[str]] = []  # of the model's parameters, as each task ended
    trained: list[set[str]] = []

    def end(self: IVTAddOn, task: Task) -> None:
        names.append({name for name, _ in self.method.model.named_parameters()})
        main = next(stage for stage in self.method.stages(task) if stage.role == "main")
        owned = {name for name in names[-1] if any(group.owns(f"model.{name}") for group in main.groups)}
        trained.append(owned)

    watch(monkeypatch, IVTAddOn, "end_task", before=end)
    run_on(few, tmp_path, method, "ivt", ivt={"interval": 2})
    assert [task for task, stage, _ in teleports.epochs] == [1, 2]
    for row, task in enumerate((1, 2)):
        wanted = trained[task] & names[task - 1]
        assert teleports.moved(row) == wanted
        if not find_method(method).pretrained:  # sentences bring no parameters
            assert f"head.blocks.{task}.weight" in trained[task] - wanted  # new rows train, but have no past
        for name in wanted:
            by_hand = diagonal(teleports.rows[row], name)
            assert torch.allclose(teleports.rows[row]["after"][name].double(), by_hand, rtol=1e-4, atol=1e-6), name


def test_podnets_old_proxies_rest_and_are_not_teleported(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    run_on(few, tmp_path, "podnet", "ivt")
    heads = [{name for name in teleports.moved(row) if name.startswith("head")} for row in range(4)]
    assert heads == [{"head.scale"}] * 4


def test_the_anchor_is_where_the_main_stage_begins(
    few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Tensors] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.role == "main":
            begun.append(state_of(self.method.model))

    watch(monkeypatch, IVTAddOn, "begin_stage", before=begin)
    run = run_on(few, tmp_path, "podnet", "ivt", ivt={"interval": 2})
    for row, task in enumerate((1, 2)):
        anchor, previous = teleports.rows[row]["anchor"], snapshot(run, task - 1)
        for name, value in anchor.items():
            assert torch.equal(value, begun[row][name])
            if name in previous:
                assert torch.equal(value, previous[name])  # after the balanced stage of the task before


@pytest.mark.parametrize(
    ("interval", "epochs"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (5, [5]), (6, []), (None, [5])], ids=str
)
def test_teleports_come_every_interval_epochs(
    interval: int | None, epochs: list[int], few: Dataset, tmp_path: Path, teleports: Teleports
) -> None:
    run_on(few, tmp_path, "finetune", "ivt", ivt={"interval": interval}, finetune={"epochs": 5}, tasks=1)
    assert teleports.epochs == [(1, "main", epoch) for epoch in epochs]


@pytest.mark.parametrize(("interval", "epochs"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (5, [])], ids=str)
def test_the_last_teleport_can_be_left_out(
    interval: int, epochs: list[int], few: Dataset, tmp_path: Path, teleports: Teleports
) -> None:
    """Where one falls on the last epoch it is left out, F_t and all else as ever; others stay."""
    options = {"interval": interval, "last": "skip"}
    run_on(few, tmp_path / "skip", "finetune", "ivt", ivt=options, finetune={"epochs": 5}, tasks=1)
    assert teleports.epochs == [(1, "main", epoch) for epoch in epochs]
    run_on(few, tmp_path / "all", "finetune", "ivt", ivt={"interval": interval}, finetune={"epochs": 5}, tasks=1)
    for one, other in zip(teleports.rows[: len(epochs)], teleports.rows[len(epochs) :], strict=False):
        same(one["after"], other["after"])


def test_a_single_teleport_at_the_end_cannot_be_left_out() -> None:
    config = resolve(quick("finetune", "ivt", ivt={"interval": None, "last": "skip"}))
    with pytest.raises(ConfigError, match=r"never teleports.*ivt\.last=teleport"):
        check_names(config)


def test_blocks_do_not_go_with_interpolated_statistics() -> None:
    config = resolve(quick("pass", "ivt", ivt={"structure": "kernel", "batchnorm": "interpolate"}))
    with pytest.raises(ConfigError, match=r"has blocks instead of S.*ivt\.batchnorm=recalibrate"):
        check_names(config)


@pytest.mark.parametrize(
    ("interval", "last", "told"),
    [(2, "teleport", False), (4, "teleport", False), (3, "skip", False), (4, "skip", True), (5, "teleport", True)],
)
def test_a_run_without_any_teleport_says_so(interval: int, last: str, told: bool, few: Dataset, tmp_path: Path) -> None:
    options = {"interval": interval, "last": last}
    run = make_run(few, tmp_path / "run", quick("finetune", "ivt", finetune={"epochs": 4}, ivt=options))
    with closing(run.events()) as events:
        texts = [event.text for event in itertools.takewhile(lambda e: not isinstance(e, ev.Started), events)]
    assert [text for text in texts if "ivt changes nothing in this run" in text] == texts
    assert len(texts) == told


def test_which_reading_is_the_default() -> None:
    """From scratch no teleport follows the last epoch and the classifier is left alone; PASS and FCS take the
    statistics back, too; PODNet, the digits and pre-trained models keep to Algorithm 1's letter, and a record of before
    these options existed is one of it."""
    given = {"method": "mrfa", "addons": ["ivt"], "dataset": "cifar100"}
    letter = {"batchnorm": "keep", "last": "teleport", "head": "teleport"}

    def reading(**other: str) -> dict[str, str]:
        found = resolve({**given, **other}).sections["ivt"]
        return {key: found[key] for key in letter}

    assert reading() == reading(dataset="tiny-imagenet-100", variant="short")
    assert reading() == reading(dataset="folder") == reading(dataset="packed")
    assert {"last": "teleport", "head": "teleport"}.items() <= preset("ivt", "folder", "pretrained").items()
    assert reading() == {"batchnorm": "keep", "last": "skip", "head": "keep"}
    assert reading(method="podnet") == reading(dataset="digits") == reading(method="flyp", variant="lite") == letter
    assert reading(method="pass") == reading(method="fcs") == {"batchnorm": "map", "last": "skip", "head": "keep"}
    layers = {**reading(method="pass"), "batchnorm": "layer"}
    assert all(reading(method="pass", dataset=name) == layers for name in ("digits", "packed", "tiny-imagenet-100"))
    assert reading(method="fcs", dataset="tiny-imagenet-100", variant="short") == layers
    assert reading(method="pass", variant="authors") == layers  # a ResNet-18
    usual = resolve(given).resolved()
    assert changed_settings(usual) == {}
    old = {key: value for key, value in usual["ivt"].items() if key not in letter}
    assert changed_settings({**usual, "ivt": old}) == {"ivt.last": "teleport", "ivt.head": "teleport"}


@pytest.mark.parametrize("method", ["pass", "mrfa"])
def test_the_classifier_can_be_left_out(method: str, few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    """`head=keep` moves what `head=teleport` moves but the classifier, whose F is collected all the same."""
    run_on(few, tmp_path / "all", method, "ivt", ivt={"interval": 2}, tasks=1)
    run_on(few, tmp_path / "body", method, "ivt", ivt={"interval": 2, "head": "keep"}, tasks=1)
    every, body = teleports.moved(0), teleports.moved(1)
    rows = {name for name in every if name.startswith("head.")}
    assert rows
    assert body == every - rows
    assert rows <= teleports.rows[1]["fisher"].keys()
    for name in body:
        assert torch.equal(teleports.rows[0]["after"][name], teleports.rows[1]["after"][name]), name


def test_fisher_adds_up_over_tasks(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    """Fbar_t = Fbar_{t-1} + F_t, F_t of the last epoch, wherever the last teleport was."""
    run_on(few, tmp_path, "finetune", "ivt", ivt={"interval": 2})
    first, second = teleports.rows
    for name, past in first["past"].items():
        assert torch.allclose(second["past"][name], past + first["fisher"][name], rtol=1e-6), name


# Beside a run without it --------------------------------------------------------------------------------


def test_f_is_of_gradients_as_the_methods_transform_leaves_them(
    few: Dataset, tmp_path: Path, teleports: Teleports
) -> None:
    """PODNet clamps its gradients, so no F, neither the base task's nor an increment's, is above the clamp squared."""
    run_on(few, tmp_path, "podnet", "ivt", podnet={"clamp": 1e-3}, tasks=1)
    for part in ("past", "fisher"):
        largest = max(float(f.max()) for f in teleports.rows[0][part].values())
        assert 0.5e-6 < largest <= 1.001e-6


@pytest.mark.parametrize("method", ["finetune", "podnet", "pass", "mrfa"])
def test_batches_are_the_same_until_the_first_teleport(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, and what was drawn to see them, fetch by fetch; herding and evaluation included."""
    batches = record_batches(monkeypatch)
    options = {method: {"epochs": 4}}
    run_on(few, tmp_path / "plain", method, **options)
    plain = list(batches)
    batches.clear()
    first: list[int] = []
    watch(monkeypatch, IVT, "teleport", before=lambda plugin, leave: first.append(len(batches)))
    run_on(few, tmp_path / "ivt", method, "ivt", ivt={"interval": 3}, **options)
    teleport = first[0]
    assert 10 < teleport < len(plain)
    for one, other in zip(plain[:teleport], batches[:teleport], strict=True):
        assert torch.equal(one.indices, other.indices)
        assert all(torch.equal(a, b) for a, b in zip(one.views, other.views, strict=True))
    if method in ("finetune", "pass"):  # nothing is chosen by features: the rows never part
        assert len(plain) == len(batches)
        for one, other in zip(plain, batches, strict=True):
            assert torch.equal(one.indices, other.indices)


def test_without_a_teleport_nothing_changes(few: Dataset, tmp_path: Path) -> None:
    plain = run_on(few, tmp_path / "plain", "podnet")
    idle = run_on(few, tmp_path / "idle", "podnet", "ivt", ivt={"interval": 9})
    for task in range(3):
        same(snapshot(plain, task), snapshot(idle, task))


@pytest.mark.parametrize("options", [{}, {"first_fisher": "sample"}, {"structure": "kernel"}], ids=str)
def test_from_a_shared_base_as_from_scratch(options: dict[str, Any], few: Dataset, tmp_path: Path) -> None:
    given = quick("podnet", "ivt", ivt=options)
    scratch = make_run(few, tmp_path / "scratch", given)
    record = finish(scratch)
    finish(make_run(few, tmp_path / "other", quick("podnet", tasks=1), tmp_path / "bases"))  # another stream
    shared = make_run(few, tmp_path / "shared", given, tmp_path / "bases")
    same_record(finish(shared), record)
    for task in range(3):
        same_weights(scratch.snapshot_path(task), shared.snapshot_path(task))


# Options: each changes what it says and nothing else ------------------------------------------------------


def parted(state: Tensors) -> tuple[Tensors, Tensors]:
    """Parameters and BatchNorm's statistics apart."""
    statistics = {name: tensor for name, tensor in state.items() if name.endswith(STATISTICS)}
    return {name: tensor for name, tensor in state.items() if name not in statistics}, statistics


@pytest.mark.parametrize("choice", ["interpolate", "recalibrate"])
def test_batchnorm_touches_statistics_alone(choice: str, few: Dataset, tmp_path: Path) -> None:
    """Train mode reads no running statistics, so in plain fine-tuning the weights are the same to the end."""
    keep = run_on(few, tmp_path / "keep", "finetune", "ivt")
    other = run_on(few, tmp_path / "other", "finetune", "ivt", ivt={"batchnorm": choice})
    same(snapshot(keep, 0), snapshot(other, 0))
    for task in (1, 2):
        (weights_a, statistics_a), (weights_b, statistics_b) = (
            parted(snapshot(keep, task)),
            parted(snapshot(other, task)),
        )
        same(weights_a, weights_b)
        assert all(not torch.equal(statistics_a[name], statistics_b[name]) for name in statistics_a)


def test_interpolated_statistics(few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: Any) -> None:
    """old + s (new - old), s the mean S of the layer's weight, old those the task began with."""
    before: list[Tensors] = []
    start: list[Tensors] = []
    watch(monkeypatch, IVTAddOn, "begin_task", before=lambda self, task: start.append(state_of(self.method.model)))
    watch(
        monkeypatch, IVTAddOn, "_interpolate_statistics",
        before=lambda self: before.append(state_of(self.method.model)),
    )  # fmt: skip
    run_on(few, tmp_path, "finetune", "ivt", ivt={"batchnorm": "interpolate"})
    assert len(before) == 4
    for number, row in enumerate(teleports.rows):
        old = start[number // 2]
        for name, value in parted(row["after"])[1].items():
            weight = name.rpartition(".")[0] + ".weight"
            a, f = row["past"][weight].double(), row["fisher"][weight].double()
            s = torch.where(a > 0, (a + f) / (2 * a + f), torch.ones_like(a)).mean()
            wanted = old[name].double() + s * (before[number][name].double() - old[name].double())
            assert torch.allclose(value.double(), wanted, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(("method", "choice"), [("pass", "map"), ("pass", "layer"), ("fcs", "layer")])
def test_where_nothing_is_held_back_no_map_changes(
    method: str, choice: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a past S is 1. Told by means over several batches, maps would come out otherwise all the same."""
    before: list[Tensors] = []

    def began(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        for value in self.plugin.cumulative.values():
            value.zero_()
        before.append({name: p.detach().clone() for name, p in self.method.model.named_parameters()})

    def ended(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        for name, p in self.method.model.named_parameters():
            assert torch.allclose(p, before[-1][name], rtol=1e-4, atol=1e-5), (name, epoch)

    watch(monkeypatch, IVTAddOn, "end_epoch", before=began, after=ended)
    given = {"batchnorm": choice, "last": "teleport", "interval": 1}
    run_on(few, tmp_path, method, "ivt", ivt=given, **{method: {"batch_size": 8}})
    assert len(before) >= 4


@pytest.mark.parametrize("choice", ["map", "layer"])
def test_teleported_maps(
    choice: str, few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's slope and offset go back as weights do, from those it trains by; then other statistics tell them.

    With `layer` it is the slope times the filters of the convolution before it.
    """
    start: list[Tensors] = []
    trained_as: list[Tensors] = []
    end: list[Tensors] = []
    looks: list[dict[tuple[str, bool], list[Tensor]]] = []  # what every norm saw, in training or as its map
    names: dict[int, str] = {}
    watch(monkeypatch, IVTAddOn, "begin_task", before=lambda self, task: start.append(state_of(self.method.model)))

    def began(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        names.update({id(module): name for name, module in self.method.model.named_modules()})
        looks.append({})
        trained_as.append(state_of(self.method.model))

    def forward(self: Any, x: Tensor) -> None:
        if self._forward_pre_hooks and id(self) in names:
            looks[-1].setdefault((names[id(self)], self.training), []).append(x.detach().double())

    def ended(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        if not looks[-1]:
            looks.pop()
            trained_as.pop()
            return
        end.append(state_of(self.method.model))
        assert all(m.training and not m._forward_pre_hooks for m in self.method.model.modules())

    watch(monkeypatch, Norm, "forward", before=forward)
    watch(monkeypatch, IVTAddOn, "end_epoch", before=began, after=ended)
    run_on(few, tmp_path, "pass", "ivt", ivt={"batchnorm": choice, "head": "keep", "last": "teleport"})
    assert len(end) == len(looks) == 4

    def affine(state: Tensors, name: str, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        slope = state[f"{name}.weight"].double() / (var + 1e-5).sqrt()
        return slope, state[f"{name}.bias"].double() - slope * mean

    for number, row in enumerate(teleports.rows):
        old = start[number // 2]
        layers = [name.removesuffix(".running_mean") for name in old if name.endswith("running_mean")]
        assert len(layers) > 3
        for name in layers:
            trained, (mapped,) = looks[number][name, True], looks[number][name, False]
            more = trained[1:]  # a look to see which convolution feeds it
            assert len(more) == (choice == "layer")
            assert len(trained[0]) == len(mapped) == 4 * 64  # two batches as one, which PASS turns
            rows = [x.transpose(0, 1).flatten(1) for x in (trained[0], mapped)]
            seen = [(x.mean(1), x.var(1, correction=0)) for x in rows]
            for kind, wanted in zip(STATISTICS, seen[1], strict=True):
                assert torch.allclose(end[number][f"{name}.{kind}"].double(), wanted, rtol=1e-4, atol=1e-5)
            first = affine(old, name, *(old[f"{name}.{kind}"].double() for kind in STATISTICS))
            ways = [first, affine(trained_as[number], name, *seen[0]), affine(end[number], name, *seen[1])]
            of = {"weight": f"{name}.weight", "bias": f"{name}.bias"}
            if choice == "layer":
                of["weight"] = name.replace("norm", "conv") + ".weight"
                states = zip((old, trained_as[number], end[number]), ways, strict=True)
                ways = [(slope[:, None, None, None] * state[of["weight"]], offset) for state, (slope, offset) in states]
            for kind, (there, now, then) in zip(of, zip(*ways, strict=True), strict=True):
                a, f = (row[key][of[kind]].double() for key in ("past", "fisher"))
                s = torch.where(a > 0, (a + f) / (2 * a + f), torch.ones_like(a))
                assert torch.allclose(then, there + s * (now - there), rtol=1e-3, atol=1e-4), (number, name, kind)


@pytest.mark.parametrize(("choice", "explodes"), [("map", True), ("layer", False)])
def test_filters_that_have_vanished(
    choice: str, explodes: bool, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight decay takes filters to nothing that the task has no use for, and their norms' slopes to hundreds.

    Such a slope must not meet the anchor's filters: the maps after a teleport are no larger than those it lies between.
    """
    sizes: list[list[float]] = []

    def largest(addon: IVTAddOn) -> float:
        images = torch.rand(16, *few.image_shape, generator=torch.Generator().manual_seed(0)).sub_(0.5)
        model = addon.method.model
        with torch.no_grad():
            found = max(float(h.abs().max()) for h in model.backbone(images).maps)  # in training mode
        return found

    def vanish(addon: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        sizes.append([])
        if addon.teleports(task, stage, epoch):
            before = largest(addon)
            with torch.no_grad():
                addon.method.model.backbone.stages[0][0].conv1.weight[::2] = 0
            sizes[-1] = [before, largest(addon)]

    def ended(addon: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        if sizes[-1]:
            sizes[-1].append(largest(addon))

    watch(monkeypatch, IVTAddOn, "end_epoch", before=vanish, after=ended)
    run_on(few, tmp_path, "pass", "ivt", ivt={"batchnorm": choice, "interval": 2})
    found = [row for row in sizes if row]
    assert found
    assert any(after > 3 * max(row) for *row, after in found) == explodes, found


@pytest.mark.parametrize(
    ("choice", "net", "told"), [("map", "resnet18-64", True), ("layer", "resnet18-64", False), ("map", "small", False)]
)
def test_maps_of_wide_networks_are_told_of(choice: str, net: str, told: bool, few: Dataset, tmp_path: Path) -> None:
    options = {"batchnorm": choice, "interval": 50}
    run = make_run(few, tmp_path, quick("pass", "ivt", ivt=options, **{"pass": {"net": net}}))
    with closing(run.events()) as events:
        notices = [event.text for event in itertools.islice(events, 4) if isinstance(event, ev.Notice)]
    assert any("Use ivt.batchnorm=layer" in text for text in notices) == told
    assert any("ivt changes nothing in this run" in text for text in notices)  # whatever else is told


def test_maps_in_a_stage_that_holds_statistics_fixed(few: Dataset, tmp_path: Path, monkeypatch: Any) -> None:
    """There training sees the map itself: it goes back, and the statistics that tell it stay."""
    plan = IVTAddOn.plan

    def frozen(self: IVTAddOn, task: Task, stages: list[Stage]) -> list[Stage]:
        return [stage.replace(batchnorm="frozen") if task.index else stage for stage in plan(self, task, stages)]

    monkeypatch.setattr(IVTAddOn, "plan", frozen)
    keep, maps = (
        run_on(few, tmp_path / choice, "finetune", "ivt", ivt={"batchnorm": choice}) for choice in ("keep", "map")
    )
    (weights_a, statistics_a), (weights_b, statistics_b) = (parted(snapshot(run, 2)) for run in (keep, maps))
    same(statistics_a, statistics_b)
    assert any(not torch.equal(weights_a[name], weights_b[name]) for name in weights_a if "norm" in name)


@pytest.mark.parametrize("choice", ["map", "layer"])
def test_a_model_without_batchnorm_has_no_maps(choice: str, few: Dataset, tmp_path: Path, monkeypatch: Any) -> None:
    """It is teleported as with any other choice, and no batch is looked at for it."""
    looks: list[int] = []
    watch(monkeypatch, stage_loop.StageLoop, "probe", before=lambda loop, batches: looks.append(batches))
    monkeypatch.setattr("incvec.addons.ivt.batchnorm_layers", lambda model: {})  # all small networks have some
    keep, maps = (run_on(few, tmp_path / name, "finetune", "ivt", ivt={"batchnorm": name}) for name in ("keep", choice))
    same(snapshot(keep, 2), snapshot(maps, 2))
    assert looks == []


def test_a_look_is_of_so_many_batches_and_leaves_no_trace(few: Dataset, tmp_path: Path, monkeypatch: Any) -> None:
    """Without gradients, with the same draws each time; none where no stage is under way."""
    batches = record_batches(monkeypatch)
    looks: list[list[Any]] = []
    grads: list[bool] = []

    def ended(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        before, loop = state_of(self.method), run.loop
        assert loop is not None
        history, loss = loop.history.clone(), loop.loss
        loop.loss = lambda batch: (grads.append(torch.is_grad_enabled()), loss(batch))[1]
        for _ in range(2):
            batches.clear()
            draws: list[Tensor] = []
            self.world.probe(2)
            draws.append(torch.rand(3, generator=self.world.generator))
            looks.append([len(batches), batches[0].images, draws[0]])
        with monkeypatch.context() as then:
            then.setattr(stage_loop, "PROBE_BYTES", 1)
            self.world.probe(2)
        assert [len(batch.images) for batch in batches] == [2 * 32, 32]  # where two would be too large, one
        loop.loss = loss
        statistics = {name for name in before if name.endswith(STATISTICS)}  # a network in training keeps these itself
        assert all(torch.equal(t, before[n]) for n, t in state_of(self.method).items() if n not in statistics)
        assert torch.equal(loop.history, history)

    watch(monkeypatch, IVTAddOn, "end_epoch", after=ended)
    run = make_run(few, tmp_path, quick("pass", "ivt", tasks=1))
    with closing(run.events()) as events:
        for _ in events:
            if looks:
                break
    assert run.loop is None
    batches.clear()
    run.parts.world.probe(3)
    assert batches == []  # dropped with the run that was broken off
    (count, images, draw), (_, images_again, draw_again) = looks[:2]
    assert count == 1
    assert len(images) == 2 * 32  # of two batches
    assert torch.equal(images, images_again)
    assert torch.equal(draw, draw_again)
    assert grads
    assert not any(grads)


@pytest.mark.parametrize("given", [{"structure": "kernel"}, {"first_fisher": "sample"}])
def test_the_first_fisher_is_measured_of_what_trains(given: dict[str, str], few: Dataset, tmp_path: Path) -> None:
    """RAPF's towers rest; a pass over them as well would find no gradient and stop."""
    run = run_on(few, tmp_path, "rapf", "ivt", ivt=given)
    assert [stage.name for stage in run.parts.plan(run.parts.tasks[0])][-1] == "ivt-fisher"
    (addon,) = run.parts.addons
    assert isinstance(addon, IVTAddOn)
    assert not any(name.startswith("backbone.") for name in addon.plugin.cumulative)


def test_resting_layers_keep_their_statistics(few: Dataset, tmp_path: Path) -> None:
    """SSRE trains no norm in an increment; there is no S to interpolate by."""
    keep = run_on(few, tmp_path / "keep", "ssre", "ivt")
    for choice in ("interpolate", "map", "layer"):
        other = run_on(few, tmp_path / choice, "ssre", "ivt", ivt={"batchnorm": choice})
        same(snapshot(keep, 2), snapshot(other, 2))


def test_recalibrated_statistics(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over one pass of the main stage's rows of each batch's own mean and variance, at the final weights."""
    batches = record_batches(monkeypatch)
    checked: list[int] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.owner == "ivt":
            batches.clear()

    def end(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.owner != "ivt":
            return
        stem: Any = self.method.model.backbone.stem  # type: ignore[union-attr]
        with torch.no_grad():
            inputs = [stem.conv(batch.images) for batch in batches]
        means = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
        variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in inputs]).mean(0)
        assert torch.allclose(stem.norm.running_mean, means, atol=1e-5)
        assert torch.allclose(stem.norm.running_var, variances, rtol=1e-4)
        assert all(m.momentum == 0.1 for m in self.method.model.modules() if hasattr(m, "momentum"))
        assert sum(len(batch.labels) for batch in batches) == 64
        checked.append(task.index)

    watch(monkeypatch, IVTAddOn, "begin_stage", after=begin)
    watch(monkeypatch, IVTAddOn, "end_stage", after=end)
    run = run_on(few, tmp_path, "finetune", "ivt", ivt={"batchnorm": "recalibrate"})
    assert checked == [1, 2]
    assert [stage.name for stage in run.parts.plan(run.parts.tasks[1])] == ["main", "ivt-recalibrate"]


@pytest.mark.parametrize("method", ["pass", "fcs", "mrfa"])
def test_recalibration_sees_what_the_main_stage_sees(
    method: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics are measured on turned and mixed images where the network trains on such."""
    inputs: list[Tensor] = []  # of the network in training mode and without gradients, batch by batch
    done: list[int] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.owner == "ivt":
            inputs.clear()

    def stem(self: Any, x: Tensor) -> None:
        if self.norm.training and self.norm.momentum == 1.0:
            inputs.append(self.conv(x).detach())

    def end(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.owner != "ivt":
            return
        seen = inputs[1::2] if method == "fcs" else inputs  # the first pass is that of the keys: it leaves no trace
        images = {"pass": 4 * 32, "fcs": 8 * 32, "mrfa": 32}[method]
        assert [len(x) for x in seen] == [images] * len(seen)
        model: Any = self.method.model
        wanted = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
        assert torch.allclose(model.backbone.stem.norm.running_mean, wanted, atol=1e-5)
        done.append(len(seen))

    watch(monkeypatch, IVTAddOn, "begin_stage", after=begin)
    watch(monkeypatch, IVTAddOn, "end_stage", after=end)
    watch(monkeypatch, Stem, "plain", before=stem)
    run_on(few, tmp_path, method, "ivt", ivt={"batchnorm": "recalibrate"}, tasks=1)
    assert done
    assert done[0] >= 2


def test_recalibration_comes_before_the_balanced_stage(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "podnet", "ivt", ivt={"batchnorm": "recalibrate"})
    assert [stage.name for stage in run.parts.plan(run.parts.tasks[0])] == ["main"]
    assert [stage.name for stage in run.parts.plan(run.parts.tasks[1])] == ["main", "ivt-recalibrate", "balance"]


@pytest.mark.parametrize("choice", ["keep", "interpolate", "recalibrate", "map", "layer"])
def test_statistics_that_a_method_holds_fixed_stay_so(choice: str, few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "ssre", "ivt", ivt={"batchnorm": choice})
    assert [stage.name for stage in run.parts.plan(run.parts.tasks[1])] == ["main"]
    first, last = snapshot(run, 0), snapshot(run, 2)
    kept = [name for name in first if name.endswith(("running_mean", "running_var"))]
    assert kept
    same({name: first[name] for name in kept}, {name: last[name] for name in kept})


def test_first_fisher_of_batches_and_of_samples(
    few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Fbar_1 differs; that of samples is checked against a loop over single images."""
    batches = record_batches(monkeypatch)
    found: list[Tensors] = []

    def begin(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.name == "ivt-fisher":
            batches.clear()

    def end(self: IVTAddOn, task: Task, stage: Stage) -> None:
        if stage.name != "ivt-fisher":
            return
        model = self.method.model
        assert all(len(batch.labels) == 1 for batch in batches)
        assert len(batches) == 80
        model.eval()
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch.images).logits, batch.labels)
            for name, gradient in zip(total, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                total[name] += gradient**2 / len(batches)
        found.append(total)

    watch(monkeypatch, IVTAddOn, "begin_stage", after=begin)
    watch(monkeypatch, IVTAddOn, "end_stage", before=end)
    batch_run = run_on(few, tmp_path / "batch", "finetune", "ivt", ivt={"interval": 2})
    assert found == []
    sample_run = run_on(few, tmp_path / "sample", "finetune", "ivt", ivt={"interval": 2, "first_fisher": "sample"})
    same(snapshot(batch_run, 0), snapshot(sample_run, 0))  # measuring changes no weight and no statistic
    by_batch, by_sample = teleports.rows[0], teleports.rows[2]
    same(by_batch["before"], by_sample["before"])  # nor the training up to the first teleport
    same(by_batch["fisher"], by_sample["fisher"])
    for name, past in by_sample["past"].items():
        assert torch.allclose(past, found[0][name], rtol=1e-4, atol=1e-12), name
    old, new = (sum(t.sum().item() for t in row["past"].values()) for row in (by_batch, by_sample))
    assert new > 2 * old  # a batch's gradient is a mean: its square is smaller


def test_the_batch_fisher_is_that_of_the_base_tasks_last_epoch(
    few: Dataset, tmp_path: Path, teleports: Teleports, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensors] = []

    def end(self: IVTAddOn, task: Task) -> None:
        base_fisher = self.world.base_fisher
        if task.index == 0:
            assert base_fisher is not None
            given.append({name: f.clone() for name, f in base_fisher.items()})
        else:
            assert base_fisher is None

    watch(monkeypatch, IVTAddOn, "end_task", before=end)
    run_on(few, tmp_path, "finetune", "ivt", ivt={"interval": 2})
    same(teleports.rows[0]["past"], given[0])


def test_kernel_blocks(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    """Up to the first teleport as ever; there, k x k kernels move by a block for each slice, the rest as before."""
    run_on(few, tmp_path / "diagonal", "finetune", "ivt", ivt={"interval": 2})
    run = run_on(few, tmp_path / "kernel", "finetune", "ivt", ivt={"interval": 2, "structure": "kernel"})
    assert [stage.name for stage in run.parts.plan(run.parts.tasks[0])] == ["main", "ivt-fisher"]
    plain, block = teleports.rows[0], teleports.rows[2]
    same(parted(plain["before"])[0], parted(block["before"])[0])
    kernels = 0
    for name, value in block["after"].items():
        if name not in block["past"]:
            continue
        if value.dim() != 4:
            assert block["past"][name].shape == value.shape
            assert torch.allclose(value.double(), diagonal(block, name), rtol=1e-4, atol=1e-6), name
            continue
        kernels += 1
        a, f = block["past"][name].double(), block["fisher"][name].double()
        assert a.shape == (*value.shape[:2], 9, 9)
        both = 2 * a + f
        ridge = 1e-6 * both.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * torch.eye(9)
        ridge = torch.where(ridge.sum((-2, -1), keepdim=True) > 0, ridge, torch.eye(9).double())
        anchor = block["anchor"][name].double()
        step = (block["before"][name].double() - anchor).flatten(2)[..., None]
        moved = torch.linalg.inv(both + ridge) @ (a + f + ridge) @ step
        wanted = anchor + moved[..., 0].view(anchor.shape)
        assert torch.allclose(value.double(), wanted, rtol=1e-3, atol=1e-5), name
    assert kernels == 5


def test_stages_by_role(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    """By default the balanced stage is left alone; there F_t stays that of the main stage's last epoch."""
    run_on(few, tmp_path / "main", "podnet", "ivt", tasks=1)
    assert teleports.epochs == [(1, "main", 1), (1, "main", 2)]
    run_on(few, tmp_path / "both", "podnet", "ivt", ivt={"stages": ["main", "balance"]}, tasks=1)
    assert teleports.epochs[2:] == [(1, "main", 1), (1, "main", 2), (1, "balance", 1), (1, "balance", 2)]
    for one, other in zip(teleports.rows[:2], teleports.rows[2:4], strict=True):
        same(one["after"], other["after"])
    last = teleports.rows[3]["fisher"]
    for row in teleports.rows[4:]:
        same(row["fisher"], last)
    teleports.epochs.clear()
    run_on(few, tmp_path / "balance", "podnet", "ivt", ivt={"stages": ["balance"]}, tasks=1)
    assert teleports.epochs == [(1, "balance", 1), (1, "balance", 2)]


@pytest.mark.parametrize("choice", ["keep", "reset"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_optimizer_state(choice: str, kind: str, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reset` zeroes the state of what is teleported, and of nothing else; `keep` leaves all as it is."""
    states: list[tuple[Tensors, Tensors]] = []
    now: list[Tensors] = [{}]

    def flat(self: IVTAddOn, optimizer: torch.optim.Optimizer) -> Tensors:
        named = {id(p): name for name, p in self.method.model.named_parameters()}
        pairs = [(named[id(p)], key, t) for p, state in optimizer.state.items() for key, t in state.items()]
        return {f"{name}:{key}": t.clone() for name, key, t in pairs}

    def before(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        now[0] = flat(self, optimizer)

    def after(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        states.append((now[0], flat(self, optimizer)))

    watch(monkeypatch, IVTAddOn, "end_epoch", before=before, after=after)
    options = {"epochs": 3, "optimizer": kind, "lr": 0.01}
    run_on(few, tmp_path, "finetune", "ivt", finetune=options, ivt={"interval": 2, "optimizer_state": choice}, tasks=1)
    assert len(states) == 3
    for epoch, (old, new) in enumerate(states, start=1):
        assert all(tensor.any() for tensor in old.values())
        for name, tensor in new.items():
            if choice == "reset" and epoch == 2 and not name.startswith("head.blocks.1."):
                assert not tensor.any(), name
            else:
                assert torch.equal(tensor, old[name]), name


def test_a_head_that_is_kept_keeps_its_optimizer_state(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []

    def after(self: IVTAddOn, task: Task, stage: Stage, epoch: int, optimizer: Any) -> None:
        named = dict(self.method.model.named_parameters())
        names = ("head.blocks.0.weight", "backbone.stem.conv.weight")
        seen.append(tuple(bool(optimizer.state[named[n]]["momentum_buffer"].any()) for n in names))  # type: ignore[arg-type]

    watch(monkeypatch, IVTAddOn, "end_epoch", after=after)
    run_on(few, tmp_path, "finetune", "ivt", ivt={"head": "keep", "optimizer_state": "reset"}, tasks=1)
    assert seen == [(True, False)] * 2


def test_an_optimiser_without_state_can_be_reset(few: Dataset, tmp_path: Path) -> None:
    keep = run_on(few, tmp_path / "keep", "finetune", "ivt", finetune={"momentum": 0.0})
    options = {"optimizer_state": "reset"}
    reset = run_on(few, tmp_path / "reset", "finetune", "ivt", finetune={"momentum": 0.0}, ivt=options)
    same(snapshot(keep, 2), snapshot(reset, 2))


def test_facts_speak_of_the_last_epoch(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    run = run_on(few, tmp_path, "finetune", "ivt", ivt={"interval": 2})
    base, *rest = (row["ivt"] for row in run.progress.statistics)
    assert base == {}
    for facts, row in zip(rest, teleports.rows, strict=True):
        assert {"all", "backbone.stem.conv"} <= set(facts)
        stem = "backbone.stem.conv.weight"
        a, f = row["past"][stem].double(), row["fisher"][stem].double()
        s = torch.where(a > 0, (a + f) / (2 * a + f), torch.ones_like(a)).mean().item()
        assert facts["backbone.stem.conv"]["scale"] == pytest.approx(s, abs=2e-5)
        assert 0.5 <= facts["all"]["scale"] <= 1
        far = (row["after"][stem] - row["anchor"][stem]).norm().item()
        assert facts["backbone.stem.conv"]["distance"] == pytest.approx(far, rel=1e-3)


def test_its_state_is_part_of_a_snapshot(few: Dataset, tmp_path: Path) -> None:
    run = run_on(few, tmp_path, "finetune", "ivt")
    kept = {name for name in weights(run.snapshot_path(1)) if name.startswith("addon/ivt/")}
    assert any("backbone.stem.conv.weight" in name for name in kept)


# Memory, and what a pre-trained model's loss allows ------------------------------------------------------


@pytest.mark.parametrize("batchnorm", ["keep", "interpolate", "map", "layer"])
def test_host_memory_changes_no_bit(batchnorm: str, few: Dataset, tmp_path: Path) -> None:
    given = {"batchnorm": batchnorm, "snapshot_fisher": True}
    runs = [
        make_run(few, tmp_path / memory, quick("flyp", "ivt", ivt={**given, "memory": memory}))
        for memory in ("device", "host")
    ]
    first, second = (finish(run) for run in runs)
    assert first["accuracy"] == second["accuracy"]
    assert first["statistics"] == second["statistics"]
    for task in range(3):
        same_weights(runs[0].snapshot_path(task), runs[1].snapshot_path(task))


@pytest.mark.parametrize(("method", "asked", "kept"), [("flyp", None, 0), ("flyp", True, 1), ("finetune", None, 1)])
def test_snapshots_of_pretrained_models_keep_fbar_where_asked_for(
    method: str, asked: bool | None, kept: int, few: Dataset, tmp_path: Path
) -> None:
    given = quick(method, "ivt", ivt={"snapshot_fisher": asked})
    run = make_run(few, tmp_path / "run", given)
    whole = finish(run)
    found = [name for name in weights(run.snapshot_path(1)) if name.startswith("addon/ivt/cumulative/")]
    assert bool(found) == bool(kept)
    later = make_run(few, tmp_path / "later", {**given, "start": str(run.snapshot_path(1))})
    if kept:
        assert finish(later)["accuracy"] == whole["accuracy"]
    else:
        with pytest.raises(CheckpointError, match=r"was not kept in it.*ivt\.snapshot_fisher=true"):
            finish(later)


@pytest.mark.parametrize(
    ("method", "options", "refused"),
    [
        ("flyp", {}, True), ("flyp", {"targets": "shared"}, True), ("flyp", {"targets": "classes"}, False),
        ("slca", {}, True), ("slca", {"form": "linear"}, False), ("spu", {}, True), ("rapf", {}, False),
    ],
)  # fmt: skip
def test_single_images_have_no_contrast(method: str, options: dict[str, Any], refused: bool) -> None:
    config = resolve(quick(method, "ivt", ivt={"first_fisher": "sample"}, **{method: options}))
    if not refused:
        return check_names(config)
    with pytest.raises(
        ConfigError, match=rf"'ivt' cannot be combined with {method} with these settings: .*ivt.first_fisher=batch"
    ):
        check_names(config)


def test_frozen_statistics_stay_frozen_where_the_fisher_is_measured(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("flyp", "ivt", ivt={"structure": "kernel"}))
    finish(run)
    stages = run.parts.plan(run.parts.tasks[0])
    assert [(stage.name, stage.batchnorm) for stage in stages] == [("main", "frozen"), ("ivt-fisher", "frozen")]
