"""One run over several processes (torchrun), a GPU each: what a rank needs to know and to say to the others.

Every rank holds the whole model and takes its slice of each global batch. Gradients are averaged as one flat buffer
before anything looks at them, so from there on all ranks do the same; hooks run on every rank, and the first rank's
word counts where two devices could differ in the last bit. With one rank everything here does nothing.

(No DistributedDataParallel: it would miss gradients taken by `autograd.grad`, and calls of a model's parts.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from incvec.contracts import Stage
from incvec.engine.build import pick_device
from incvec.errors import ConfigError
from incvec.nets.resnet import Norm

INIT_TIMEOUT = timedelta(hours=2)  # the others wait while the first one decodes a data set

LEFT = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # as gloo puts it


@dataclass(frozen=True)
class Ranks:
    """This process's place among those of one run."""

    rank: int = 0
    size: int = 1
    local: int | None = None  # its number on this machine, which is its GPU's; None where it is alone
    backend: str = ""
    device: torch.device | None = None

    @property
    def is_main(self) -> bool:
        """Whether it is the one that writes and prints."""
        return self.rank == 0

    @property
    def captures(self) -> bool:
        """Whether its messages can be part of a CUDA graph: those of gloo go through the host."""
        return self.backend != "gloo"

    def slice(self, batch: int) -> slice:
        """Its part of a global batch, which must divide by the number of ranks."""
        local = batch // self.size
        return slice(self.rank * local, (self.rank + 1) * local)

    def check(self, stages: Iterable[Stage]) -> None:
        """Before anything is trained: each rank takes an equal part of every batch. The first one says so for all."""
        for stage in stages if self.is_main else ():
            if stage.optimizer is not None and stage.batch_size % self.size:
                raise ConfigError(
                    f"stage {stage.name!r} of {stage.owner or 'the method'} has batches of {stage.batch_size}, which "
                    f"{self.size} ranks cannot share equally. Choose a batch size that divides by {self.size}."
                )

    # Messages: every rank has to make the same calls in the same order ----------------------------------

    @torch.no_grad()
    def sum_(self, tensor: Tensor) -> Tensor:
        """Its sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    @torch.no_grad()
    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Their means over the ranks, in place, as one message for each type."""
        if self.size > 1:
            for group in _by_type(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in group])
                _unpack(self.sum_(flat) / self.size, group)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Mean gradients over the ranks. Whether a parameter has one is the same on all of them: losses are static."""
        self.average_(p.grad for p in parameters if p.grad is not None)

    @torch.no_grad()
    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """The first rank's values, in place, as one message for each type; names and shapes are the same on all."""
        if self.size > 1:
            for group in _by_type(tensors[name] for name in sorted(tensors)):
                flat = torch.cat([tensor.reshape(-1) for tensor in group])
                dist.broadcast(flat, 0)
                _unpack(flat, group)

    def agree(self, value: bool) -> bool:
        """The first rank's answer. Waits for the device."""
        if self.size == 1:
            return value
        answer = torch.tensor(int(value), device=self.device)
        dist.broadcast(answer, 0)
        return bool(answer)

    def any(self, value: bool) -> bool:
        """Whether it holds for one of the ranks. Waits for the device."""
        return bool(self.sum_(torch.tensor(int(value), device=self.device))) if self.size > 1 else value

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first rank does this alone, the others once it is done: a download, say, that they then find."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()

    # BatchNorm ------------------------------------------------------------------------------------------

    def set_norms(self, module: nn.Module, synchronized: bool) -> None:
        """Let every `Norm` below take its statistics over all ranks, or over its own batch again."""
        if self.size > 1:
            for norm in module.modules():
                if isinstance(norm, Norm):
                    norm.__class__ = SyncNorm if synchronized else Norm

    def average_statistics(self, module: nn.Module) -> None:
        """Mean running statistics over the ranks, where each has kept its own."""
        if self.size > 1:
            norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            own = [m for m in norms if m.training and not isinstance(m, SyncNorm)]
            buffers = [buffer for m in own for buffer in (m.running_mean, m.running_var) if buffer is not None]
            self.average_(buffers)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


SINGLE_PROCESS = Ranks()


def is_distributed() -> bool:
    """Whether this process was started by torchrun as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main_process() -> bool:
    """Whether this process is the one that shows how the run goes on."""
    return not is_distributed() or os.environ["RANK"] == "0"


def is_peer_failure(error: BaseException) -> bool:
    """Whether this rank fails only since another one has ended, which says why."""
    return is_distributed() and isinstance(error, RuntimeError) and any(words in str(error) for words in LEFT)


def abort() -> NoReturn:
    """End this process at once, past the orderly way out, on which gloo may trip over a peer that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def start(device: str) -> Ranks:
    """Join the other processes that torchrun started, or be alone.

    They talk by NCCL where each has a GPU of its own, else by gloo: on CPUs, or where a GPU was named for all.
    """
    if not is_distributed():
        return SINGLE_PROCESS
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    place = pick_device(device, local)
    own = place.type == "cuda" and ":" not in device
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if own else "gloo"
    try:
        dist.init_process_group(
            backend, rank=rank, world_size=size, timeout=INIT_TIMEOUT, device_id=place if own else None
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"process {rank} of {size} cannot reach the others ({error}). Start them with torchrun, such as "
            "`torchrun --nproc-per-node 2 -m incvec run …`, or unset RANK and WORLD_SIZE."
        ) from None
    return Ranks(rank, size, local, backend, place)


# Synchronized BatchNorm -----------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """The sum over the ranks. Each rank's loss depends on it, so its gradient is summed over them as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient: Tensor = summed(gradients[0].contiguous())
        return gradient


@torch.compiler.disable  # type: ignore[untyped-decorator]
def summed(tensor: Tensor) -> Tensor:
    """The sum over the ranks, with its gradient."""
    total: Tensor = cast(Any, _Sum).apply(tensor)  # torch's own stubs disagree about this call
    return total


class SyncNorm(Norm):
    """`Norm` with the statistics of the global batch, on any device; in eval mode it is `Norm` itself.

    Each rank writes its mean m_r and variance v_r into its row of one table, whose sum over the ranks gathers them
    all; then mean = avg m_r and variance = avg (v_r + (m_r - mean)^2), since all local batches are of one size.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        rank, size = dist.get_rank(), dist.get_world_size()
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own = torch.stack(torch.var_mean(wide, (0, 2, 3), correction=0))
        table = torch.cat([own[None] if r == rank else torch.zeros_like(own)[None] for r in range(size)])
        variances, means = summed(table).unbind(1)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        if self.running_mean is not None and self.running_var is not None:
            count = size * x.numel() // x.shape[1]
            momentum = 0.0 if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(variance.to(self.running_var.dtype) * (count / max(count - 1, 1)), momentum)
        scale = (variance + self.eps).rsqrt() * self.weight
        y: Tensor = (wide - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]
        return y.to(x.dtype)


def _by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _unpack(flat: Tensor, into: list[Tensor]) -> None:
    pieces = flat.split([tensor.numel() for tensor in into])
    torch._foreach_copy_(into, [piece.view(tensor.shape) for piece, tensor in zip(pieces, into, strict=True)])
