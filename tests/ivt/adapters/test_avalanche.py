"""The Avalanche plugin in Avalanche's own strategies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

pytest.importorskip("avalanche")

from avalanche.benchmarks import nc_benchmark, split_online_stream, tensors_benchmark
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
from avalanche.core import SupervisedPlugin
from avalanche.models import DynamicModule, IncrementalClassifier
from avalanche.training import EWC, ICaRL, LwF, Naive, Replay
from avalanche.training.plugins import EvaluationPlugin

from incvec import IVT
from incvec.ivt.adapters.avalanche import IVTPlugin

from . import stream
from .stream import Network

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Dynamic(DynamicModule):
    """The network of the stream, which grows when Avalanche adapts it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def adaptation(self, experience: Any) -> None:
        self.network.grow_to(experience.current_experience + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


def benchmark() -> Any:
    tensors = [stream.samples(task) for task in range(1, stream.TASKS + 1)]
    return tensors_benchmark(tensors, tensors, task_labels=[0] * stream.TASKS, complete_test_set_only=False)


def options(model: nn.Module, *plugins: Any, **others: Any) -> dict[str, Any]:
    return {
        "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=stream.RATE),
        "criterion": nn.CrossEntropyLoss(), "train_mb_size": stream.BATCH, "train_epochs": stream.EPOCHS,
        "plugins": list(plugins), "evaluator": EvaluationPlugin(), **others,
    }  # fmt: skip


def strategy(plugin: Any, *plugins: Any, **others: Any) -> Any:
    return Naive(**options(Dynamic(), plugin, *plugins, **others))


def train(strategy: Any, *tasks: int) -> None:
    stream_ = benchmark().train_stream
    for task in tasks:
        strategy.train(stream_[task - 1], shuffle=False)


@pytest.mark.parametrize("model", [None, "network"])
def test_three_tasks_equal_the_reference(model: Any) -> None:
    naive = strategy(plugin := IVTPlugin(model, **stream.VERBATIM))
    train(naive, 1, 2, 3)
    if model == "network":
        stream.assert_reference(naive.model.network, plugin.ivt)
    else:
        theta, _ = stream.reference()
        assert stream.difference(stream.weights(naive.model.network), theta) < 1e-6


def test_the_recommended_options() -> None:
    naive = strategy(plugin := IVTPlugin(interval=stream.INTERVAL))
    train(naive, 1, 2, 3)
    want, _ = stream.plain()
    assert stream.difference(stream.weights(naive.model.network), want) == 0
    assert plugin.ivt.epochs == stream.EPOCHS


@pytest.mark.parametrize("task", [1, 2])
def test_killed_and_resumed_between_experiences(task: int, tmp_path: Path) -> None:
    def die() -> None:
        naive = strategy(IVTPlugin(interval=stream.INTERVAL))
        train(naive, *range(1, task + 1))
        save_checkpoint(naive, str(tmp_path / "checkpoint.pkl"))
        train(naive, task + 1)
        stream.kill()

    stream.killed(die)
    want = strategy(want_plugin := IVTPlugin(interval=stream.INTERVAL))
    train(want, 1, 2, 3)
    resumed, done = maybe_load_checkpoint(
        strategy(IVTPlugin(interval=stream.INTERVAL)), str(tmp_path / "checkpoint.pkl")
    )
    assert done == task
    train(resumed, *range(task + 1, stream.TASKS + 1))
    plugin = next(plugin for plugin in resumed.plugins if isinstance(plugin, IVTPlugin))
    assert plugin.ivt.task == stream.TASKS
    assert plugin.ivt.report()
    stream.assert_same(resumed.model, plugin.ivt, want.model, want_plugin.ivt)


class Witness(SupervisedPlugin):
    """Algorithm 1 in float64, fed by torch's global hook: what each teleport should give.

    One of two is before IVTPlugin and sees the weights before a teleport, the other one is after it.
    """

    def __init__(self, other: Any = None) -> None:
        super().__init__()
        self.other = other
        self.past: dict[str, Tensor] = {}
        self.differences: list[float] = []

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        if self.other is None:
            named = dict(strategy.model.named_parameters())
            if strategy.clock.train_exp_epochs == 0:
                self.anchor = {name: p.detach().double().clone() for name, p in named.items()}
            self.sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
            self.steps = 0
            self.handle = register_optimizer_step_pre_hook(lambda *args: self.add(named))

    def add(self, named: dict[str, nn.Parameter]) -> None:
        self.steps += 1
        for name, parameter in named.items():
            if parameter.grad is not None:
                self.sums[name] += parameter.grad.double() ** 2

    def after_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        if self.other is None:
            self.handle.remove()
            self.before = {name: p.detach().double().clone() for name, p in strategy.model.named_parameters()}
            return
        self = self.other
        teleports = self.past and (strategy.clock.train_exp_epochs + 1) % stream.INTERVAL == 0
        for name, parameter in strategy.model.named_parameters():
            want, new = self.before[name], self.sums[name] / self.steps
            if teleports and name in self.past:
                past = torch.zeros_like(new)
                past[: len(self.past[name])] = self.past[name]
                s = (past + new) / (2 * past + new)
                s[2 * past + new == 0] = 1
                want = self.anchor[name] + s * (want - self.anchor[name])
                assert not torch.equal(want, self.before[name])
            self.differences.append(float((parameter - want).abs().max()))

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        if self.other is None:
            for name, total in self.sums.items():
                new = total / self.steps
                old = self.past.get(name)
                if old is not None:
                    new[: len(old)] += old
                self.past[name] = new


def split_by_class() -> Any:
    """Two classes per experience."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(72, 5, generator=generator), torch.arange(72) % 6
    data = TensorDataset(x, y)
    data.targets = y.tolist()
    data = as_classification_dataset(data)
    return nc_benchmark(data, data, n_experiences=stream.TASKS, task_labels=False, seed=0)


def incremental() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), IncrementalClassifier(6))


@pytest.mark.parametrize("name", ["naive", "replay", "lwf", "ewc", "icarl"])
def test_strategies_against_a_witness(name: str) -> None:
    witness = Witness()
    plugins = [witness, plugin := IVTPlugin(**stream.VERBATIM), Witness(witness)]
    if name == "icarl":
        extractor, classifier = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), IncrementalClassifier(6)
        given = options(nn.ModuleList([extractor, classifier]), *plugins)
        del given["model"], given["criterion"]
        host = ICaRL(
            feature_extractor=extractor, classifier=classifier, memory_size=6, buffer_transform=None,
            fixed_memory=True, **given,
        )  # fmt: skip
    elif name == "lwf":
        host = LwF(alpha=1.0, temperature=2.0, **options(incremental(), *plugins))
    elif name == "ewc":
        host = EWC(ewc_lambda=0.5, **options(incremental(), *plugins))
    elif name == "replay":
        host = Replay(mem_size=6, **options(incremental(), *plugins))
    else:
        host = Naive(**options(incremental(), *plugins))
    classes = split_by_class()
    for experience in classes.train_stream:
        host.train(experience)
        host.eval(classes.test_stream)  # Avalanche grows the classifier to all classes of the test stream
    assert plugin.ivt.task == stream.TASKS
    print(f"largest difference to the witness: {max(witness.differences):.1e}")
    assert max(witness.differences) < 1e-6


def test_online_streams_have_one_task_per_experience(tmp_path: Path) -> None:
    """Six sub-experiences of half a batch; two passes over each, an epoch of IVT after every third."""
    original = benchmark()
    plugin = IVTPlugin(interval=1, last="teleport", subexperiences=3)
    naive = strategy(plugin, train_epochs=2, train_mb_size=4)
    model = Network()
    ivt = IVT(model, interval=1, last="teleport")
    optimizer: Any = None
    for task, experience in enumerate(original.train_stream, start=1):
        online = split_online_stream([experience], 4, shuffle=False, access_task_boundaries=True)
        for index, part in enumerate(online):
            naive.train(part, shuffle=False)
            if task == 2 and index == 1:  # checkpoints work within a task, too
                save_checkpoint(naive, str(tmp_path / "checkpoint.pkl"))
                naive, _ = maybe_load_checkpoint(naive, str(tmp_path / "checkpoint.pkl"))
                plugin = next(p for p in naive.plugins if isinstance(p, IVTPlugin))
        assert plugin.ivt.task == task
        assert not plugin.ivt.in_task

        model.grow_to(task)
        optimizer = torch.optim.SGD(model.parameters(), lr=stream.RATE)
        ivt.begin_task(optimizer, epochs=2)
        x, y = stream.samples(task)
        for index, batch in enumerate(zip(x.split(4), y.split(4), strict=True), start=1):
            for _ in range(2):
                optimizer.zero_grad()
                functional.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
            if index % 3 == 0:
                ivt.end_epoch()
        ivt.end_task()
    assert ivt.report()
    assert stream.difference(stream.weights(naive.model.network), stream.weights(model)) == 0


def test_online_streams_without_boundaries_are_refused() -> None:
    online = split_online_stream(benchmark().train_stream, 4, access_task_boundaries=False)
    naive = strategy(IVTPlugin())
    with pytest.raises(ValueError, match="access_task_boundaries"):
        naive.train(next(iter(online)))


def test_weights_that_other_plugins_change_are_in_the_anchor() -> None:
    class Late(SupervisedPlugin):
        def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                strategy.model.network.trunk.weight.fill_(0.5)

        def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
            assert bool((plugin.ivt.anchor["network.trunk.weight"] == 0.5).all())

    train(strategy(plugin := IVTPlugin(), Late()), 1)


def test_after_an_exception_the_task_is_abandoned() -> None:
    class Raise(SupervisedPlugin):
        armed = True

        def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
            if self.armed:
                raise ValueError("the disk is full")

    naive = strategy(plugin := IVTPlugin(), failing := Raise())
    with pytest.raises(ValueError, match="disk"):
        train(naive, 1)
    failing.armed = False
    with pytest.warns(UserWarning, match="abandoned"):
        train(naive, 1)
    assert plugin.ivt.task == 1
