"""incvec: increment vectors for class-incremental learning.

What is importable from here is the plug-in, and it needs torch only. The lab's rooms (`incvec.data`,
`incvec.methods`, `incvec.engine`, ...) are imported by name.
"""

from .ivt import IVT, scale, teleport

__version__ = "0.1.0"

__all__ = ["IVT", "__version__", "scale", "teleport"]
