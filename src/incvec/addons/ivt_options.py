"""The options of the IVT add-on, and which of them do not go together."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from incvec.config import Options
from incvec.contracts import Method


class IVTOptions(Options):
    interval: int | None = Field(10, ge=1, description="epochs between teleports; null: once, at the end of the stage")
    structure: Literal["diagonal", "kernel"] = Field("diagonal", description="of F; kernel: one block per kernel slice")
    first_fisher: Literal["batch", "sample"] = Field("batch", description="gradients of F_1: of batches or of samples")
    fisher_loss: Literal["whole", "own"] = Field(
        "whole", description="the loss of F: the whole one, or the terms of the task's own samples"
    )
    optimizer_state: Literal["keep", "reset"] = Field("keep", description="of teleported parameters, at a teleport")
    batchnorm: Literal["keep", "layer", "recalibrate"] = Field("keep", description="BatchNorm layers at a teleport")
    last: Literal["teleport", "skip"] = Field("teleport", description="the teleport after the last epoch of a stage")
    head: Literal["teleport", "keep"] = Field("teleport", description="the classifier's old rows, at a teleport")
    memory: Literal["device", "host"] = Field("device", description="where the anchor and Fbar are stored")
    snapshot_fisher: bool | None = Field(
        None, description="store Fbar in snapshots; null: only for models trained from scratch"
    )


def incompatible(options: IVTOptions, method: type[Method], method_options: Any) -> str | None:
    """Why these options cannot be combined with the method and its options, if they cannot."""
    if options.first_fisher == "sample" and method.uses_batch_contrast(method_options):
        return (
            f"first_fisher=sample needs gradients of single images, but {method.name}'s loss contrasts the images "
            "of a batch: with a single image its gradient is 0. Use ivt.first_fisher=batch."
        )
    if options.fisher_loss == "own" and not method.own_terms:
        return (
            f"fisher_loss=own needs a method that names the loss terms of the task's own samples; {method.name} "
            "names none. Use ivt.fisher_loss=whole."
        )
    if options.interval is None and options.last == "skip":
        return (
            "interval=null has a single teleport, at the end, and last=skip omits it: ivt never teleports. Use "
            "ivt.last=teleport, or an interval."
        )
    return None


def no_teleport(options: IVTOptions, epochs: int | None) -> str | None:
    """A warning, if an increment of so many epochs has no teleport."""
    if epochs is None or options.interval is None:
        return None
    skipped = options.last == "skip" and epochs % options.interval == 0
    if epochs // options.interval > skipped:
        return None
    reason = ", and ivt.last=skip omits the one after the last epoch" if skipped else ""
    remedy = ", or ivt.last=teleport" if skipped else ""
    return (
        f"ivt changes nothing in this run: an increment has {epochs} epoch(s), with a teleport every "
        f"{options.interval}{reason}. Use a smaller ivt.interval{remedy}."
    )
