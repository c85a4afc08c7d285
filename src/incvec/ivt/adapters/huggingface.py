"""IVT as a callback for the Hugging Face Trainer: one `trainer.train()` is one task.

    callback = IVTCallback(interval=10)
    for task in tasks:
        ...                                            # grow the model
        Trainer(model, ..., callbacks=[callback]).train()

A task begins with its first step and ends with its last epoch; teleports come before that epoch's evaluation. Each
checkpoint folder of the Trainer gets IVT's state as `ivt.safetensors`: `train(resume_from_checkpoint=...)` resumes
within a task. In a new process the next task starts with `callback.load("output/checkpoint-500")`.

A training that ends in an exception leaves its task open; one that starts anew abandons it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .hosted import Hosted, Target, import_host

_transformers = import_host("transformers", install="transformers accelerate")

FILE = "ivt.safetensors"


class IVTCallback(Hosted, _transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """Takes the model to teleport (by default the Trainer's) and the options of `IVT`."""

    def __init__(self, model: Target = None, **options: Any) -> None:
        super().__init__(model, **options)
        self._steps = False  # since the last end of an epoch

    def load(self, folder: str | Path) -> None:
        """Start the next training with the state in this checkpoint folder.

        For the next task in a new process, and to resume from a folder that was moved out of `output_dir`.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no {FILE}: give a folder checkpoint-N that was written with this callback"
            )
        self._saved = import_host("safetensors.torch", install="safetensors").load_file(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resumed = state.global_step > 0
        if resumed and self._saved is None:
            self.load(_checkpoint(args, state))
        self.start(kwargs["model"], [kwargs["optimizer"]], resumed)
        self._steps = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.ivt.in_task:
            epochs = state.num_train_epochs  # rounded up; sys.maxsize for a data set of unknown length
            self.ivt.begin_task(kwargs["optimizer"], epochs=epochs if epochs < sys.maxsize else None)
        self._steps = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Not in on_epoch_end: the Trainer saves and evaluates in between.
        if float(state.epoch).is_integer() or state.global_step >= state.max_steps:
            self._end_epoch(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._steps:  # the epoch ended before its last step
            self._end_epoch(state)

    def _end_epoch(self, state: Any) -> None:
        self.ivt.end_epoch()
        self._steps = False
        if state.global_step >= state.max_steps:
            self.ivt.end_task()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ivt.in_task:
            self.ivt.end_task()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and folder.is_dir():
            import_host("safetensors.torch", install="safetensors").save_file(self.present_state(), folder / FILE)


def _checkpoint(args: Any, state: Any) -> Path:
    """The folder from which a training was resumed. The Trainer does not give it to callbacks."""
    name = f"checkpoint-{state.global_step}"
    folders = [Path(args.output_dir) / name]
    if isinstance(args.resume_from_checkpoint, str):
        folders.insert(0, Path(args.resume_from_checkpoint))
    for folder in folders:
        if (folder / FILE).is_file():
            return folder
    raise FileNotFoundError(
        f"training is resumed at step {state.global_step}, but {folders[-1]} has no {FILE}. If the checkpoint is "
        "elsewhere, call load(folder) of the callback first; if it was written without the callback, load only its "
        "weights and start a training"
    )
