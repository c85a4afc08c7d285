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
    from .api import run as run
    from .api import sweep as sweep
    from .class_statistics import ClassStatistics as ClassStatistics
    from .classifier import Classifier as Classifier
    from .ivt import IVT as IVT
    from .ivt import scale as scale
    from .ivt import teleport as teleport
    from .records import load_record as load_record
    from .records import records as records

__version__ = "0.1.0"

__all__ = [
    "IVT",
    "ClassStatistics",
    "Classifier",
    "__version__",
    "load_record",
    "records",
    "run",
    "scale",
    "sweep",
    "teleport",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "ivt": ("IVT", "scale", "teleport"),
        "class_statistics": ("ClassStatistics",),
        "api": ("run", "sweep"),
        "records": ("load_record", "records"),
        "classifier": ("Classifier",),
    },
)
