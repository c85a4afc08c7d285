"""The code on docs/plugin-hosts.md, run as it is written there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.documents import blocks

from . import stream
from .stream import Network

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def shown(host: str, **names: Any) -> dict[str, Any]:
    page = [block.text for block in blocks() if block.document == "docs/plugin-hosts.md"]
    (text,) = [text for text in page if f"incvec.ivt.adapters.{host} " in text]
    names = {"epochs": 20, **names}
    exec(compile(text, host, "exec"), names)
    return names


def tasks() -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            number=task,
            name=f"task{task}",
            loader=DataLoader(TensorDataset(*stream.samples(task)), batch_size=stream.BATCH),
            dataset=[{"x": x, "labels": y} for x, y in zip(*stream.samples(task), strict=True)],
        )
        for task in range(1, stream.TASKS + 1)
    ]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": functional.cross_entropy(self.network(x), labels)}


def add_classes(model: Any, task: SimpleNamespace) -> None:
    model.network.grow_to(task.number)


def test_avalanche() -> None:
    pytest.importorskip("avalanche")
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.models import IncrementalClassifier

    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), IncrementalClassifier(6))
    tensors = [stream.samples(task) for task in range(1, stream.TASKS + 1)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    benchmark = tensors_benchmark(tensors, tensors, task_labels=[0] * stream.TASKS, complete_test_set_only=False)
    names = shown(
        "avalanche", model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), benchmark=benchmark
    )  # fmt: skip
    (plugin,) = [plugin for plugin in names["strategy"].plugins if isinstance(plugin, names["IVTPlugin"])]
    assert plugin.ivt.task == stream.TASKS
    assert plugin.ivt.report()


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: Any, index: int) -> Any:
            return functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monkeypatch.chdir(tmp_path)
    names = shown("lightning", module=Module(), tasks=tasks(), add_classes=add_classes)
    assert names["callback"].ivt.task == stream.TASKS
    assert names["callback"].ivt.report()


def test_huggingface(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    names = shown("huggingface", model=Model(), tasks=tasks(), add_classes=add_classes, folder=tmp_path)
    assert names["callback"].ivt.task == stream.TASKS
    assert names["callback"].ivt.report()


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    network, accelerator = Network(), accelerate.Accelerator(cpu=True)
    names = shown(
        "accelerate", accelerator=accelerator, network=network, folder=str(tmp_path), tasks=tasks(),
        add_classes=lambda network, task: network.grow_to(task.number), loss=functional.cross_entropy,
    )  # fmt: skip
    ivt = names["ivt"]
    assert ivt.task == stream.TASKS
    assert ivt.report()
    assert [path.name for path in tmp_path.glob("optimizer*")] == ["optimizer.bin"]  # the last task's only
    ivt.begin_task(names["optimizer"])
    accelerator.load_state(str(tmp_path))
    assert ivt.task == stream.TASKS
    assert not ivt.in_task
