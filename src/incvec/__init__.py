"""incvec: increment vectors for class-incremental learning.

    from incvec import IVT                                            # the plug-in: needs torch only
    record = incvec.run(method="podnet", addons=["ivt"], dataset="digits")      # the lab: needs the extra `lab`
    incvec.records("runs").frame()

Every name is imported when it is first used, so `import incvec` costs nothing. The packages of the lab (`incvec.data`,
`incvec.methods`, `incvec.engine`, ...) are imported by name.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_exports

if TYPE_CHECKING:
    from .ivt import IVT as IVT
    from .ivt import scale as scale
    from .ivt import teleport as teleport

__version__ = "0.1.0"

_EXPORTS = {"ivt": ("IVT", "scale", "teleport")}

__all__ = ["IVT", "__version__", "scale", "teleport"]

__getattr__ = lazy_exports(__name__, _EXPORTS)
