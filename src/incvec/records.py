"""Records: one JSON file per finished run, the only source of the numbers in tables and figures."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from incvec.config import MAX_DEPTH, MAX_TEXT, first_problem, rename_settings, without_removed_settings
from incvec.errors import DataError, shorten
from incvec.metrics import summarize
from incvec.text_files import read_text

if TYPE_CHECKING:
    import pandas
    import torch

FORMAT = 2  # 1 had "facts" for "statistics" and British names of settings
READABLE_FORMATS = (1, FORMAT)
TOLERANCE = 1e-6  # between a record's metrics and those computed from its accuracy matrix


# The schema of a record ---------------------------------------------------------------------------------------


def _printable(text: str) -> str:
    if not text.replace("\n", " ").isprintable():
        raise ValueError("expected printable characters")
    return text


def _settings(value: Any, where: tuple[str, ...] = ()) -> Any:
    """A recorded configuration, checked value by value."""
    if len(where) > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} levels")
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        place = (*where, str(key))
        if isinstance(each, dict | list):
            _settings(each, place)
        elif isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"{'.'.join(place)} is {each}, expected a finite number")
        for text in (key, each):
            if isinstance(text, str) and (len(text) > MAX_TEXT or not text.isprintable()):
                raise ValueError(f"expected up to {MAX_TEXT} printable characters in {shorten('.'.join(place))}")
    return value


Text = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_printable)]
Name = Annotated[Text, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Percent = Annotated[float, Field(ge=-1e-6, le=100 + 1e-6)]
Seconds = Annotated[float, Field(ge=0)]


class _Part(BaseModel):
    """A mapping in a record. Keys that are not listed may be anything, and nothing reads them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Metrics(_Part):
    AA: Percent
    LA: Percent
    FM: float | None = None  # none after a single task
    a: list[Percent] | None = None  # the first records had none


class Environment(_Part):
    versions: dict[Text, Text] | None = None
    device: Text | None = None
    commit: Text | None = None


class Engine(_Part):
    kind: Text | None = None
    precision: Text | None = None
    notices: list[Text] = []
    ranks: list[Count] = []


class Record(_Part):
    """What every command may rely on once `read_record` has returned. The first records lack what has a default."""

    method: Name
    addons: list[Name]
    dataset: Name
    tasks: Count
    oracle: bool
    seed: Count
    accuracy: Annotated[list[list[Percent]], Field(min_length=1)]
    test_counts: list[Count]
    metrics: Metrics
    order_seed: Count | None = None
    class_order: list[Count] | None = None
    config: Annotated[dict[str, Any], AfterValidator(_settings)] = {}
    base: dict[Text, Any] = {}
    seconds: Seconds | None = None
    task_seconds: list[Seconds] | None = None
    losses: list[Any] | None = None
    statistics: list[Any] | None = None
    engine: Engine | None = None
    environment: Environment | None = None
    data_fingerprint: Text | None = None

    @model_validator(mode="after")
    def consistent(self) -> Record:
        """The configuration has what the record is named by, and a mapping for each method and add-on."""
        config = self.config
        for key in ("method", "addons", "dataset", "tasks", "oracle", "seed"):
            if type(config.get(key, getattr(self, key))) is not type(getattr(self, key)):
                raise ValueError(
                    f"config.{key} is {shorten(config[key])}, expected a value such as {getattr(self, key)}"
                )
        if not all(isinstance(name, str) for name in config.get("addons", ())):
            raise ValueError(f"config.addons is {shorten(config['addons'])}, expected a list of names")
        for section in (self.method, *self.addons):
            if not isinstance(config.get(section, {}), dict):
                raise ValueError(f"config.{section} is {shorten(config[section])}, expected a mapping of settings")
        return self


REQUIRED = [name for name, field in Record.model_fields.items() if field.is_required()]


# What a record says about its run -----------------------------------------------------------------------------


