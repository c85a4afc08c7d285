"""Errors of the device as messages a user can act on: out of memory, GPU not usable, device failure."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from incvec.errors import DeviceMemoryError, TrainingError

OUT_OF_MEMORY = (  # messages of CUDA, cuDNN, torch's CPU allocator and oneDNN
    "out of memory",
    "STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "could not create a primitive",
    "bad_alloc",
)
NO_GPU = ("no NVIDIA driver", "No CUDA GPUs", "not compiled with CUDA")  # no GPU is expected on such a machine
MAX_IDLE_SHARE = 0.2  # of the device's memory; releasing synchronizes all runs on the device, so not for less
ADVICE = (
    "A smaller batch (--set METHOD.batch_size=64), fewer runs at once or another device may help. The same command "
    "resumes from the last checkpoint."
)
_retained: dict[torch.device, int] = {}  # idle memory that could not be released, by device


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, is a lack of memory. Compilers wrap errors in their own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | DeviceMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def release_memory() -> None:
    """Release torch's cached memory. A failed step may have left reference cycles, so collect those first."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def release_idle_memory(device: torch.device) -> None:
    """Release the memory of dropped CUDA graphs, once it is a large share of the device's memory.

    Torch caches it together with memory that live graphs need for their replays, which cannot be released. So only the
    growth since the last release counts.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if _idle_memory(device) - _retained.get(device, 0) > MAX_IDLE_SHARE * total:
        torch.cuda.empty_cache()
        _retained[device] = _idle_memory(device)


def _idle_memory(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def describe_memory(device: torch.device) -> str:
    """How much of the device's memory is in use, in all and by this process."""
    if device.type != "cuda":
        return f"of {device}"
    available, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(device))
    reserved = torch.cuda.memory_reserved(device) / 2**30
    name = torch.cuda.get_device_name(device)
    return f"of {device} ({name}, {total - available:.1f} of {total:.1f} GiB in use, {reserved:.1f} by this process)"


@contextmanager
def translate_device_errors(device: torch.device, activity: str, advice: str = ADVICE) -> Iterator[None]:
    """Raise device errors as errors for the user, with the activity that failed and what may help."""
    try:
        yield
    except DeviceMemoryError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise DeviceMemoryError(f"the memory {describe_memory(device)} is full, {activity}. {advice}") from error
        if isinstance(error, torch.AcceleratorError):
            raise TrainingError(
                f"{device} stopped working, {activity}: {str(error).splitlines()[0]}. This process cannot continue; "
                "the same command resumes from the last checkpoint."
            ) from error
        raise


def gpu_problem() -> str:
    """Why the GPU of this machine cannot be used, such as an old driver. Empty if it can, or if there is none."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()  # raises with the reason
    except Exception as error:
        text = str(error).splitlines()[0]
        return "" if any(known in text for known in NO_GPU) else text
    return ""
