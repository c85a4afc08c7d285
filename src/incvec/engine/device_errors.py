"""What a device may do to a run, in words a user can act on: its memory is full, it cannot be used, it broke."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from incvec.errors import DeviceMemoryError, TrainingError

FULL = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")  # as CUDA, cuDNN and the CPU's put it
IDLE = 0.2  # of the device; to give memory back waits for all runs on it, so not for a little
ABSENT = ("no NVIDIA driver", "No CUDA GPUs", "not compiled with CUDA")  # nobody expects a GPU there
_kept: dict[torch.device, int] = {}  # idle memory that could not be given back
ADVICE = (
    "A smaller batch (--set METHOD.batch_size=64), fewer runs at once or another device may help; the same command "
    "goes on from what was saved."
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is about a lack of device memory, or arose from that: compilers wrap what they meet."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | DeviceMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def free() -> None:
    """Give back what torch keeps for later; what a broken step has left may hang together in circles."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def release_idle_memory(device: torch.device) -> None:
    """Give back what captured steps that are gone have left, once it is much.

    Torch keeps it, beside what present steps need when they are replayed; so what counts is by how much that has grown
    since memory was given back last.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if _idle(device) - _kept.get(device, 0) > IDLE * total:
        torch.cuda.empty_cache()
        _kept[device] = _idle(device)


def _idle(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def account(device: torch.device) -> str:
    """How much of the device's memory is taken, and by whom."""
    if device.type != "cuda":
        return f"of {device}"
    left, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(device))
    own = torch.cuda.memory_reserved(device) / 2**30
    name = torch.cuda.get_device_name(device)
    return f"of {device} ({name}, {total - left:.1f} of {total:.1f} GiB in use, {own:.1f} by this process)"


@contextmanager
def explained(device: torch.device, where: str, advice: str = ADVICE) -> Iterator[None]:
    """Errors of the device become errors for the user, with what was being done and what may help."""
    try:
        yield
    except DeviceMemoryError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise DeviceMemoryError(f"the memory {account(device)} is full, {where}. {advice}") from error
        if isinstance(error, torch.AcceleratorError):
            raise TrainingError(
                f"{device} stopped working, {where}: {str(error).splitlines()[0]}. Nothing more can be done in this "
                "process; the same command goes on from what was saved."
            ) from error
        raise


def gpu_problem() -> str:
    """Why the GPU of this machine cannot be used, such as a driver that is too old; empty where there is none."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()  # says why
    except Exception as error:
        text = str(error).splitlines()[0]
        return "" if any(words in text for words in ABSENT) else text
    return ""
