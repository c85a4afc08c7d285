"""Typed, strict configuration: unknown keys, wrong types and impossible values are refused before data is loaded.

A run's configuration is a flat set of fields (`RunConfig`) and one section each for its method and its add-ons
(`podnet.lambda_flat`, `ivt.interval`). A section is an `Options` class defined beside the code that it configures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from incvec.errors import ConfigError, nearest

Normalization = Literal["default", "lucir"]
Ints = Annotated[tuple[int, ...], Field(strict=False)]

# Old name -> new name. Old names are refused in new configurations and translated in saved ones.
RENAMED_SETTINGS = {
    "optimiser": "optimizer",
    "optimiser_state": "optimizer_state",
    "normalisation": "normalization",
    "centre": "center",
}


class Options(BaseModel):
    """Settings of a method or add-on. The defaults are the paper's values for CIFAR-100."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class TrainOptions(Options):
    """Settings of every method that trains a network from scratch."""

    net: str = "resnet32-pycil"
    epochs: int = Field(160, ge=1, description="epochs of an incremental task")
    base_epochs: int | None = Field(None, ge=1, description="epochs of the base task; null: as `epochs`")
    batch_size: int = Field(128, ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.1, gt=0)
    base_lr: float | None = Field(None, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-4, ge=0)
    base_weight_decay: float | None = Field(None, ge=0)
    schedule: Literal["constant", "cosine", "steps"] = "steps"
    milestones: Ints = (80, 120)
    base_milestones: Ints | None = None
    gamma: float = Field(0.1, gt=0, le=1)
    brightness: float = Field(63 / 255, ge=0, lt=1, description="brightness jitter: a factor from 1 ± this value")
    normalization: Normalization = Field("default", description="for data sets that define several")
    memory: int = Field(20, ge=1, description="exemplars per class, for methods that store exemplars")
    memory_total: int | None = Field(None, ge=1, description="a fixed total of exemplars, shared by the classes seen")


class RunConfig(BaseModel):
    """Everything that determines a run's results. Folders are not part of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: str
    addons: Annotated[tuple[str, ...], Field(strict=False)] = ()
    dataset: str = "digits"
    tasks: int = Field(5, ge=1, description="increments after the base task; all tasks if base_classes is 0")
    base_classes: int = Field(50, ge=0)
    task_sizes: Ints | None = Field(None, description="classes of each task, instead of base_classes and tasks")
    seed: int = Field(0, ge=0, description="training seed")
    order_seed: int | None = Field(1993, ge=0, description="seed of the class order; null: the data set's order")
    class_order: Ints | None = Field(None, description="an explicit class order, instead of order_seed")
    oracle: bool = Field(False, description="train on all past images instead of exemplars")
    variant: str = Field("paper", description="preset of the method; `incvec list presets` lists them")
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    engine: Literal["auto", "eager", "graph"] = "auto"
    start: str | None = Field(None, description="a snapshot of another run to start from")
    image_size: int | None = Field(None, ge=4, description="side to which larger stored images are resized")
    class_list: str | None = Field(None, description="classes of a packed store to use: a class list's name or a file")
    placement: Literal["resident", "streamed"] | None = Field(
        None, description="of a packed store: on the device or streamed to it; null: by the device's memory"
    )
    held_out: int | None = Field(
        None, ge=2, description="hold out every n-th training image of each class, and evaluate on those"
    )
    stop_after: int | None = Field(None, ge=1, description="train only the first n tasks of the stream")
    snapshots: bool = Field(True, description="save each task's model, for the study and as a start of other runs")
    sync_batchnorm: bool = Field(True, description="with several processes: BatchNorm statistics of the global batch")
    sections: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def options(self, name: str, kind: type) -> Any:
        """The validated options of one section."""
        return validate(kind, self.sections.get(name, {}), where=name)

    def data_options(self) -> dict[str, Any]:
        """The options of the data set that were set; `load_dataset` validates them."""
        names = ("image_size", "class_list", "placement", "held_out")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def resolved(self) -> dict[str, Any]:
        """All settings, as in a record: the fields, then one mapping per section."""
        # Included only if they differ from these defaults: most runs do not use them.
        optional = {
            "sync_batchnorm": True,
            "task_sizes": None,
            "class_list": None,
            "placement": None,
            "held_out": None,
            "stop_after": None,
            "snapshots": True,
        }
        excluded = {"sections"} | {name for name, default in optional.items() if getattr(self, name) == default}
        fields = self.model_dump(mode="json", exclude=excluded)
        return {**fields, **self.sections}


def digest(value: Any) -> str:
    """A short hash of any JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def validate(kind: type, values: Mapping[str, Any], where: str = "") -> Any:
    """An instance of `kind`. ConfigError with the key, its value and what was expected if one is invalid."""
    known = list(kind.model_fields)  # type: ignore[attr-defined]
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in known:
            if RENAMED_SETTINGS.get(key) in known:
                raise ConfigError(f"the setting {prefix}{key} is now called {prefix}{RENAMED_SETTINGS[key]}.")
            raise ConfigError(
                f"unknown setting {prefix}{key!s}.{nearest(key, known)} Known settings"
                f"{' of ' + where if where else ''}: {', '.join(sorted(known))}."
            )
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        given = first.get("input")
        raise ConfigError(f"setting {prefix}{key} = {given!r} is not possible: {first['msg']}.") from None


def upgrade_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration under the present names of its settings."""
    return {
        RENAMED_SETTINGS.get(key, key): upgrade_settings(value) if isinstance(value, Mapping) else value
        for key, value in saved.items()
    }


def assign(tree: dict[str, Any], setting: str) -> None:
    """Apply one `a.b=value` from the command line; the value is read as YAML."""
    path, separator, text = setting.partition("=")
    parts = [part.strip() for part in path.split(".")]
    if not separator or not all(parts):
        raise ConfigError(f"--set takes key=value, such as ivt.interval=5; given was {setting!r}.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of --set {setting!r} is not valid YAML: {error}") from None
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    branch = tree
    for part in parts[:-1]:
        branch = branch.setdefault(part, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"--set {setting!r}: {part} is a single value and has no settings of its own.")
    branch[parts[-1]] = value


def differences(given: Mapping[str, Any], saved: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: saved -> given` for every setting in which two resolved configurations differ.

    Method and add-ons come first. A section that only one of the two has is named without its settings.
    """
    rows: list[str] = []
    for key in sorted({*given, *saved}, key=lambda key: (key != "method", key != "addons", key)):
        a, b = saved.get(key, "absent"), given.get(key, "absent")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            rows += differences(b, a, f"{prefix}{key}.")
        elif key not in saved and isinstance(b, Mapping):
            rows.append(f"{prefix}{key}: section added")
        elif key not in given and isinstance(a, Mapping):
            rows.append(f"{prefix}{key}: section removed")
        elif a != b:
            rows.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return rows