def commit() -> str | None:
    """The commit of the source tree, from INCVEC_COMMIT or from git; None if neither has it.

    An installed copy may be inside another project's repository, in its virtual environment. So git has to track this
    file for its commit to count.
    """
    given = os.environ.get("INCVEC_COMMIT")
    if given:
        return given
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=12") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    here = Path(__file__).resolve().parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and commit."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("incvec", "torchvision", "numpy", "transformers", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "incvec" not in versions:
        from incvec import __version__

        versions["incvec"] = __version__
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {
        "versions": versions,
        "device": name,
        "device_type": device.type,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "commit": commit(),
    }


def read_record(path: Path, strict: bool = False) -> dict[str, Any]:
    """The record in a file or run folder; DataError with the reason if it is not a valid one.

    `strict` also requires the configuration, the environment, and metrics that follow from the accuracy matrix: a
    report must not spread a wrong number.
    """
    if path.is_dir():
        path = path / "record.json"
    try:
        record: dict[str, Any] = json.loads(read_text(path), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise DataError(f"there is no record at {path}: the run has not finished, or is elsewhere.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a record: {error}.") from None
    if not isinstance(record, dict):
        raise DataError(f"{path} is not a record: it contains a {type(record).__name__}, a mapping was expected.")
    missing = [key for key in REQUIRED if key not in record]
    # A later format may lack some keys. A file without any of them is something else that has a format.
    if len(missing) < len(REQUIRED) and record.get("format", 1) not in READABLE_FORMATS:
        raise DataError(
            f"{path} is a record of format {shorten(record['format'])}, this version of incvec reads up to {FORMAT}: "
            "use the version that wrote it, or a newer one."
        )
    if missing:
        raise DataError(f"{path} is not a record: it lacks {', '.join(missing)}.")
    try:
        Record.model_validate(record)
    except ValidationError as error:
        key, given, problem = first_problem(error)
        found = f"{key} is {shorten(given)}: " if key else ""
        raise DataError(f"{path} is not a record: {found}{problem}.") from None
    if strict:
        check_consistent(record, path)
    return upgrade_record(record)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it contains {name}, which is not a number")


def check_consistent(record: Mapping[str, Any], path: Path) -> None:
    missing = [key for key in ("config", "environment") if not isinstance(record.get(key), Mapping)]
    missing += [f"config.{key}" for key in ("method", "addons", "dataset") if key not in record.get("config", {})]
    if missing:
        raise DataError(f"{path} lacks {' and '.join(missing)}, so how it was run is unknown. Run it again.")
    try:
        expected: Mapping[str, Any] = summarize(record["accuracy"], record["test_counts"])
        pairs = [(name, record["metrics"][name], expected[name]) for name in ("AA", "LA", "FM")]
        pairs += [(f"a[{t}]", *pair) for t, pair in enumerate(zip(record["metrics"]["a"], expected["a"], strict=True))]
        wrong = [
            f"{name} is {given}, the matrix gives {value}"
            for name, given, value in pairs
            if (given is None) != (value is None) or (value is not None and not abs(given - value) <= TOLERANCE)
        ]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else error
        raise DataError(f"{path} is a broken record: {problem}. Run it again, or remove the file.") from None
    if wrong:
        raise DataError(f"{path} was altered: {'; '.join(wrong[:3])}. Run it again, or remove the file.")


def upgrade_record(record: dict[str, Any]) -> dict[str, Any]:
    """Translate the names of earlier versions."""
    if "facts" in record:
        record["statistics"] = record.pop("facts")
    if "config" in record:
        record["config"] = without_removed_settings(rename_settings(record["config"]))
    return record


def find_records(paths: Iterable[Path], on_broken: Callable[[DataError], None] | None = None) -> list[Path]:
    """Every record file at or below the given paths, sorted; a file given by name is included without a check.

    Other JSON files may be in the same folders; one that looks like a broken record is reported to `on_broken`.
    """
    records: set[Path] = set()
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                try:
                    read_record(file)
                    records.add(file)
                except DataError as error:
                    if on_broken is not None and _meant_as_record(file):
                        on_broken(error)
        elif path.exists():
            records.add(path)
        else:
            raise DataError(f"{path} does not exist; give a record.json, or a folder that contains some.")
    return sorted(records)


def readable(paths: Sequence[Path], warn: Callable[[str], None] | None = None) -> list[Path]:
    """The records at or below the paths, at least one; a broken one in a folder is an error, or a warning to `warn`."""
    broken: list[DataError] = []
    records = find_records(paths, broken.append)
    if broken and (warn is None or not records):
        raise broken[0]
    for error in broken:
        if warn is not None:
            warn(f"left out: {error}")
    if not records:
        raise DataError(f"there is no record in {', '.join(map(str, paths))}; `incvec run` writes one.")
    return records


def _meant_as_record(file: Path) -> bool:
    """Whether an invalid file was meant as one: by its name, cut off, or with most of a record's keys."""
    if file.name == "record.json":
        return True
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError, OSError, DataError):
        return True
    return isinstance(content, dict) and sum(key in content for key in REQUIRED) > len(REQUIRED) // 2


def format_json(value: Any, indent: int = 0) -> str:
    """JSON for people and for version control: one line per list of numbers and per mapping of single values."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if not any(isinstance(item, dict | list | tuple) for item in items):
        return json.dumps(value, separators=None if isinstance(value, dict) else (",", ":"))
    start, inner = "\n" + " " * indent, "\n" + " " * (indent + 1)
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {format_json(item, indent + 1)}" for key, item in value.items()]
        return "{" + ",".join(inner + row for row in rows) + start + "}"
    return "[" + ",".join(inner + format_json(item, indent + 1) for item in items) + start + "]"


def title(record: Mapping[str, Any]) -> str:
    """`podnet + ivt`, `podnet oracle`."""
    text = " + ".join([record["method"], *record["addons"]])
    return f"{text} oracle" if record["oracle"] else text


class Records(list[dict[str, Any]]):
    """Records in a list; `paths` has the file of each."""

    def __init__(self, records: Iterable[dict[str, Any]], paths: Iterable[Path]) -> None:
        super().__init__(records)
        self.paths = list(paths)

    def frame(self) -> pandas.DataFrame:
        """A pandas DataFrame with one row per record.

        Its columns: `run`, `method`, `addons`, `oracle`, `dataset`, `tasks`, `seed`, `AA`, `LA`, `FM`, `seconds` and
        `path`; then every setting by its dotted name, such as `podnet.epochs`. The list has the accuracy matrix and
        the losses.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("records(...).frame() needs pandas: pip install pandas") from error
        rows = []
        for record, path in zip(self, self.paths, strict=True):
            row = {"run": title(record), "method": record["method"], "addons": " + ".join(record["addons"])}
            row |= {key: record[key] for key in ("oracle", "dataset", "tasks", "seed")}
            row |= {name: record["metrics"].get(name) for name in ("AA", "LA", "FM")}
            row |= {"seconds": record.get("seconds"), "path": str(path)}
            for key, value in record.get("config", {}).items():
                section = {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else None
                row = {**({key: value} if section is None else section), **row}
            rows.append(row)
        known = ["run", "method", "addons", "oracle", "dataset", "tasks", "seed", "AA", "LA", "FM", "seconds", "path"]
        frame = pandas.DataFrame(rows)
        return frame[[*known, *(column for column in frame.columns if column not in known)]]


def load_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a run: of its folder, or of a record file."""
    return read_record(Path(path).expanduser())


def records(*paths: str | os.PathLike[str]) -> Records:
    """All records at or below the given folders or files, by default `runs`; a broken record is an error."""
    files = readable([Path(path).expanduser() for path in paths or ("runs",)])
    return Records((read_record(file) for file in files), files)


class _CallableModule(ModuleType):
    """`incvec.records` is this module once it is imported, and a function of `incvec`: so it can be called, too."""

    def __call__(self, *paths: str | os.PathLike[str]) -> Records:
        return records(*paths)


sys.modules[__name__].__class__ = _CallableModule
