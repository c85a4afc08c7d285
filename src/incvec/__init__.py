"""incvec: increment vectors for class-incremental learning.

This module exports the plug-in, which needs torch only. The packages of the lab (`incvec.data`, `incvec.methods`,
`incvec.engine`, ...) need the extra `lab` and are imported by name.
"""

from typing import Any

from .ivt import IVT, scale, teleport

__version__ = "0.1.0"

__all__ = ["IVT", "Classifier", "__version__", "scale", "teleport"]


def __getattr__(name: str) -> Any:
    """`incvec.Classifier`, which needs the extra `classifier`, is imported when it is used."""
    if name == "Classifier":
        from importlib import import_module

        return import_module(".classifier", __name__).Classifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
