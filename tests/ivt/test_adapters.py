"""The adapters in their hosts' own loops; skipped where a host is not installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from incvec import IVT

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def plain(epochs: int, clip: float | None) -> tuple[nn.Linear, IVT]:
    """The same two tasks in a loop of one's own."""
    model = network()
    ivt = IVT(model, interval=2)
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ivt.begin_task(optimizer=optimizer)
        for _ in range(epochs):
            for x, y in zip(X.split(4), Y.split(4), strict=True):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            ivt.end_epoch()
        ivt.end_task()
    return model, ivt


@pytest.mark.parametrize("clip", [None, 0.05])
def test_lightning(clip: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from incvec.ivt.adapters.lightning import IVTCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, index: Any) -> Any:
            return functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    callback = IVTCallback(module.network, interval=2)
    for _ in range(2):
        trainer = lightning.Trainer(
            max_epochs=3, accelerator="cpu", devices=1, callbacks=[callback], logger=False, gradient_clip_val=clip,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=4))
    model, ivt = plain(3, clip)
    torch.testing.assert_close(module.network.state_dict(), model.state_dict())
    torch.testing.assert_close(dict(callback.ivt.cumulative), dict(ivt.cumulative))


def test_lightning_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from incvec.ivt.adapters.lightning import IVTCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, index: Any) -> Any:
            return functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Stop(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def fit(module: Any, callback: Any, *others: Any, **resume: Any) -> None:
        trainer = lightning.Trainer(
            max_epochs=3, accelerator="cpu", devices=1, callbacks=[callback, *others], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=4), **resume)

    module = Module()
    callback = IVTCallback(module.network, interval=2)
    fit(module, callback)
    fit(module, callback, Stop())
    again = Module()
    resumed = IVTCallback(again.network, interval=2)
    fit(again, resumed, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.ivt.task == 2
    torch.testing.assert_close(again.network.state_dict(), module.network.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(dict(resumed.ivt.cumulative), dict(callback.ivt.cumulative), rtol=0, atol=0)


def test_huggingface(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from incvec.ivt.adapters.huggingface import IVTCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": functional.cross_entropy(self.network(x), labels)}

    model = Model()
    callback = IVTCallback(model.network, interval=2)
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    for _ in range(2):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=3, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            save_strategy="no", lr_scheduler_type="constant", max_grad_norm=0.05, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=rows, callbacks=[callback],
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        )  # fmt: skip
        trainer.train()
    want, ivt = plain(3, 0.05)
    torch.testing.assert_close(model.network.state_dict(), want.state_dict())
    torch.testing.assert_close(dict(callback.ivt.cumulative), dict(ivt.cumulative))
