"""incvec: increment vectors for class-incremental learning.

    from incvec import IVT                                            # the plug-in: needs torch only
    record = incvec.run(method="podnet", addons=["ivt"], dataset="digits")      # the lab: needs the extra `lab`
    incvec.records("runs").frame()

Every name is imported when it is first used, so `import incvec` costs nothing. The packages of the lab (`incvec.data`,
`incvec.methods`, `incvec.engine`, ...) are imported by name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ivt import IVT as IVT
    from .ivt import scale as scale
    from .ivt import teleport as teleport

__version__ = "0.1.0"

_EXPORTS = {"IVT": ".ivt", "scale": ".ivt", "teleport": ".ivt"}

__all__ = ["IVT", "__version__", "scale", "teleport"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
