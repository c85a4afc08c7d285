"""Bad inputs for `campaign.py`: one generator per kind, each a function of a random generator and a folder.

A generator writes its input into the folder and returns a `Case`: the command, what has to happen, and what its message
has to name. `Fixtures` are the valid inputs that the generators damage.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from incvec.addons import ADDONS, find_addon
from incvec.atomic_files import read_tensors, write_tensors
from incvec.config import RunConfig
from incvec.data import load_dataset
from incvec.data.layouts import list_images
from incvec.data.store.write import pack
from incvec.engine.run import Run, finish
from incvec.methods import METHODS, find_method
from incvec.presets import resolve

Json = dict[str, Any]

SHORT: dict[str, Any] = {"net": "tiny", "epochs": 1, "batch_size": 64, "memory": 5}
SHORTER: dict[str, dict[str, Any]] = {
    "bic": {"bias_epochs": 1},
    "geodl": {"balance_epochs": 1},
    "lucir": {"balance_epochs": 1},
    "mnemonics": {"exemplar_epochs": 1},
    "podnet": {"balance_epochs": 1, "proxies": 2},
    "slca": {"align_epochs": 1, "samples": 16},
    "eopc": {"epochs": 1, "positions": 3, "members": 3},
}
# YAML that a loader may choke on, values of other types, and numbers without bounds.
ODD_VALUES = (
    "0x", "0b", "0b2", "2024-13-45", "2024-02-30", "2024-01-01", "2024-01-01T99:00:00", "190:20:30", "1_000", "_", "=",
    "<<", "~", "null", "true", "no", "[]", "{}", "[", "{", "[[]]", "{a: 1}", "[1, a]", "[null]", "'", '"', "- a", "? a",
    "&a", "*a", "&a [*a]", "!!int x", "!!float x", "!!bool x", "!!timestamp x", "!!binary x", "!!set {a}", "!!null x",
    "!!python/object/apply:os.system [ls]", "!!omap [a]", "!x y", '"\\0"', '"a\\0b"', '"\\ud800"', "\u202e", "é", " ",
    "", ".", "..", "../..", "/", "a/b", "~root", "-", "--", "-1", "-0.0", "0", "1", "2.5", "1e3", "1e999", "-1e999",
    ".nan", ".inf", "-.inf", "nan", "inf", "-inf", "1e-400", str(2**31), str(2**63), str(10**30), "9" * 5000,
    "-" + "9" * 30, "[" * 3000, "{a: " * 1000, "a" * 100_000, "\t", "%a", "@a", "`a`", "|", ">", "# a", "a: b: c",
)  # fmt: skip
NAMED = ("setting", "method", "device", "add-on", "data set", "variant", "network")  # in messages about a setting
NOT_FINITE = (".nan", ".inf", "-.inf", "nan", "inf", "-inf", "1e999", "-1e999")
UNBOUNDED = (str(2**63), str(10**30), "9" * 5000)
# Settings that decide how much memory a run takes, with values that no machine has the memory for.
HUGE = (
    ("rapf.samples", 10**9), ("rapf.draws", 10**9), ("slca.samples", 4 * 10**9), ("eopc.members", 10**9),
    ("eopc.positions", 10**9), ("fcs.mixups", 10**9), ("fcs.mixing", 10**9), ("podnet.proxies", 4 * 10**9),
    ("geodl.positions", 10**6), ("image_size", 10**6),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One command with a bad input."""

    name: str  # what is bad
    arguments: list[str]
    expect: Literal["refused", "refused or accepted", "resumed"] = "refused or accepted"
    mentions: tuple[str, ...] = ()  # a message has to contain one of these
    signals: tuple[tuple[float, int], ...] = ()  # (seconds after the start, signal)
    disk: float | None = None  # MB of a disk of its own
    start_up: bool = False  # in a new interpreter, to include the time of the imports
    protected: tuple[str, ...] = ()  # paths below the folder that must not change
    result: str | None = None  # a record that has to be that of the unbroken run


Generator = Callable[[random.Random, "Fixtures", Path], Case]


# Valid inputs ------------------------------------------------------------------------------------------------


