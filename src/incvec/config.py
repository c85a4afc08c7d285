"""Typed, strict configuration: unknown keys, wrong types and impossible values are refused before data is loaded.

A run's configuration is a flat set of fields (`RunConfig`) and one section each for its method and its add-ons
(`podnet.lambda_flat`, `ivt.interval`). A section is an `Options` class defined beside the code that it configures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from incvec.errors import ConfigError, nearest, shorten
from incvec.text_files import read_text

Normalization = Literal["default", "lucir"]
Ints = Annotated[tuple[int, ...], Field(strict=False)]

MAX_INTEGER = 2**32 - 1  # of every setting; numpy's legacy generator takes no larger seed
MAX_TEXT = 4096  # characters of a name, a path or a caption
MAX_YAML = 1 << 18  # bytes of a configuration or sweep file
MAX_VALUES = 100_000  # of a YAML file, with its aliases written out
MAX_DEPTH = 50

# Old name -> new name, in configurations saved in format 1.
RENAMED_SETTINGS = {
    "optimiser": "optimizer",
    "optimiser_state": "optimizer_state",
    "normalisation": "normalization",
    "centre": "center",
}
# Settings of earlier versions that no longer exist, and their defaults.
REMOVED_SETTINGS = {
    "ivt.stages": ["main"],
    "flyp.targets": "diagonal",
    "slca.targets": "diagonal",
    "spu.targets": "diagonal",
    "eopc.new_rows": "kaiming",
    "rapf.shrink": False,
}


class Settings(BaseModel):
    """Base of all settings: no unknown names, no conversions, and every value within the bounds of this module."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def bounded(cls, value: Any) -> Any:
        """Refuse integers, texts and lists that no run can use, whatever the setting is."""
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, int) and abs(each) > MAX_INTEGER:
                raise ValueError(f"expected an integer up to {MAX_INTEGER}")
            if isinstance(each, str) and (len(each) > MAX_TEXT or not each.isprintable()):
                raise ValueError(f"expected up to {MAX_TEXT} printable characters")
        if isinstance(value, tuple | list) and len(value) > MAX_VALUES:
            raise ValueError(f"expected up to {MAX_VALUES} values")
        return value


class Options(Settings):
    """Settings of a method or add-on. The defaults are the paper's values for CIFAR-100."""

    model_config = ConfigDict(validate_default=True)


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
    crop_area: float = Field(
        0.08, gt=0, le=1, description="the smallest share of a large stored image that a training crop shows"
    )
    normalization: Normalization = Field("default", description="for data sets that define several")
    memory: int = Field(20, ge=1, description="exemplars per class, for methods that store exemplars")
    memory_total: int | None = Field(None, ge=1, description="a fixed total of exemplars, shared by the classes seen")


class RunConfig(Settings):
    """Everything that determines a run's results. Folders are not part of it."""

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
    last_batch: Literal["drop", "keep"] = Field(
        "drop",
        description="an epoch's last, smaller batch: not trained, or trained as a step of its own (see `StageLoop`)",
    )
    sync_batchnorm: bool = Field(True, description="with several processes: BatchNorm statistics of the global batch")
    sections: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("class_order")
    @classmethod
    def without_repetition(cls, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Refuse an order that has a class twice, whatever the data set."""
        repeated = [str(each) for each, times in Counter(order or ()).items() if times > 1]
        if repeated:
            raise ValueError(f"expected every class once; it repeats {', '.join(repeated[:5])}")
        return order

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
            "last_batch": "drop",
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
            raise ConfigError(
                f"unknown setting {prefix}{str(key)[:80]}.{nearest(key, known)} Known settings"
                f"{' of ' + where if where else ''}: {', '.join(sorted(known))}."
            )
    try:
        return kind(**values)
    except ValidationError as error:
        key, given, problem = first_problem(error)
        raise ConfigError(f"setting {prefix}{key} = {shorten(given)} is not possible: {problem}.") from None


def first_problem(error: ValidationError) -> tuple[str, Any, str]:
    """The key of the first invalid value, the value, and what was expected of it."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return key, first.get("input"), first["msg"].removeprefix("Value error, ")


def rename_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration saved in format 1, under the present names of its settings."""
    return {
        RENAMED_SETTINGS.get(key, key): rename_settings(value) if isinstance(value, Mapping) else value
        for key, value in saved.items()
    }


def without_removed_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration without the settings that no longer exist, as far as they had their default."""

    def remains(name: str, value: Any) -> bool:
        return name not in REMOVED_SETTINGS or value != REMOVED_SETTINGS[name]

    return {
        section: {key: value for key, value in values.items() if remains(f"{section}.{key}", value)}
        if isinstance(values, Mapping)
        else values
        for section, values in saved.items()
    }


class YamlLoader(yaml.SafeLoader):
    """YAML with the numbers of JSON. 1e-3 is a number, which YAML 1.1 reads as text; dates and numbers to the bases of
    2, 8, 16 and 60 are text. A key that occurs twice is an error: one of its values would be lost."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


_NUMBERS = {
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))|\.(nan|NaN)",
}
YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
    YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^({_pattern})$"), list("-+.0123456789"))
YamlLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(cast(Any, node))))


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, of bounded size. `where` begins the message of a `ConfigError`."""
    try:
        value = yaml.load(text, YamlLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # of the loader, for a tag with another value
        raise ConfigError(f"{where} is not valid YAML: a value does not have the type of its tag ({error}).") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply: expected at most {MAX_DEPTH} levels.") from None
    count, pending = 0, [(value, 0)]
    while pending:
        each, depth = pending.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where} is nested too deeply: expected at most {MAX_DEPTH} levels.")
        if count > MAX_VALUES:
            raise ConfigError(f"{where} has more than {MAX_VALUES} values, aliases included.")
        if isinstance(each, Mapping):
            pending += [(part, depth + 1) for pair in each.items() for part in pair]
        elif isinstance(each, list | tuple | set):
            pending += [(part, depth + 1) for part in each]
    return value


def read_yaml(path: Path) -> Any:
    """The value of a YAML file; ConfigError if there is none, or if it cannot be read."""
    try:
        return parse_yaml(read_text(path, ConfigError, MAX_YAML), str(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}.") from None


def assign(tree: dict[str, Any], setting: str) -> None:
    """Apply one `a.b=value` from the command line; the value is read as YAML."""
    path, separator, text = setting.partition("=")
    parts = [part.strip() for part in path.split(".")]
    if not separator or not all(parts):
        raise ConfigError(f"--set takes key=value, such as ivt.interval=5; given was {shorten(setting)}.")
    value = parse_yaml(text, f"the value of --set {shorten(setting)}")
    if isinstance(value, str):  # 1e999, nan: refused as numbers, not as text
        with contextlib.suppress(ValueError):
            value = float(value)
    branch = tree
    for part in parts[:-1]:
        branch = branch.setdefault(part, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"--set {shorten(setting)}: {part} is a single value and has no settings of its own.")
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
