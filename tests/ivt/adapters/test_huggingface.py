"""The callback of the Hugging Face Trainer in the Trainer's own loop."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from incvec.ivt.adapters.huggingface import IVTCallback  # noqa: E402

from . import stream  # noqa: E402
from .stream import Network  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS = stream.EPOCHS * stream.BATCHES


class Model(nn.Module):
    def __init__(self, task: int = 1, kind: type[Network] = Network) -> None:
        super().__init__()
        self.network = kind()
        self.network.grow_to(task)
        self.evaluated: list[torch.Tensor] = []

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.network(x)
        if not self.training:
            self.evaluated.append(self.network.trunk.weight.detach().clone())
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Trainer(transformers.Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class KillAfter(transformers.TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.steps:
            stream.kill()


def train(model: Model, callback: Any, folder: Path, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
    task = model.network.head.out_features // 2
    rows = [{"x": x, "labels": y} for x, y in zip(*stream.samples(task), strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, lr_scheduler_type="constant",
        per_device_train_batch_size=stream.BATCH, max_grad_norm=0.0,
        **{"num_train_epochs": stream.EPOCHS, "save_strategy": "no", **options},
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:1], callbacks=[callback, *callbacks],
        optimizers=(torch.optim.SGD(model.parameters(), lr=stream.RATE), None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def three_tasks(folder: Path, model: Any, kind: type[Network] = Network, **options: Any) -> tuple[Model, Any]:
    hosted = Model(kind=kind)
    callback = IVTCallback(hosted.network if model == "module" else model, **options)
    for task in range(1, stream.TASKS + 1):
        hosted.network.grow_to(task)
        train(hosted, callback, folder)
    return hosted, callback


def second_task(folder: Path) -> tuple[Model, Any]:
    """One task, then a model that has grown to the next one."""
    model, callback = Model(), IVTCallback(interval=stream.INTERVAL)
    train(model, callback, folder)
    model.network.grow_to(2)
    return model, callback


@pytest.mark.parametrize("model", ["module", "network"])
def test_three_tasks_equal_the_reference(model: str, tmp_path: Path) -> None:
    hosted, callback = three_tasks(tmp_path, model, **stream.VERBATIM)
    stream.assert_reference(hosted.network, callback.ivt)


def test_the_whole_model_by_default_and_the_recommended_options(tmp_path: Path) -> None:
    model, callback = three_tasks(tmp_path, None, interval=stream.INTERVAL)
    want, _ = stream.plain()
    assert stream.difference(stream.weights(model.network), want) == 0
    assert callback.ivt.epochs == stream.EPOCHS


def test_maps_of_batchnorm_layers(tmp_path: Path) -> None:
    model, _ = three_tasks(tmp_path, None, stream.Normalized, interval=stream.INTERVAL, batchnorm="layer")
    want, _ = stream.plain(stream.Normalized, batchnorm="layer")
    assert stream.difference(stream.weights(model.network), want) == 0


@pytest.mark.parametrize(
    ("options", "killed_after", "checkpoint"),
    [
        ({"save_strategy": "epoch"}, 7, 6),
        ({"save_strategy": "steps", "save_steps": 4}, 5, 4),
        ({"save_strategy": "steps", "save_steps": 3}, 7, 6),
        ({"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}, 3, 3),
    ],
    ids=["epoch", "mid-epoch", "last step", "accumulation"],
)
def test_killed_and_resumed_within_a_task(options: Any, killed_after: int, checkpoint: int, tmp_path: Path) -> None:
    def die() -> None:
        model, callback = second_task(tmp_path)
        train(model, callback, tmp_path, KillAfter(killed_after), **options)

    stream.killed(die)
    want, want_callback = second_task(tmp_path)
    train(want, want_callback, tmp_path / "other", **{**options, "save_strategy": "no"})
    model, callback = Model(2), IVTCallback(interval=stream.INTERVAL)
    train(model, callback, tmp_path, resume=str(tmp_path / f"checkpoint-{checkpoint}"), **options)
    assert callback.ivt.task == 2
    stream.assert_same(model, callback.ivt, want, want_callback.ivt)


@pytest.mark.parametrize("save", [{"save_strategy": "epoch"}, {"save_strategy": "steps", "save_steps": 500}])
def test_restarted_after_a_finished_task_the_next_one_begins(save: Any, tmp_path: Path) -> None:
    model, callback = Model(), IVTCallback(interval=stream.INTERVAL)
    train(model, callback, tmp_path, **save)
    again, resumed = Model(), IVTCallback(interval=stream.INTERVAL)
    again.load_state_dict(model.state_dict())
    resumed.load(tmp_path / f"checkpoint-{STEPS}")
    for one, ivt_callback in ((model, callback), (again, resumed)):
        one.network.grow_to(2)
        train(one, ivt_callback, tmp_path / "next")
        assert ivt_callback.ivt.task == 2
        assert ivt_callback.ivt.report()
    stream.assert_same(again, resumed.ivt, model, callback.ivt)


def test_resuming_a_finished_training_ends_nothing_twice(tmp_path: Path) -> None:
    model, callback = Model(), IVTCallback(interval=stream.INTERVAL)
    train(model, callback, tmp_path, save_strategy="epoch")
    again, resumed = Model(), IVTCallback(interval=stream.INTERVAL)
    train(again, resumed, tmp_path, resume=True)
    assert resumed.ivt.task == 1
    stream.assert_same(again, resumed.ivt, model, callback.ivt)


def test_a_checkpoint_that_was_moved_or_lost(tmp_path: Path) -> None:
    model, callback = Model(), IVTCallback(interval=stream.INTERVAL)
    train(model, callback, tmp_path, save_strategy="epoch")
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "checkpoint-6", moved)
    again, resumed = Model(), IVTCallback(interval=stream.INTERVAL)
    with pytest.raises(FileNotFoundError, match=r"load\(folder\)"):
        train(again, resumed, tmp_path, resume=str(moved))
    resumed.load(moved)
    train(again, resumed, tmp_path, resume=str(moved))
    stream.assert_same(again, resumed.ivt, model, callback.ivt)
    with pytest.raises(FileNotFoundError, match=r"ivt\.safetensors"):
        resumed.load(tmp_path)


@pytest.mark.parametrize("evaluation", [{"eval_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 3}])
def test_evaluation_sees_teleported_weights(evaluation: Any, tmp_path: Path) -> None:
    class After(transformers.TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(model.network.trunk.weight.detach().clone())

    model, callback = second_task(tmp_path)
    seen: list[torch.Tensor] = []
    train(model, callback, tmp_path, After(), **evaluation)
    assert len(seen) == stream.EPOCHS
    torch.testing.assert_close(model.evaluated, seen, rtol=0, atol=0)
    assert callback.ivt.report()


def test_a_fraction_of_an_epoch_and_steps(tmp_path: Path) -> None:
    model, callback = second_task(tmp_path)
    train(model, callback, tmp_path, num_train_epochs=2.5)
    assert callback.ivt.epochs == callback.ivt.epoch == 3
    model.network.grow_to(3)
    train(model, callback, tmp_path, max_steps=4)
    assert callback.ivt.epochs == callback.ivt.epoch == 2
    assert callback.ivt.task == 3


def test_after_an_exception_a_new_training_abandons_the_task(tmp_path: Path) -> None:
    class Raise(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                raise ValueError("the disk is full")

    model, callback = second_task(tmp_path)
    with pytest.raises(ValueError, match="disk"):
        train(model, callback, tmp_path, Raise(), save_strategy="epoch")
    with pytest.warns(UserWarning, match="abandoned"):
        train(model, callback, tmp_path)
    assert callback.ivt.task == 2
    callback.load(tmp_path / "checkpoint-3")
    with pytest.raises(RuntimeError, match="middle of task 2"):
        train(model, callback, tmp_path)
