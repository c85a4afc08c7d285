"""Increment Vector Transformation (IVT) as a plug-in for any PyTorch training loop.

https://arxiv.org/abs/2509.21898. `IVT` is the object used in a training loop; `scale` and `teleport` are
the equations behind it as pure functions of tensors.
"""

from .plugin import IVT
from .transform import scale, teleport

__all__ = ["IVT", "scale", "teleport"]
