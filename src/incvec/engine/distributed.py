"""One run on several processes (torchrun), one GPU each: rank, collectives and synchronized BatchNorm.

Every process holds the whole model and takes its slice of each global batch. Gradients are averaged in one flat buffer
before gradient transforms, add-ons and the optimizer see them, so from there on all processes compute the same. Hooks
run on every process; afterwards the values of rank 0 are broadcast, since two devices may differ in the last bit. With
a single process every method here does nothing.

This is not DistributedDataParallel, which would miss gradients taken by `autograd.grad` and calls of submodules.
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

INIT_TIMEOUT = timedelta(hours=2)  # the other processes wait while rank 0 decodes a data set
PEER_FAILURES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # messages of gloo


@dataclass(frozen=True)
class Distributed:
    """This process's rank among the processes of one run, and its collectives."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None  # index on this machine, and of its GPU; None for a single process
    backend: str = ""
    device: torch.device | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def supports_capture(self) -> bool:
        """Whether collectives can be part of a CUDA graph. Those of gloo go through the host."""
        return self.backend != "gloo"

    def slice(self, batch: int) -> slice:
        """This process's part of a global batch, whose size is divisible by the number of processes."""
        local = batch // self.world_size
        return slice(self.rank * local, (self.rank + 1) * local)

    def check_batch_sizes(self, stages: Iterable[Stage]) -> None:
        """Refuse batches that cannot be divided equally, before anything is trained. Only rank 0 reports it."""
        for stage in stages if self.is_main else ():
            if stage.optimizer is not None and stage.batch_size % self.world_size:
                raise ConfigError(
                    f"stage {stage.name!r} of {stage.owner or 'the method'} has batches of {stage.batch_size}, which "
                    f"{self.world_size} processes cannot share equally. Choose a batch size divisible by "
                    f"{self.world_size}."
                )

    # Collectives: every process has to make the same calls in the same order ----------------------------

    @torch.no_grad()
    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    @torch.no_grad()
    def mean_(self, tensors: Iterable[Tensor]) -> None:
        """Mean over the processes, in place; one message per dtype."""
        if self.world_size > 1:
            for group in _by_dtype(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in group])
                _unflatten(self.sum_(flat) / self.world_size, group)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients. Losses are static, so the same parameters have gradients in all processes."""
        self.mean_(p.grad for p in parameters if p.grad is not None)

    @torch.no_grad()
    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy rank 0's values, in place; one message per dtype. Names and shapes agree in all processes."""
        if self.world_size > 1:
            for group in _by_dtype(tensors[name] for name in sorted(tensors)):
                flat = torch.cat([tensor.reshape(-1) for tensor in group])
                dist.broadcast(flat, 0)
                _unflatten(flat, group)

    def broadcast_bool(self, value: bool) -> bool:
        """The value of rank 0. Synchronizes with the device."""
        if self.world_size == 1:
            return value
        answer = torch.tensor(int(value), device=self.device)
        dist.broadcast(answer, 0)
        return bool(answer)

    def any(self, value: bool) -> bool:
        """Whether the value is true in any process. Synchronizes with the device."""
        return bool(self.sum_(torch.tensor(int(value), device=self.device))) if self.world_size > 1 else value

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world_size > 1:
            dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block first, the others when it is done: for downloads and decoding that they reuse."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    # BatchNorm ------------------------------------------------------------------------------------------

    def set_sync_batchnorm(self, module: nn.Module, synchronized: bool) -> None:
        """Let every `Norm` in the module use the statistics of the global batch, or of the local one."""
        if self.world_size > 1:
            for norm in module.modules():
                if isinstance(norm, Norm):
                    norm.__class__ = SyncNorm if synchronized else Norm

    def average_batchnorm_statistics(self, module: nn.Module) -> None:
        """Average the running statistics of layers that are not synchronized."""
        if self.world_size > 1:
            norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            local = [m for m in norms if m.training and not isinstance(m, SyncNorm)]
            buffers = [buffer for m in local for buffer in (m.running_mean, m.running_var) if buffer is not None]
            self.mean_(buffers)

    def close(self) -> None:
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


SINGLE_PROCESS = Distributed()


def is_distributed() -> bool:
    """Whether this process was started by torchrun as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main_process() -> bool:
    """Whether this process displays progress."""
    return not is_distributed() or os.environ["RANK"] == "0"


def is_peer_failure(error: BaseException) -> bool:
    """Whether this process fails only because another one has ended, which reports the cause."""
    return is_distributed() and isinstance(error, RuntimeError) and any(text in str(error) for text in PEER_FAILURES)


def abort() -> NoReturn:
    """End this process without cleanup, which may fail in gloo after a peer has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def init_distributed(device: str) -> Distributed:
    """Join the process group if torchrun started this process.

    The backend is NCCL if each process has its own GPU, otherwise gloo: on CPUs, or if all were given the same GPU.
    """
    if not is_distributed():
        return SINGLE_PROCESS
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_device = pick_device(device, local_rank)
    exclusive = local_device.type == "cuda" and ":" not in device
    if local_device.type == "cuda":
        torch.cuda.set_device(local_device)
    backend = "nccl" if exclusive else "gloo"
    try:
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=INIT_TIMEOUT,
            device_id=local_device if exclusive else None,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"process {rank} of {world_size} cannot reach the others ({error}). Start them with torchrun, for example "
            "`torchrun --nproc-per-node 2 -m incvec run …`, or unset RANK and WORLD_SIZE."
        ) from None
    return Distributed(rank, world_size, local_rank, backend, local_device)


# Synchronized BatchNorm -----------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """Sum over the processes. The loss of each process depends on it, so its gradient is summed, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient: Tensor = all_reduce_sum(gradients[0].contiguous())
        return gradient


@torch.compiler.disable  # type: ignore[untyped-decorator]
def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Differentiable sum over the processes."""
    total: Tensor = cast(Any, _Sum).apply(tensor)  # torch's stubs do not type this call
    return total


class SyncNorm(Norm):
    """`Norm` with the statistics of the global batch, on any device; the same as `Norm` in eval mode.

    Each process writes its mean m_r and variance v_r into row r of a table of zeros, and the sum over the processes
    gathers all rows. All local batches have the same size, so mean = avg m_r and
    variance = avg (v_r + (m_r - mean)^2).
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        local = torch.stack(torch.var_mean(wide, (0, 2, 3), correction=0))
        table = torch.cat([local[None] if r == rank else torch.zeros_like(local)[None] for r in range(world_size)])
        variances, means = all_reduce_sum(table).unbind(1)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        if self.running_mean is not None and self.running_var is not None:
            count = world_size * x.numel() // x.shape[1]
            momentum = 0.0 if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(variance.to(self.running_var.dtype) * (count / max(count - 1, 1)), momentum)
        scale = (variance + self.eps).rsqrt() * self.weight
        y: Tensor = (wide - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]
        return y.to(x.dtype)


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _unflatten(flat: Tensor, into: list[Tensor]) -> None:
    pieces = flat.split([tensor.numel() for tensor in into])
    torch._foreach_copy_(into, [piece.view(tensor.shape) for piece, tensor in zip(pieces, into, strict=True)])
