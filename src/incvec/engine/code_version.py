"""The version of the code that a base task's weights depend on: part of the key of shared bases.

It is a hash of the syntax trees of the files in `BASE_FILES` and of the method's own files, without comments and
docstrings. Rewording those does not retrain a base; changing a constant does. A test holds that every file of this
package that is imported while a base is trained is in one of the two lists below.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import incvec
from incvec.contracts import Method
from incvec.methods import find_method

PACKAGE = Path(incvec.__file__).parent
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# Files that determine the base task's weights, relative to the package.
BASE_FILES = (
    "class_statistics.py", "contracts.py", "fused.py",
    "data/augment.py", "data/gaussians.py", "data/memory.py", "data/prompts.py", "data/resize.py", "data/select.py",
    "data/source.py", "data/stream.py", "data/views.py",
    "data/store/stream.py",
    "nets/backbones.py", "nets/clip.py", "nets/dual.py", "nets/efficientnet.py", "nets/heads.py",
    "nets/lite.py", "nets/model.py", "nets/packages.py", "nets/pretrained.py", "nets/resnet.py",
    "nets/kernels/__init__.py", "nets/kernels/blocks.py", "nets/kernels/conv.py", "nets/kernels/launch.py",
    "ivt/fisher.py", "ivt/names.py",
    "engine/build.py", "engine/capture.py", "engine/distributed.py", "engine/loop.py", "engine/optimizer.py",
    "engine/seeds.py", "engine/stage.py", "engine/state.py", "engine/task.py",
)  # fmt: skip

# Files that are imported along with them, but do not: the resolved settings, the images (by their fingerprint) and how
# they are viewed are part of the key themselves. The others read, write, count or display. The method's own files are
# found by `method_files`.
OTHER_FILES = (
    "__init__.py", "__main__.py", "atomic_files.py", "calibration.py", "config.py", "errors.py", "metrics.py",
    "records.py", "registry.py", "declarations.py", "lazy.py", "text_files.py", "addons/", "presets/", "methods/",
    "ivt/__init__.py", "ivt/batchnorm.py", "ivt/checks.py", "ivt/core.py", "ivt/inputs.py", "ivt/listening.py",
    "ivt/optimizer_state.py", "ivt/plugin.py", "ivt/processes.py", "ivt/schedule.py", "ivt/state.py",
    "ivt/statistics.py", "ivt/transform.py",
    "nets/__init__.py",
    "data/__init__.py", "data/aircraft.py", "data/cifar.py", "data/class_lists.py", "data/dataset.py",
    "data/datasets.py", "data/digits.py", "data/folder.py", "data/image_files.py", "data/layouts.py", "data/listing.py",
    "data/options.py",
    "data/packed.py",
    "data/store/__init__.py", "data/store/mapped.py", "data/store/open.py",
    "engine/__init__.py", "engine/checkpoint.py", "engine/checkpoint_writer.py", "engine/code_version.py",
    "engine/device_errors.py", "engine/estimate.py", "engine/evaluate.py", "engine/events.py",
    "engine/loss_history.py", "engine/record.py", "engine/run.py", "engine/shared_bases.py", "engine/threads.py",
)  # fmt: skip


@cache
def code_version(method: str) -> str:
    """A hash of the code that the method's base task depends on."""
    files = [PACKAGE / name for name in BASE_FILES] + method_files(find_method(method))
    return hash_files(set(files))


def method_files(method: type[Method]) -> list[Path]:
    """The files of the method's class, of its base classes, and of modules beside them that these import from."""
    names: set[str] = set()
    for cls in method.__mro__[: method.__mro__.index(Method)]:
        names.add(cls.__module__)
        package, _, _ = cls.__module__.rpartition(".")
        imported = [getattr(value, "__module__", None) for value in vars(sys.modules[cls.__module__]).values()]
        if package:
            names |= {name for name in imported if isinstance(name, str) and name.startswith(f"{package}.")}
    files = [getattr(sys.modules[name], "__file__", None) for name in names if name in sys.modules]
    return [Path(file) for file in files if file is not None]


def hash_files(files: Iterable[Path]) -> str:
    """A hash of the files' names and code, wherever they are installed."""
    code = sorted(f"{file.name}\n{syntax_tree(file)}\n" for file in files)
    return hashlib.blake2b("".join(code).encode(), digest_size=12).hexdigest()


@cache
def syntax_tree(file: Path) -> str:
    """The file's code without comments, docstrings and layout."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)
