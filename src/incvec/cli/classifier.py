"""`incvec learn`, `adopt`, `predict`, `evaluate`, `export`, `info`, `undo`: a classifier that keeps learning."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from incvec.cli.common import say
from incvec.cli.steps import steps
from incvec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from incvec.classifier import Classifier
    from incvec.classifier.folder import Description

LEARN_EXAMPLES = """[bold]Examples[/bold]

incvec learn photos/first --out planes

incvec learn photos/later --into planes

incvec learn photos/first --out planes --memory 0

incvec learn photos/first --out planes --method replay --addon ivt --backbone timm/resnet18"""
ADOPT_EXAMPLES = """[bold]Examples[/bold]

incvec adopt mine.safetensors --classes names.txt --backbone timm/resnet18 --out planes

incvec adopt mine.pth --classes names.txt --backbone torchvision/resnet50 --photos photos/first --out planes"""

Folder = Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder.", show_default=False)]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]


class Format(StrEnum):
    onnx = "onnx"
    torch = "torch"
    state_dict = "state-dict"


def register(app: typer.Typer) -> None:
    app.command(epilog=LEARN_EXAMPLES)(learn)
    app.command(epilog=ADOPT_EXAMPLES)(adopt)
    for command in (predict, evaluate, export, info, undo):
        app.command()(command)


# Commands ---------------------------------------------------------------------------------------------------


Memory = Annotated[
    int | None,
    typer.Option(
        help="Photos remembered per class, by methods that train on them; 0: no photo is kept.", show_default="20"
    ),
]
Check = Annotated[
    int | None,
    typer.Option(help="Photos per class, at most one in ten, to measure accuracy with.", show_default="5"),
]
AddOns = Annotated[list[str] | None, typer.Option(help="Add-on of the method, such as ivt.", show_default=False)]
Side = Annotated[int | None, typer.Option(help="Side of the network's input in pixels.", show_default="the backbone's")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as replay.epochs=5.", show_default=False),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the training.", show_default="0")]


def learn(
    photos: Annotated[Path, typer.Argument(help="Folder with one folder of photos per class.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="New model folder.", show_default=False)] = None,
    into: Annotated[Path | None, typer.Option(help="Model folder to add classes to.", show_default=False)] = None,
    more: Annotated[bool, typer.Option("--more", help="Accept further photos of known classes.")] = False,
    memory: Memory = None,
    check: Check = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="lite0, timm/NAME, torchvision/NAME or a network of the lab.", show_default="lite0"),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="File of the backbone's weights, or none.", show_default="pre-trained")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How classes are learned; see `incvec list methods`.", show_default="lda")
    ] = None,
    addon: AddOns = None,
    side: Side = None,
    settings: Assignments = None,
    seed: Seed = None,
    device: Device = "auto",
) -> None:
    """Learn the classes of a folder of photos: the first ones with --out, further ones with --into.

    Classes are named after the folders. Later only the new photos are needed. An interrupted command changes nothing;
    given again, it resumes.
    """
    if (out is None) == (into is None):
        raise ConfigError("give either --out NEW_FOLDER for a new classifier, or --into FOLDER to add classes to one.")
    given = choices(
        memory=memory, check=check, backbone=backbone, weights=weights, method=method, addons=addon, side=side,
        seed=seed, settings=settings,
    )  # fmt: skip
    if into is not None and given:
        named = ", ".join(OPTIONS.get(name, "--" + name) for name in given)
        raise ConfigError(
            f"with --into, leave out {named}: settings are chosen by the first `learn` and cannot be changed."
        )
    from incvec.classifier import Classifier

    with steps() as shown:
        if into is not None:
            before = Classifier.load(into, device)
            classifier = before.learn(photos, more=more, progress=shown.show, listen=shown.event)
        else:
            classifier = Classifier.fit(photos, out, device=device, progress=shown.show, listen=shown.event, **given)
    report(classifier)


OPTIONS = {"addons": "--addon", "settings": "--set"}  # whose names differ from those in Python


def choices(settings: list[str] | None, **given: Any) -> dict[str, Any]:
    """The options that were given, as arguments of `Classifier.fit`."""
    from incvec.config import assign

    chosen = {name: value for name, value in given.items() if value is not None and value != []}
    if settings:
        tree: dict[str, Any] = {}
        for setting in settings:
            assign(tree, setting)
        chosen["settings"] = tree
    return chosen


def adopt(
    checkpoint: Annotated[
        Path, typer.Argument(help="Weights of a trained network: safetensors, or a state dict.", show_default=False)
    ],
    classes: Annotated[
        Path, typer.Option(help="Text file with the class names, one per line, in order.", show_default=False)
    ],
    backbone: Annotated[str, typer.Option(help="timm/NAME or torchvision/NAME.", show_default=False)],
    out: Annotated[Path, typer.Option(help="New model folder.", show_default=False)],
    photos: Annotated[
        Path | None, typer.Option(help="Photos of these classes, if they still exist.", show_default=False)
    ] = None,
    memory: Memory = None,
    check: Check = None,
    method: Annotated[
        str | None,
        typer.Option(help="How further classes are learned.", show_default="lda with photos, lwf without"),
    ] = None,
    addon: AddOns = None,
    side: Side = None,
    settings: Assignments = None,
    seed: Seed = None,
    device: Device = "auto",
) -> None:
    """Make a classifier from a network that was trained elsewhere: its classes count as the first learn.

    Nothing is trained. Add classes with `incvec learn PHOTOS --into FOLDER`. If photos of the old classes still exist,
    give them with --photos: then every method can go on from them.
    """
    from incvec.classifier import Classifier

    given = choices(
        photos=photos, memory=memory, check=check, method=method, addons=addon, side=side, seed=seed, settings=settings
    )
    with steps() as shown:
        report(
            Classifier.from_checkpoint(
                checkpoint, classes, out, backbone=backbone, device=device, progress=shown.show, **given
            )
        )


def report(classifier: Classifier) -> None:
    for line in learned_lines(classifier.path, classifier.description, classifier.folder.size()):
        say(line)


def learned_lines(path: Path, description: Description, size: int) -> list[str]:
    """The end of `learn`: what was learned, how well, and what is kept."""
    last = description.history[-1]
    known = f"{len(description.classes)} classes"
    what = [f"{len(last.classes)} new"] if last.classes else []
    what += [f"more photos of {len(last.more)}"] if last.more else []
    lines = [f"{path}: {known} ({', '.join(what)}), {last.photos} photos learned in {last.seconds:.0f} s"]
    accuracy = accuracy_by_learn(description, len(description.history) - 1)
    if any(total for _, total in accuracy):
        parts = [f"classes of learn {i}: {share(*counts)}" for i, counts in enumerate(accuracy, start=1) if counts[1]]
        lines.append(f"Recognized of the check photos: {'; '.join(parts)}")
    return [*lines, kept_line(description, size)]


def kept_line(description: Description, size: int) -> str:
    """What the folder contains, in plain words."""
    kept, check = sum(description.remembered), sum(description.checked)
    size_of = f"as {description.preprocessing.stored} x {description.preprocessing.stored} pixels"
    photos = [f"{kept} photos to learn from later (up to {description.memory} per class)"] if kept else []
    photos += [f"{check} photos to measure accuracy with"] if check else []
    what = "the network's weights and statistics of the classes"
    if not photos:
        return f"Kept ({size / 1e6:.1f} MB): {what}. No photo is kept."
    return (
        f"Kept ({size / 1e6:.1f} MB): {what}, and {size_of} {' and '.join(photos)}. The other photos are not needed "
        "any more."
    )


def accuracy_by_learn(description: Description, number: int) -> list[tuple[int, int]]:
    """Check photos recognized and their total right after the `number`-th `learn`, of the classes of each `learn`."""
    check = description.history[number].check
    result = []
    for entry in description.history:
        counts = [check[name] for name in entry.classes if name in check]
        result.append((sum(c for c, _ in counts), sum(n for _, n in counts)))
    return result


def share(correct: int, total: int) -> str:
    return f"{100 * correct / total:.0f} % of {total}" if total else "–"


def predict(
    model: Folder,
    photos: Annotated[list[Path], typer.Argument(help="Photos, or folders of them.", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="Number of classes per photo.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Device = "auto",
) -> None:
    """Name the class of photos, with its probability."""
    from incvec.classifier import Classifier
    from incvec.classifier.photos import list_images

    classifier = Classifier.load(model, device)
    missing = [path for path in photos if not path.exists()]
    if missing:
        raise DataError(f"there is no photo {missing[0]}.")
    files = list_images(photos)
    unreadable: dict[int, DataError] = {}
    with steps() as shown:
        probabilities = classifier.predict_proba(files, shown.show, unreadable)
    names = classifier.description.classes
    rows: list[dict[str, Any]] = []
    for position, (file, row) in enumerate(zip(files, probabilities, strict=True)):
        if position in unreadable:
            rows.append({"file": str(file), "error": str(unreadable[position])})
            continue
        best = row.argsort()[::-1][:top]
        predictions = [{"class": names[i], "probability": round(float(row[i]), 6)} for i in best]
        rows.append({"file": str(file), "predictions": predictions})
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        ranks = [f"{rank}." for rank in range(1, min(top, len(names)) + 1)]
        columns = ranks if top > 1 else ["class"]
        table = Table("photo", *columns, title="class and its probability", title_justify="left")
        for entry in rows:
            found = entry.get("predictions", ())
            cells = [f"{p['class']} ({100 * p['probability']:.1f} %)" for p in found] or ["cannot be read"]
            table.add_row(Text(entry["file"], overflow="fold"), *map(Text, cells))
        Console().print(table)
    if unreadable:
        first = next(iter(unreadable.values()))
        raise DataError(f"{len(unreadable)} of {len(files)} photos cannot be read: {first}")


def evaluate(
    model: Folder,
    photos: Annotated[Path, typer.Argument(help="Folder with one folder of photos per class.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="Picture of the confusion matrix.", show_default="MODEL/evaluation/confusion.png"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    device: Device = "auto",
) -> None:
    """Measure accuracy on class folders: by class, by when it was learned, and which classes are confused."""
    from incvec.classifier import Classifier
    from incvec.classifier.evaluation import check_picture, draw_confusion

    picture = out or model / "evaluation" / "confusion.png"
    check_picture(picture)
    classifier = Classifier.load(model, device)
    with steps() as shown:
        result = classifier.evaluate(photos, shown.show)
    draw_confusion(result, picture)
    if as_json:
        typer.echo(json.dumps(result.as_json() | {"picture": str(picture)}, indent=1, ensure_ascii=False))
        return
    number = {name: i for i, e in enumerate(classifier.description.history, start=1) for name in e.classes}
    table = Table("class", "learn", "photos", "recognized", "most often taken for")
    for name, (correct, total) in result.by_class().items():
        other = result.most_confused(name)
        confused = "" if other is None else f"{other[0]} ({other[1]})"
        table.add_row(*map(Text, (name, str(number[name]), str(total), f"{100 * correct / total:.1f} %", confused)))
    Console().print(table)
    for i, (correct, total) in enumerate(result.by_learn(), start=1):
        if total:
            say(f"classes of learn {i}: {100 * correct / total:.1f} % of {total} photos")
    say(f"all: {100 * result.accuracy:.1f} % of {int(result.confusion.sum())} photos; confusion matrix: {picture}")


def export(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model folder, or a snapshot of a run.", show_default=False)
    ],
    to: Annotated[
        Format | None, typer.Option(help="Format of the file.", show_default="by the ending of --out, or onnx")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="MODEL/export/NAME.SUFFIX")] = None,
) -> None:
    """Write the network to a file that other programs run: labels and preprocessing are inside.

    The file is compared with the classifier before it is written.

    From a snapshot, RUN/snapshots/task-NN.safetensors, it makes a model folder instead: RUN/model-NN, or --out.
    """
    if model.suffix == ".safetensors":
        if to is not None:
            raise ConfigError("--to: a snapshot becomes a model folder. Leave it out, and export that folder then.")
        from incvec.classifier.snapshots import folder_from_snapshot

        folder = out or model.parent.parent / model.stem.replace("task", "model")
        description = folder_from_snapshot(model, folder)
        say(f"{folder}: {len(description.classes)} classes")
        return
    from incvec.classifier import Classifier
    from incvec.classifier.export import SUFFIXES

    classifier = Classifier.load(model, "cpu")
    target = out or model / "export" / (model.resolve().name + SUFFIXES[to or Format.onnx])
    with steps():
        classifier.export(target, to)
    say(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")


def info(
    model: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show what a classifier knows and keeps: classes, history, accuracy then and now, memory, size."""
    from incvec.classifier.folder import ModelFolder

    folder = ModelFolder(model)
    description = folder.read()
    kept = kept_line(description, folder.size())  # before anything is printed: a file may be missing
    if as_json:
        typer.echo(json.dumps(description.model_dump(mode="json", exclude={"previous"}), indent=1, ensure_ascii=False))
        return
    say(f"{model}: {len(description.classes)} classes, version {description.version}")
    method = " + ".join([description.method, *description.addons])
    side = description.preprocessing.side
    say(f"backbone {description.backbone}, {side} x {side} pixels; {method}")
    table = Table("learn", "when", "photos", "classes", "accuracy then", "now")
    now = accuracy_by_learn(description, len(description.history) - 1)
    for number, entry in enumerate(description.history):
        then = accuracy_by_learn(description, number)[number]
        names = ", ".join(entry.classes) + (f" (more: {', '.join(entry.more)})" if entry.more else "")
        cells = (str(number + 1), entry.when[:16].replace("T", " "), str(entry.photos), names, share(*then))
        table.add_row(*map(Text, cells), Text(share(*now[number])))
    Console().print(table)
    say(kept)
    if folder.working.is_dir():
        say("An unfinished `learn` is in the folder: give its command again to finish it.")
    if description.previous is not None:
        say("`incvec undo` goes back to before the last learn.")


def undo(model: Folder) -> None:
    """Go back to before the last `learn`. It cannot be repeated: one version is kept."""
    from incvec.classifier.folder import ModelFolder

    folder = ModelFolder(model)
    folder.read()
    with folder.lock:
        description = folder.undo()
    say(f"{model}: {len(description.classes)} classes again")
