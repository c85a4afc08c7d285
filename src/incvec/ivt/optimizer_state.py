"""A fresh optimizer state for parameters that a teleport has moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop

# Their fresh state is zero, so it can be zeroed in place, which a captured CUDA graph needs.
_ZERO = (Adadelta, Adam, Adamax, AdamW, RAdam, RMSprop)


@torch.no_grad()
def reset_state(optimizers: Iterable[Optimizer], parameters: Sequence[nn.Parameter]) -> None:
    """Re-initialize the state of the parameters as the optimizer itself would.

    Optimizers other than torch's are expected to initialize a missing state in their next step, as torch's do.
    """
    moved = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if id(parameter) not in moved or not state:
                    continue
                tensors = [value for value in state.values() if isinstance(value, Tensor)]
                if type(optimizer) in _ZERO or (type(optimizer) is SGD and not group["dampening"]):
                    torch._foreach_zero_(tensors)
                elif type(optimizer) is Adagrad:  # which initializes its state when it is made
                    state["sum"].fill_(group["initial_accumulator_value"])
                    state["step"].zero_()
                else:
                    del optimizer.state[parameter]
