"""The Lightning callback in Lightning's own loop."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")

from incvec import IVT  # noqa: E402
from incvec.ivt.adapters.lightning import IVTCallback  # noqa: E402

from . import stream  # noqa: E402
from .stream import Network  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Module(lightning.LightningModule):
    def __init__(self, task: int = 1, kind: type[Network] = Network) -> None:
        super().__init__()
        self.network = kind()
        self.network.grow_to(task)
        self.validated: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> Any:
        return functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append(self.network.trunk.weight.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=stream.RATE)


class Resumable:
    """A loader that remembers its place, which Lightning needs to resume within an epoch."""

    def __init__(self, task: int) -> None:
        self.batches, self.next, self.start = stream.batches(task), 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for index in range(start, len(self.batches)):
            self.next = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"] % len(self.batches)


class KillAfter(lightning.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step >= self.steps:
            stream.kill()


def fit(module: Module, callback: Any, folder: Path, *callbacks: Any, loader: Any = None, **options: Any) -> Any:
    trainer = lightning.Trainer(
        **{"max_epochs": stream.EPOCHS, "enable_checkpointing": False, **options.pop("trainer", {})},
        accelerator="cpu", devices=1, callbacks=[callback, *callbacks], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    task = module.network.head.out_features // 2
    default = DataLoader(TensorDataset(*stream.samples(task)), batch_size=stream.BATCH)
    trainer.fit(module, default if loader is None else loader, **options)
    return trainer


def three_tasks(folder: Path, model: Any, kind: type[Network] = Network, **options: Any) -> tuple[Module, Any]:
    module = Module(kind=kind)
    callback = IVTCallback(module.network if model == "module" else model, **options)
    for task in range(1, stream.TASKS + 1):
        module.network.grow_to(task)
        fit(module, callback, folder)
    return module, callback


def saving(folder: Path, **options: Any) -> Any:
    return lightning.callbacks.ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, **options)


@pytest.mark.parametrize("model", ["module", "network"])
def test_three_tasks_equal_the_reference(model: str, tmp_path: Path) -> None:
    module, callback = three_tasks(tmp_path, model, **stream.VERBATIM)
    stream.assert_reference(module.network, callback.ivt)


def test_the_whole_module_by_default_and_the_recommended_options(tmp_path: Path) -> None:
    module, callback = three_tasks(tmp_path, None, interval=stream.INTERVAL)
    want, _ = stream.plain()
    assert stream.difference(stream.weights(module.network), want) == 0
    assert callback.ivt.model is module
    assert callback.ivt.epochs == stream.EPOCHS


def test_maps_of_batchnorm_layers(tmp_path: Path) -> None:
    options: Any = {"interval": stream.INTERVAL, "batchnorm": "layer"}
    module, _ = three_tasks(tmp_path, "network", stream.Normalized, **options)
    want, _ = stream.plain(stream.Normalized, batchnorm="layer")
    assert stream.difference(stream.weights(module.network), want) == 0
    keep, _ = stream.plain(stream.Normalized, batchnorm="keep")
    assert stream.difference(stream.weights(module.network), keep) > 0
    # training_step calls the network, not the module: a warning at the first step, an error at the first teleport
    with pytest.warns(UserWarning, match="call the model itself"), pytest.raises(RuntimeError, match="need inputs"):
        three_tasks(tmp_path, None, stream.Normalized, **options)


def test_the_fisher_of_the_tasks_own_loss(tmp_path: Path) -> None:
    class Distilled(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if callback.ivt.collecting:
                callback.ivt.collect(loss)
            return 2 * loss

    module = Distilled()
    callback = IVTCallback("network", interval=stream.INTERVAL, fisher_loss="own")
    for task in range(1, stream.TASKS + 1):
        module.network.grow_to(task)
        fit(module, callback, tmp_path)
    want, cumulative = stream.plain(fisher_loss="own")
    assert stream.difference(stream.weights(module.network), want) == 0
    assert stream.difference(dict(callback.ivt.cumulative), cumulative) == 0


def test_an_ivt_of_ones_own_and_a_new_module_per_task(tmp_path: Path) -> None:
    want, want_callback = three_tasks(tmp_path, None, interval=stream.INTERVAL)
    callback = IVTCallback(interval=stream.INTERVAL)
    old = None
    for task in range(1, stream.TASKS + 1):
        module = Module(task)
        if old is not None:
            with torch.no_grad():
                for name, value in stream.weights(old).items():
                    module.get_parameter(name)[: len(value)] = value
        fit(module, callback, tmp_path)
        old = module
    stream.assert_same(module, callback.ivt, want, want_callback.ivt)
    module = Module()
    ivt = IVT.verbatim(module.network, stream.INTERVAL)
    callback = IVTCallback(ivt)
    fit(module, callback, tmp_path)
    assert callback.ivt is ivt
    assert ivt.task == 1


def second_task(folder: Path) -> tuple[Module, Any]:
    """One task, then a module that has grown to the next one."""
    module = Module()
    callback = IVTCallback(interval=stream.INTERVAL)
    fit(module, callback, folder)
    module.network.grow_to(2)
    return module, callback


@pytest.mark.parametrize(
    ("when", "killed_after", "checkpoint"),
    [
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, 7, "epoch=1-step=6"),
        ({"every_n_train_steps": 1}, 4, "epoch=1-step=4"),
        ({"every_n_train_steps": 3}, 7, "epoch=1-step=6"),
    ],
    ids=["epoch", "mid-epoch", "last step"],
)
@pytest.mark.parametrize("validation", [False, True])
def test_killed_and_resumed_within_a_task(
    when: Any, killed_after: int, checkpoint: str, validation: bool, tmp_path: Path
) -> None:
    if validation and "every_n_epochs" in when:
        when = {"every_n_epochs": 1}  # then Lightning saves after the validation
    valid: Any = {"val_dataloaders": DataLoader(TensorDataset(*stream.samples(2)))} if validation else {}
    with_saving = {"enable_checkpointing": True}

    def die() -> None:
        module, callback = second_task(tmp_path)
        fit(
            module, callback, tmp_path, saving(tmp_path, **when), KillAfter(killed_after), trainer=with_saving,
            loader=Resumable(2), **valid,
        )  # fmt: skip

    stream.killed(die)
    want, want_callback = second_task(tmp_path)
    fit(want, want_callback, tmp_path, loader=Resumable(2), **valid)
    module, callback = Module(2), IVTCallback(interval=stream.INTERVAL)
    fit(module, callback, tmp_path, loader=Resumable(2), ckpt_path=tmp_path / f"{checkpoint}.ckpt", **valid)
    assert callback.ivt.task == 2
    stream.assert_same(module, callback.ivt, want, want_callback.ivt)


def test_resumed_within_an_epoch_with_a_probe(tmp_path: Path) -> None:
    """Remembered inputs are not in checkpoints, but a probe has its own."""

    def made(task: int) -> tuple[Module, Any]:
        module = Module(task, stream.Normalized)
        images = stream.samples(1)[0]
        probe = lambda: module.network(images)  # noqa: E731
        return module, IVTCallback("network", interval=stream.INTERVAL, batchnorm="layer", probe=probe)

    want, want_callback = made(1)
    fit(want, want_callback, tmp_path)
    want.network.grow_to(2)
    saved = saving(tmp_path, every_n_train_steps=1)
    fit(want, want_callback, tmp_path, saved, loader=Resumable(2), trainer={"enable_checkpointing": True})
    module, callback = made(2)
    fit(module, callback, tmp_path, loader=Resumable(2), ckpt_path=tmp_path / "epoch=1-step=4.ckpt")
    stream.assert_same(module, callback.ivt, want, want_callback.ivt)


@pytest.mark.parametrize("epoch", [2, 3, 4])
def test_a_checkpoint_of_a_callback_that_comes_first_misses_no_end_of_an_epoch(epoch: int, tmp_path: Path) -> None:
    class Early(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == epoch * stream.BATCHES:
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    want, want_callback = second_task(tmp_path)
    trainer = lightning.Trainer(
        max_epochs=stream.EPOCHS, accelerator="cpu", callbacks=[Early(), want_callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(want, Resumable(2))
    module, callback = Module(2), IVTCallback(interval=stream.INTERVAL)
    fit(module, callback, tmp_path, loader=Resumable(2), ckpt_path=tmp_path / "early.ckpt")
    stream.assert_same(module, callback.ivt, want, want_callback.ivt)


@pytest.mark.parametrize("validation", [False, True])
def test_restarted_after_a_finished_task_the_next_one_begins(validation: bool, tmp_path: Path) -> None:
    """From the checkpoint that Lightning itself wrote in the last epoch."""
    module, callback = Module(), IVTCallback(interval=stream.INTERVAL)
    valid: Any = {"val_dataloaders": DataLoader(TensorDataset(*stream.samples(1)))} if validation else {}
    fit(module, callback, tmp_path, saving(tmp_path), trainer={"enable_checkpointing": True}, **valid)
    checkpoint = torch.load(tmp_path / f"epoch={stream.EPOCHS - 1}-step={stream.EPOCHS * stream.BATCHES}.ckpt")

    again, resumed = Module(), IVTCallback(interval=stream.INTERVAL)
    again.load_state_dict(checkpoint["state_dict"])
    resumed.load_state_dict(checkpoint["callbacks"][resumed.state_key])
    for one, ivt_callback in ((module, callback), (again, resumed)):
        one.network.grow_to(2)
        fit(one, ivt_callback, tmp_path)
        assert ivt_callback.ivt.task == 2
        assert ivt_callback.ivt.report()
    stream.assert_same(again, resumed.ivt, module, callback.ivt)


def test_resuming_a_finished_fit_ends_nothing_twice(tmp_path: Path) -> None:
    module, callback = Module(), IVTCallback(interval=stream.INTERVAL)
    folder = tmp_path / "saved"
    fit(module, callback, tmp_path, saving(folder), trainer={"enable_checkpointing": True},
        val_dataloaders=DataLoader(TensorDataset(*stream.samples(1))))  # fmt: skip
    last = folder / f"epoch={stream.EPOCHS - 1}-step={stream.EPOCHS * stream.BATCHES}.ckpt"
    again, resumed = Module(), IVTCallback(interval=stream.INTERVAL)
    fit(again, resumed, tmp_path, ckpt_path=last)
    for one, ivt_callback in ((module, callback), (again, resumed)):
        one.network.grow_to(2)
        fit(one, ivt_callback, tmp_path)
    assert resumed.ivt.task == 2
    stream.assert_same(again, resumed.ivt, module, callback.ivt)


def test_validation_sees_teleported_weights(tmp_path: Path) -> None:
    module, callback = second_task(tmp_path)
    seen = []

    class After(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(pl_module.network.trunk.weight.detach().clone())

    module.validated.clear()
    loader = DataLoader(TensorDataset(*stream.samples(2)), batch_size=stream.BATCHES * stream.BATCH)
    fit(module, callback, tmp_path, After(), val_dataloaders=loader, trainer={"num_sanity_val_steps": 0})
    assert len(seen) == stream.EPOCHS
    torch.testing.assert_close(module.validated, seen, rtol=0, atol=0)
    assert callback.ivt.report()


def test_steps_instead_of_epochs(tmp_path: Path) -> None:
    module, callback = second_task(tmp_path)
    fit(module, callback, tmp_path, trainer={"max_epochs": -1, "max_steps": 2 * stream.BATCHES + 1})
    assert callback.ivt.epochs == callback.ivt.epoch == 3
    assert not callback.ivt.in_task


def test_one_trainer_for_several_tasks(tmp_path: Path) -> None:
    want, want_callback = second_task(tmp_path)
    fit(want, want_callback, tmp_path)
    module, callback = Module(), IVTCallback(interval=stream.INTERVAL)
    trainer = fit(module, callback, tmp_path)
    module.network.grow_to(2)
    trainer.fit_loop.max_epochs += stream.EPOCHS
    trainer.fit(module, DataLoader(TensorDataset(*stream.samples(2)), batch_size=stream.BATCH))
    assert callback.ivt.epochs == stream.EPOCHS
    stream.assert_same(module, callback.ivt, want, want_callback.ivt)


def test_after_an_exception_a_new_fit_abandons_the_task(tmp_path: Path) -> None:
    class Raise(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                raise ValueError("the disk is full")

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "exception.ckpt")

    module, callback = second_task(tmp_path)
    with pytest.raises(ValueError, match="disk"):
        fit(module, callback, tmp_path, Raise())
    assert callback.ivt.in_task
    with pytest.warns(UserWarning, match="abandoned"):
        fit(module, callback, tmp_path)
    assert callback.ivt.task == 2

    state = torch.load(tmp_path / "exception.ckpt")["callbacks"][callback.state_key]
    assert state["ivt"]["in_task"]
    again = IVTCallback(interval=stream.INTERVAL)
    again.load_state_dict(state)
    with pytest.raises(RuntimeError, match="middle of task 2"):
        fit(Module(2), again, tmp_path)


def test_a_checkpoint_without_ivt_is_refused(tmp_path: Path) -> None:
    module = Module()
    trainer = fit(module, lightning.callbacks.LambdaCallback(), tmp_path, trainer={"max_epochs": 1})
    trainer.save_checkpoint(tmp_path / "without.ckpt")
    with pytest.raises(RuntimeError, match="no state of IVT"):
        fit(module, IVTCallback(), tmp_path, ckpt_path=tmp_path / "without.ckpt")


def test_processes_that_end_with_the_fit_are_refused(tmp_path: Path) -> None:
    """What the callback has learnt would stay in them."""
    with pytest.raises(Exception, match='strategy="ddp"'):
        fit(Module(), IVTCallback(), tmp_path, trainer={"strategy": "ddp_fork"})


def test_wrong_options_are_noticed_at_once() -> None:
    with pytest.raises(ValueError, match="batchnorm"):
        IVTCallback(batchnorm="maps")
    with pytest.raises(TypeError, match="module"):
        IVTCallback(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no IVT yet"):
        _ = IVTCallback().ivt
