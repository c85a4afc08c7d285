"""Triton kernels for residual blocks with few channels; INCVEC_KERNELS=off disables them.

`blocks` decides when they apply and holds the autograd functions, `launch` the launch parameters, `conv` the kernels.
"""

from incvec.nets.kernels.blocks import VARIABLE, allowed, available, block, enable, infer_block, stem

__all__ = ["VARIABLE", "allowed", "available", "block", "enable", "infer_block", "stem"]
