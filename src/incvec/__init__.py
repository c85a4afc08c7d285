"""incvec: increment vectors for class-incremental learning.

This module exports the plug-in, which needs torch only. The packages of the lab (`incvec.data`, `incvec.methods`,
`incvec.engine`, ...) need the extra `lab` and are imported by name.
"""

from .ivt import IVT, scale, teleport

__version__ = "0.1.0"

__all__ = ["IVT", "__version__", "scale", "teleport"]