def short_settings(method: str, *addons: str) -> Json:
    """Settings of a run of less than a second."""
    given: Json = {"method": method, "addons": list(addons), "dataset": "digits", "device": "cpu"}
    if not find_method(method).pretrained:
        given |= {"base_classes": 4, "tasks": 2}
        own = {**SHORT, **SHORTER.get(method, {})}
    else:
        own = {"epochs": 1, **SHORTER.get(method, {})}
    known = options_of(method)
    given[method] = {key: value for key, value in own.items() if key in known}
    return given | {name: SHORTER.get(name, {}) for name in addons if SHORTER.get(name)}


def options_of(name: str) -> dict[str, Any]:
    """The options of a method or add-on: name -> field."""
    kind: Any = (find_method if name in METHODS else find_addon)(name).Options
    return dict(kind.model_fields)


def set_options(given: Json) -> list[str]:
    """The settings as options of `incvec run`."""
    words = []
    for key, value in given.items():
        pairs = {f"{key}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
        words += [word for pair in pairs.items() for word in ("--set", f"{pair[0]}={json.dumps(pair[1])}")]
    return words


@dataclass(frozen=True)
class Fixtures:
    """Valid inputs below one folder, made once."""

    root: Path
    records: dict[str, Json] = field(default_factory=dict)  # by the folder of the run

    @classmethod
    def make(cls, root: Path) -> Fixtures:
        data = load_dataset("digits")
        records = {}
        plain, teleported = short_settings("podnet"), short_settings("podnet", "ivt")
        for name, given in {"plain": plain, "ivt": teleported, "oracle": plain | {"oracle": True}}.items():
            records[name] = finish(Run(resolve(given), data, root / "runs" / name, root / "runs" / "bases"))
        half = Run(resolve(teleported), data, root / "half", root / "half-bases", save_interval=0)
        events = half.events()
        while half.state is None or half.position < (1, 0, 1):
            next(events)
        events.close()
        write_images(root / "images", classes=3, each=10)
        pack(list_images(root / "images"), root / "store", side=8, workers=1, chunk_rows=4)
        write_aircraft(root / "aircraft")
        return cls(root, records)

    def copy(self, name: str, folder: Path) -> Path:
        target = folder / Path(name).name
        shutil.copytree(self.root / name, target)
        return target


def write_images(root: Path, classes: int, each: int) -> None:
    pixels = np.random.default_rng(0)
    for label in range(classes):
        (root / f"class-{label}").mkdir(parents=True)
        for number in range(each):
            array = pixels.integers(0, 256, (12, 10 + number, 3), dtype=np.uint8)
            Image.fromarray(array).save(root / f"class-{label}" / f"{number:02d}.{'png' if number % 2 else 'jpg'}")


def write_aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    write_images(data / "all", classes=2, each=4)
    (data / "images").mkdir()
    for split in ("trainval", "test"):
        lines = []
        for label, number in [(0, 0), (0, 2), (1, 0), (1, 2)]:
            name = f"{split}{label}{number}"
            shutil.copy(data / "all" / f"class-{label}" / f"{number:02d}.jpg", data / "images" / f"{name}.jpg")
            lines.append(f"{name} 70{label}-320\n")
        (data / f"images_variant_{split}.txt").write_text("".join(lines))
    (data / "variants.txt").write_text("700-320\n701-320\n")
    shutil.rmtree(data / "all")


# Settings and YAML -------------------------------------------------------------------------------------------


def option_names() -> list[tuple[str, str, tuple[str, ...]]]:
    """Every setting: its method, its name with its section, and the add-ons that it needs."""
    names: list[tuple[str, str, tuple[str, ...]]]
    names = [("podnet", key, ()) for key in RunConfig.model_fields if key not in ("sections", "method")]
    for method in METHODS:
        names += [(method, f"{method}.{key}", ()) for key in options_of(method)]
    for addon in ADDONS:
        names += [("podnet", f"{addon}.{key}", (addon,)) for key in options_of(addon)]
    return names


def is_number(setting: str) -> tuple[bool, bool]:
    """Whether a setting takes integers, and whether it takes floats."""
    section, _, key = setting.rpartition(".")
    field = (options_of(section) if section else RunConfig.model_fields)[key]
    types_ = leaf_types(field.annotation)
    return int in types_, float in types_


def leaf_types(annotation: Any) -> set[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return {leaf for each in typing.get_args(annotation) for leaf in leaf_types(each)}
    return {annotation}


def bad_setting(rng: random.Random, fixtures: Fixtures, folder: Path) -> Case:
    """One odd value of one setting, with --set."""
    addons: tuple[str, ...]
    if rng.random() < 0.08:
        setting, amount = rng.choice(HUGE)
        method, addons = setting.partition(".")[0], ()
        if method not in METHODS:
            method, addons = "podnet", (method,) if method in ADDONS else ()
        given = short_settings(method, *addons)
        arguments = ["run", *set_options(given), "--set", f"{setting}={amount}", "--out", "out", "--no-share"]
        return Case(f"{setting}={amount}", arguments, "refused", (setting.rpartition(".")[2],))
    method, setting, addons = rng.choice(option_names())
    value = rng.choice(ODD_VALUES)
    integer, real = is_number(setting)
    never = (integer and value in UNBOUNDED) or (real and value in NOT_FINITE)
    arguments = ["run", *set_options(short_settings(method, *addons)), "--out", "out", "--no-share"]
    if setting in ("device",) or rng.random() < 0.7:
        arguments += ["--set", f"{setting}={value}"]
    else:  # also where a mapping is expected, or below a value
        setting = rng.choice([setting.partition(".")[0], f"{setting}.x", f"x.{setting}", f"{setting} ", f".{setting}"])
        never = False
        arguments += ["--set", f"{setting}={value}"]
    words = tuple(part for part in setting.replace(" ", ".").split(".") if part)
    words += ("add-on",) if "addons" in words else ()
    return Case(f"{setting}={value[:40]}", arguments, "refused" if never else "refused or accepted", (*words, "--set"))


def bad_sweep_setting(rng: random.Random, fixtures: Fixtures, folder: Path) -> Case:
    """One odd value for all runs of a sweep, or in its file."""
    value = rng.choice([each for each in ODD_VALUES if each not in ("",)])
    block: Json = short_settings("podnet")
    content: Json = {"runs": [block]}
    options = []
    place = rng.randrange(4)
    if place == 0:
        options = [
            "--set",
            f"{rng.choice(['seed', 'method.epochs', 'podnet.lr', 'addons', 'tasks', 'method'])}={value}",
        ]
    elif place == 1:
        content[rng.choice(["check", "name", "runs", "x"])] = "VALUE"
    elif place == 2:
        block[rng.choice(["method", "addons", "seed", "podnet", "dataset"])] = "VALUE"
    else:
        block["podnet"][rng.choice(["epochs", "milestones", "net"])] = "VALUE"
    text = json.dumps(content).replace('"VALUE"', value)
    (folder / "sweep.yaml").write_text(text, errors="replace")
    arguments = ["sweep", "sweep.yaml", "--dry-run", *options]
    return Case(f"{value[:30]} in {options or text[:60]}", arguments, mentions=("sweep.yaml", "--set"))


def bad_yaml(rng: random.Random, fixtures: Fixtures, folder: Path) -> Case:
    """A configuration or sweep file that is odd as a file, or damaged at a random place."""
    command = rng.choice([["run", "--out", "out", "--no-share", "--config"], ["sweep", "--dry-run"]])
    content = short_settings("podnet", "ivt") if command[0] == "run" else {"runs": [short_settings("podnet")]}
    text = json.dumps(content, indent=1)
    path = folder / "given.yaml"
    damage = rng.choice(["insert", "insert", "insert", "cut", "bytes", "kind"])
    if damage == "insert":
        place, odd = rng.randrange(len(text)), rng.choice(ODD_VALUES)
        path.write_text(text[:place] + odd + text[place:], errors="replace")
    elif damage == "cut":
        path.write_text(text[: rng.randrange(len(text))])
    elif damage == "bytes":
        raw = bytearray(text.encode())
        for _ in range(rng.randint(1, 5)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(bytes(raw))
    else:
        damage = make_odd_file(rng, path)
    return Case(f"{command[0]}: {damage}", [*command, "given.yaml"], mentions=("given.yaml", *NAMED))


def make_odd_file(rng: random.Random, path: Path) -> str:
    """Something that is not a small text file; returns what it is."""
    kind = rng.choice(["pipe", "folder", "missing", "20 MB", "aliases", "device", "empty", "zeros", "link to itself"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "20 MB":
        path.write_text("runs:\n" + "- {method: podnet, seed: 1}\n" * 700_000)
    elif kind == "aliases":
        levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else '1'}]" for i in range(12)]
        path.write_text("\n".join(levels) + "\n")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind in ("empty", "zeros"):
        path.write_bytes(b"" if kind == "empty" else bytes(1000))
    return kind


# Records -----------------------------------------------------------------------------------------------------

ODD_JSON: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, 1e300, float("nan"), float("inf"), "", "x", "../../x", "\0", "\ud800", "<b>",
    "$x_y\\", "x" * 10_000, [], [1], ["x"], [[]], [None], [[1, "x"]], {}, {"x": 1}, {"": None}, {"x": {"y": [1]}},
    "[red]", "nan",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON value; of a long list only the first two."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def damaged_json(rng: random.Random, value: Json, depth: int = 4) -> tuple[Json, str]:
    """A copy in which one value was replaced or removed, or a key added; and where."""
    value = copy.deepcopy(value)
    path = rng.choice([path for path in places(value) if len(path) <= depth])
    parent: Any = value
    for key in path[:-1]:
        parent = parent[key]
    where = ".".join(map(str, path))
    action = rng.choice(["replace", "replace", "replace", "remove", "add"])
    if action == "replace":
        parent[path[-1]] = rng.choice(ODD_JSON)
        return value, f"{where} = {json.dumps(parent[path[-1]])[:30]}"
    if action == "remove":
        del parent[path[-1]]
        return value, f"{where} removed"
    if isinstance(parent, dict):
        parent["odd"] = rng.choice(ODD_JSON)
    else:
        parent.append(rng.choice(ODD_JSON))
    return value, f"next to {where}: added"


def bad_record(rng: random.Random, fixtures: Fixtures, folder: Path) -> Case:
    """A record in which something was replaced, among good ones, for every command that reads records."""
    runs = fixtures.copy("runs", folder)
    name = rng.choice(list(fixtures.records))
    path = runs / name / "record.json"
    if rng.random() < 0.9:
        record, damage = damaged_json(rng, fixtures.records[name])
        path.write_text(json.dumps(record))
    elif rng.random() < 0.5:
        raw = bytearray(path.read_bytes())
        if rng.random() < 0.5:
            raw = raw[: rng.randrange(len(raw))]
        else:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(raw)
        damage = "damaged bytes"
    else:
        path.unlink()
        damage = make_odd_file(rng, path)
    command = rng.choice(
        [
            ["show", "runs"], ["show", "runs", "--json"], ["show", "runs", "--markdown"], ["show", f"runs/{name}"],
            ["study", "gap", "runs"], ["study", "gap", "runs"], ["report", "runs", "-o", "report"],
            ["run", *set_options(short_settings("podnet", *(["ivt"] if name == "ivt" else []))),
             "--set", f"oracle={json.dumps(name == 'oracle')}", "--out", f"runs/{name}"],
        ]
    )  # fmt: skip
    protected = tuple(f"runs/{other}/record.json" for other in fixtures.records if other != name)
    return Case(f"{command[0]} {command[1]}: {damage}", command, mentions=("record",), protected=protected)


# Checkpoints -------------------------------------------------------------------------------------------------


def bad_checkpoint(rng: random.Random, fixtures: Fixtures, folder: Path) -> Case:
    """A checkpoint, shared base or snapshot with a crafted header, crafted tensors or damaged bytes."""
    arguments = ["run", *set_options(short_settings("podnet", "ivt")), "--out", "half"]
    kind = rng.choice(["checkpoint", "checkpoint", "base", "snapshot", "study"])
    half = fixtures.copy("half", folder)
    if kind == "checkpoint":
        path = half / "checkpoint.safetensors"
        arguments += ["--bases", "bases"]
    elif kind == "base":
        shutil.rmtree(half)
        path = next(fixtures.copy("half-bases", folder).glob("*.safetensors"))
        arguments += ["--bases", "half-bases"]
    else:
        runs = fixtures.copy("runs", folder)
        path = runs / "ivt" / "snapshots" / "task-00.safetensors"
        if kind == "study":
            arguments = ["study", "path", "runs/ivt", "--points", "2", "--images", "20"]
        else:
            shutil.rmtree(half)
            arguments += ["--set", f"start={path.relative_to(folder)}", "--no-share"]
    damage = damage_tensors(rng, path)
    return Case(f"{kind}: {damage}", arguments, "refused or accepted", (path.name, path.parent.name, "saved"))


def damage_tensors(rng: random.Random, path: Path) -> str:
    """Damage a tensor file; its hashes are right unless bytes were damaged. Returns what was done."""
    action = rng.choice(["header"] * 6 + ["tensor"] * 3 + ["bytes"])
    if action == "bytes":
        raw = bytearray(path.read_bytes())
        if rng.random() < 0.5:
            raw = raw[: rng.randrange(len(raw))]
        else:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        return "damaged bytes"
    tensors, meta = read_tensors(path)
    meta = {key: value for key, value in meta.items() if key not in ("format", "hashes")}
    if action == "header":
        meta, damage = damaged_json(rng, meta, depth=3)
    else:
        name = rng.choice(sorted(tensors))
        tensor = tensors[name]
        change = rng.choice(["remove", "rename", "shape", "type", "empty", "values", "add"])
        if change in ("remove", "rename"):
            del tensors[name]
        if change in ("rename", "add"):
            tensors[rng.choice(["x", "method/x", "addon/x/y", "store/x", "loop/x", "addon/ivt/x", name + "x"])] = tensor
        elif change == "shape":
            tensors[name] = torch.cat([tensor.reshape(-1), tensor.reshape(-1)])
        elif change == "type":
            tensors[name] = tensor.to(rng.choice([torch.float64, torch.int64, torch.bool, torch.bfloat16]))
        elif change == "empty":
            tensors[name] = tensor.reshape(-1)[:0]
        elif change == "values" and tensor.is_floating_point():
            tensors[name] = torch.full_like(tensor, float("nan"))
        elif change == "values":
            tensors[name] = torch.full_like(tensor, 10**6 if tensor.dtype == torch.int64 else 1)
        damage = f"{change} {name}"
    write_tensors(path, tensors, meta)
    return damage


# Images and data folders -------------------------------------------------------------------------------------


def bad_data(rng: random.Random, fixtures: Fixtures, folder: Path) -> Case:
    """A folder of images, a store or an aircraft folder in which one file was damaged, replaced or removed."""
    kind = rng.choice(["images", "store", "aircraft"])
    root = fixtures.copy(kind, folder)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
    # Each kind of file is as likely as another, whatever their number.
    suffix = rng.choice(sorted({path.suffix for path in files}))
    path = rng.choice([path for path in files if path.suffix == suffix])
    damage = f"{damage_file(rng, path)} {path.relative_to(folder)}"
    dataset = {"images": "folder", "store": "packed", "aircraft": "aircraft"}[kind]
    train = ["run", *set_options(short_settings("finetune") | {"dataset": dataset, "base_classes": 0, "tasks": 1}),
             "--data-root", kind, "--out", "out", "--no-share"]  # fmt: skip
    if kind == "aircraft":
        train += ["--set", "finetune.batch_size=2"]
    commands = [["data", "check", kind], train]
    if kind == "images":
        commands.append(["data", "pack", "images", "packed", "--size", "8", "--workers", "1"])
    if kind == "aircraft":
        commands.append(["data", "aircraft", "aircraft", "copy"])
    command = rng.choice(commands)
    return Case(f"{command[0]} {command[1]}: {damage}", command, mentions=(kind,))


def damage_file(rng: random.Random, path: Path) -> str:
    raw = path.read_bytes()
    action = rng.choice(["cut", "flip", "replace", "remove", "odd", "lines", "json"])
    if action == "lines" and path.suffix == ".txt":
        lines = raw.split(b"\n")
        extra = rng.choice([b"x", b"x y", b"\xff\xfe", b"\0 \0", b" 700-320", b"../../x 700-320", b"a" * 5000, b"a\tb"])
        lines.insert(rng.randrange(len(lines)), extra)
        path.write_bytes(b"\n".join(lines))
    elif action == "json" and path.suffix == ".json":
        content, where = damaged_json(rng, json.loads(raw))
        if "hash" in content and rng.random() < 0.8:
            from incvec.data.store.open import sha256

            content.pop("hash")
            content["hash"] = sha256(json.dumps(content, sort_keys=True).encode())
        path.write_text(json.dumps(content))
        return where
    elif action == "cut":
        path.write_bytes(raw[: rng.randrange(len(raw) or 1)])
    elif action == "replace":
        path.write_bytes(rng.choice([b"", b"\0" * 100, b"text\n", raw * 2, rng.randbytes(1000)]))
    elif action == "remove":
        path.unlink()
    elif action == "odd":
        path.unlink()
        return make_odd_file(rng, path)
    else:
        flipped = bytearray(raw)
        for _ in range(rng.randint(1, 8)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        path.write_bytes(flipped)
        return "flip"
    return action


# Signals and full disks --------------------------------------------------------------------------------------


def bad_moment(rng: random.Random, fixtures: Fixtures, folder: Path) -> Case:
    """A command that is interrupted once or twice, or killed; the same command again has to complete it."""
    import signal

    start_up = rng.random() < 0.15
    limit = 4.0 if start_up else 0.6
    first = rng.uniform(0.12, limit) if start_up else rng.uniform(0.0, limit)
    which = rng.choice([signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGKILL])
    signals = [(first, int(which))]
    if which == signal.SIGINT and rng.random() < 0.6:
        signals.append((first + rng.choice([0.0, 0.001, 0.01, 0.05, 0.2]), int(which)))
    command, result = rng.choice(resumable(fixtures, folder))
    times = ", ".join(f"{signal.Signals(number).name} at {seconds:.2f} s" for seconds, number in signals)
    return Case(f"{command[0]} {command[1]}: {times}", command, "resumed", signals=tuple(signals), start_up=start_up,
                result=result)  # fmt: skip


def bad_disk(rng: random.Random, fixtures: Fixtures, folder: Path) -> Case:
    """A command on a disk that becomes full; once there is space, the same command has to complete it."""
    size = rng.choice([0.004, 0.008, 0.016, 0.03, 0.06, 0.1, 0.2, 0.4])
    commands = resumable(fixtures, folder, "disk")
    command, result = rng.choice(commands)
    return Case(f"{command[0]} {command[1]} with {size} MB", command, "resumed", disk=size, result=result)


def resumable(fixtures: Fixtures, folder: Path, out: str = ".") -> list[tuple[list[str], str | None]]:
    """Commands that write into the folder `out`, and the record that each has to have in the end."""
    runs, images = str(fixtures.root / "runs"), str(fixtures.root / "images")
    train = ["run", *set_options(short_settings("podnet", "ivt")), "--out", f"{out}/run"]
    pack = ["data", "pack", images, f"{out}/packed", "--size", "24"]
    return [
        (train, f"{out}/run/record.json"),
        (["report", runs, "-o", f"{out}/report"], None),
        (["study", "gap", runs, "-o", f"{out}/figures"], None),
        ([*pack, "--workers", "1"], None),
        ([*pack, "--workers", "2"], None),
        (["data", "aircraft", str(fixtures.root / "aircraft"), f"{out}/copy"], None),
    ]


KINDS: dict[str, tuple[Generator, int]] = {  # generator, and how many of 1,000 cases
    "settings": (bad_setting, 330),
    "sweeps": (bad_sweep_setting, 80),
    "YAML files": (bad_yaml, 100),
    "records": (bad_record, 200),
    "checkpoints": (bad_checkpoint, 120),
    "data": (bad_data, 100),
    "signals": (bad_moment, 40),
    "full disks": (bad_disk, 30),
}
