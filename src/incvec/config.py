"""Typed, strict configuration: an unknown key, a wrong type or an impossible value is refused with the nearest
right name, before any data is touched.

A run's configuration is one flat set of fields (`RunConfig`) and one section for its method and each of its
add-ons (`podnet.lambda_flat`, `ivt.interval`). Each section is an `Options` class that stands beside the code
it configures.
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

# Settings that had another name once: refused with the new name in a config, translated in records and checkpoints.
RENAMED_SETTINGS = {
    "optimiser": "optimizer",
    "optimiser_state": "optimizer_state",
    "normalisation": "normalization",
    "centre": "center",
}


class Options(BaseModel):
    """Settings of one method or add-on; the defaults are the paper's values for CIFAR-100."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class TrainOptions(Options):
    """What every method that trains a network of its own has to settle."""

    net: str = "resnet32-pycil"
    epochs: int = Field(160, ge=1, description="epochs of an incremental task")
    base_epochs: int | None = Field(None, ge=1, description="epochs of the base task; none: as `epochs`")
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
    brightness: float = Field(63 / 255, ge=0, lt=1, description="jitter factor drawn from 1 ± this")
    normalization: Normalization = Field("default", description="where the data set has several")
    memory: int = Field(20, ge=1, description="exemplars a class, where the method keeps any")
    memory_total: int | None = Field(None, ge=1, description="a fixed total instead, shared by the classes seen")


class RunConfig(BaseModel):
    """Everything that decides a run's numbers; where its files lie is said apart."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: str
    addons: Annotated[tuple[str, ...], Field(strict=False)] = ()
    dataset: str = "digits"
    tasks: int = Field(5, ge=1, description="increments after the base classes; all tasks where base_classes is 0")
    base_classes: int = Field(50, ge=0)
    seed: int = Field(0, ge=0, description="training seed")
    order_seed: int | None = Field(1993, ge=0, description="class order seed; none: the data set's own order")
    class_order: Ints | None = Field(None, description="the classes as they come, in place of a seed's order")
    oracle: bool = Field(False, description="the full past in place of the memory")
    variant: str = Field("paper", description="which preset of the method; `incvec list presets` names them")
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    engine: Literal["auto", "eager", "graph"] = "auto"
    start: str | None = Field(None, description="a snapshot of another run to begin at")
    image_size: int | None = Field(None, ge=4, description="the side images are brought to, where they lie larger")
    class_list: str | None = Field(None, description="of a packed store: some of its classes, a list's name or a file")
    placement: Literal["resident", "streamed"] | None = Field(
        None, description="of a packed store: on the device or streamed to it; none: by the device's memory"
    )
    held_out: int | None = Field(
        None, ge=2, description="evaluate on every n-th training image of a class, kept out of training, not on test"
    )
    stop_after: int | None = Field(None, ge=1, description="train only so many tasks of the stream, from its start")
    snapshots: bool = Field(True, description="keep every task's model, for the lab and for runs that begin there")
    sync_batchnorm: bool = Field(True, description="with several ranks: statistics of the global batch")
    sections: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def options(self, name: str, kind: type) -> Any:
        """The validated options of one section."""
        return validate(kind, self.sections.get(name, {}), where=name)

    def data_options(self) -> dict[str, Any]:
        """The options of the data set that were set; `load_dataset` validates them."""
        names = ("image_size", "class_list", "placement", "held_out")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def resolved(self) -> dict[str, Any]:
        """Flat form for the record: top-level fields, then a mapping for each section."""
        # These mean nothing to most runs: they are told where somebody chose against the default.
        quiet = {
            "sync_batchnorm": True,
            "class_list": None,
            "placement": None,
            "held_out": None,
            "stop_after": None,
            "snapshots": True,
        }
        silent = {"sections"} | {name for name, default in quiet.items() if getattr(self, name) == default}
        plain = self.model_dump(mode="json", exclude=silent)
        return {**plain, **self.sections}

    def digest(self) -> str:
        return digest(self.resolved())


def digest(value: Any) -> str:
    """A short hash of anything that JSON can hold."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def validate(kind: type, values: Mapping[str, Any], where: str = "") -> Any:
    """Build `kind` from `values`, or say which key is wrong, what it was and what was expected."""
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
    """A saved configuration with the present names of its settings."""
    return {
        RENAMED_SETTINGS.get(key, key): upgrade_settings(value) if isinstance(value, Mapping) else value
        for key, value in saved.items()
    }


def assign(tree: dict[str, Any], setting: str) -> None:
    """Apply one `a.b=value` from the command line; the value is read as YAML."""
    path, separator, text = setting.partition("=")
    parts = [part.strip() for part in path.split(".")]
    if not separator or not all(parts):
        raise ConfigError(f"--set takes key=value, such as ivt.interval=5; it was given {setting!r}.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of --set {setting!r} is not readable: {error}") from None
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    branch = tree
    for part in parts[:-1]:
        branch = branch.setdefault(part, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"--set {setting!r}: {part} is a single value, it has no settings of its own.")
    branch[parts[-1]] = value


def differences(given: Mapping[str, Any], saved: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: saved -> given` for every setting that two resolved configurations do not share.

    Method and add-ons come first; a section that only one of the two has is named, not spelled out.
    """
    rows: list[str] = []
    for key in sorted({*given, *saved}, key=lambda key: (key != "method", key != "addons", key)):
        a, b = saved.get(key, "absent"), given.get(key, "absent")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            rows += differences(b, a, f"{prefix}{key}.")
        elif key not in saved and isinstance(b, Mapping):
            rows.append(f"{prefix}{key}: a new section")
        elif key not in given and isinstance(a, Mapping):
            rows.append(f"{prefix}{key}: a section that is gone")
        elif a != b:
            rows.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return rows
