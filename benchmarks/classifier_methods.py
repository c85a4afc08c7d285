"""Which method the classifier should use: accuracy after each `learn`, against what people would do instead.

    python benchmarks/classifier_methods.py measure PHOTOS --first 8 --step 4 --json results/classifier/x.json
    python benchmarks/classifier_methods.py measure PHOTOS ... --approaches replay replay+ivt all-finetuned --side 128
    python benchmarks/classifier_methods.py fold PHOTOS FOLD
    python benchmarks/classifier_methods.py held-out PHOTOS
    python benchmarks/classifier_methods.py table results/classifier/x.json
    python benchmarks/classifier_methods.py compare results/classifier/x.json results/classifier/y.json
    python benchmarks/classifier_methods.py draw results/classifier/x.json results/classifier/x.png

PHOTOS has train/ and test/ with one folder per class. A seed shuffles the classes and is the seed of the training; the
approaches see the same classes in the same order. After each `learn`, all classes so far are tested. Rows that exist in
the file already are not measured again. `--side` is the side of the network's input, for frozen and trained approaches.

Approaches on frozen features, which are computed once and cached:

- lda: linear discriminant analysis from class statistics; `lda-last` of the backbone's last features alone, `lda-plain`
  also without the square root;
- nearest-mean: the class with the nearest mean feature, by cosine;
- sgd: scikit-learn's SGDClassifier.partial_fit on the new photos, five passes;
- new-only: logistic regression on the new photos, its rows added to the old ones;
- linear-replay: logistic regression on the new photos and the remembered ones;
- all-linear: logistic regression on all photos so far, the bound for frozen features.

`linear-replay-stages` and `all-linear-stages` take the features that lda takes, so that the comparison is not one of
features. The others take the backbone's last features.

Approaches that train the network, through `Classifier`: the name of a method, with +ivt or not; `lda-adapted`, lda
after the backbone was trained on the classes of the first `learn` (`lda-adapted-last`: on the backbone's last features
alone, measured before lda had others); `all-finetuned` trains on all photos at once, the bound.

No setting is chosen on test photos. `fold` makes a folder like PHOTOS from its training photos, every fourth of which
is for testing, on which `measure` compares epochs and learning rates. `held-out` prints accuracies on four such folds,
from which power, shrinkage and the regularization of the logistic regression are chosen.

The order of the classes makes no difference to lda, nearest-mean and all-linear, and the photos are the same for every
seed: their spread over seeds is 0 by construction. The standard error of an accuracy on n test photos is a better
measure of its uncertainty, and `table` prints it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from classifier_features import FROZEN, C, Features, held_out, measure_frozen

from incvec.atomic_files import write_bytes
from incvec.classifier import Classifier
from incvec.classifier.photos import ClassPhotos, list_photos
from incvec.methods import find_method
from incvec.records import environment

BOUNDS = ("all-linear", "all-linear-stages", "all-finetuned")
KEEPS = dict.fromkeys(("linear-replay", "linear-replay-stages"), "remembered") | dict.fromkeys(BOUNDS, "all")
Grid = list[list[float]]  # after each `learn`: accuracy on all classes so far, then on those of each `learn`


def method_of(approach: str) -> str:
    """The method behind an approach that trains the network. What follows @ in its name is a number of epochs."""
    name = approach.partition("+")[0].partition("@")[0]
    return {"all-finetuned": "finetune", "lda-adapted": "lda", "lda-adapted-last": "lda"}.get(name, name)


def keeps(approach: str) -> str:
    """Which photos the approach keeps."""
    if approach in KEEPS or approach in FROZEN:
        return KEEPS.get(approach, "none")
    return "remembered" if find_method(method_of(approach)).exemplars else "none"


def training_settings(approach: str, given: argparse.Namespace) -> dict[str, Any]:
    """What is set of the method; everything else has the classifier's defaults."""
    if approach == "lda-adapted":
        chosen = {"adapt_epochs": given.epochs, "lr": given.lr}
    else:
        chosen = {"epochs": given.epochs, "lr": given.lr, "base_epochs": given.base_epochs}
        if method_of(approach) == "podnet":
            chosen |= {"balance_epochs": given.epochs}
    return {name: value for name, value in chosen.items() if value is not None}


def link_classes(photos: ClassPhotos, names: Sequence[str], target: Path) -> Path:
    """A folder with links to the named class folders."""
    target.mkdir(parents=True)
    for name in names:
        (target / name).symlink_to((photos.root / name).resolve())
    return target


def measure_trained(
    data: Features,
    approach: str,
    order: Sequence[int],
    sizes: Sequence[int],
    given: argparse.Namespace,
    seed: int,
    settings: dict[str, Any],
    sections: dict[str, Any] | None = None,
) -> Grid:
    """Accuracies after each `learn`. `sections` receives the complete settings."""
    method, joint = method_of(approach), approach == "all-finetuned"
    names = [data.classes[c] for c in order]
    lasts, rows = np.cumsum(sizes).tolist(), []
    options: dict[str, Any] = {"method": method, "addons": approach.split("+")[1:], "memory": given.memory, "check": 0}
    options |= {"side": given.side, "settings": {method: settings}, "seed": seed}
    options |= {"device": given.device, "backbone": given.backbone}
    with tempfile.TemporaryDirectory() as folder:
        root, classifier = Path(folder), None
        for number, last in enumerate(lasts):
            if joint and number + 1 < len(lasts):
                continue  # the bound is for all classes
            start = 0 if joint else last - sizes[number]
            new = link_classes(data.parts["train"], names[start:last], root / f"new-{number}")
            if classifier is None:
                classifier = Classifier.fit(new, root / "model", **options)
            else:
                classifier.learn(new)
            if sections is not None:
                sections.update(classifier.description.sections)
            test = classifier.evaluate(link_classes(data.parts["test"], names[:last], root / f"test-{number}"))
            by_class = test.by_class()
            groups = [names[end - size : end] for end, size in zip(lasts[: number + 1], sizes, strict=False)]
            counts = [[sum(column) for column in zip(*(by_class[n] for n in group), strict=True)] for group in groups]
            rows.append([100 * test.accuracy, *(100 * correct / total for correct, total in counts)])
    return rows


# Commands ---------------------------------------------------------------------------------------------------


def measure(given: argparse.Namespace) -> None:
    data = Features(given.photos, given.backbone, given.cache, given.side)
    number = len(data.classes)
    sizes = [given.first, *[given.step] * ((number - given.first) // given.step)]
    for seed in given.seeds:
        order = np.random.RandomState(seed).permutation(number)[: sum(sizes)].tolist()
        for approach in given.approaches:
            key = {"approach": approach, "seed": seed, "memory": given.memory, "sizes": sizes}
            key |= {"backbone": given.backbone, "name": given.name, "side": data.preprocessing.side}
            if approach.startswith("lda") and approach in FROZEN:
                key |= {"power": 1.0 if approach == "lda-plain" else given.power, "shrinkage": given.shrinkage}
            elif approach in FROZEN:
                key |= {"C": C, "power": given.power if approach.endswith("-stages") else 1.0}
            else:
                key |= {"settings": training_settings(approach, given)}
            if any(all(row.get(k) == v for k, v in key.items()) for row in read_rows(given.json)):
                continue
            began = time.monotonic()
            if approach in FROZEN:
                accuracy = measure_frozen(data, approach, order, sizes, given, seed)
            else:
                settings = training_settings(approach, given)
                accuracy = measure_trained(data, approach, order, sizes, given, seed, settings)
            row = {**key, "accuracy": accuracy, "seconds": round(time.monotonic() - began, 1)}
            row |= {"train_photos": data.count("train", order), "test_photos": data.count("test", order)}
            row |= {"classes": [data.classes[c] for c in order], "environment": environment(torch.device("cpu"))}
            content = {"rows": [*read_rows(given.json), row]}
            write_bytes(given.json, (json.dumps(content, indent=1) + "\n").encode())
            print(f"{approach}, seed {seed}: {accuracy[-1][0]:.1f} % of all classes after the last learn", flush=True)


def read_rows(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())["rows"]) if file.exists() else []


def fold(given: argparse.Namespace) -> None:
    """Training photos again divided into train/ and test/."""
    for name, files in list_photos(given.photos / "train").files.items():
        for i, file in enumerate(files):
            target = given.out / ("test" if i % 4 == given.number else "train") / name
            target.mkdir(parents=True, exist_ok=True)
            (target / file.name).symlink_to(file.resolve())


def final(rows: Sequence[dict[str, Any]], approach: str) -> dict[int, float]:
    """Accuracy on all classes after the last `learn`, by seed."""
    return {row["seed"]: row["accuracy"][-1][0] for row in rows if row["approach"] == approach}


def table(given: argparse.Namespace) -> None:
    """Markdown: accuracy after the last `learn` with its standard error from the number of test photos, its share of
    the bound, and how far the default is ahead for each order of the classes."""
    rows = read_rows(given.json)
    approaches = sorted({row["approach"] for row in rows}, key=lambda a: -statistics.mean(final(rows, a).values()))
    default, bound = final(rows, given.default), final(rows, "all-finetuned")
    print(f"| approach | keeps | all classes, % | of the bound | first | last | {given.default} ahead by | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for approach in approaches:
        own = [row for row in rows if row["approach"] == approach]
        values = final(rows, approach)
        paired = [default[seed] - value for seed, value in values.items() if seed in default]
        mean = statistics.mean(values.values())
        shares = [value / bound[seed] for seed, value in values.items() if seed in bound]
        ends = [(row["accuracy"][-1][1], row["accuracy"][-1][-1]) for row in own]
        first, last = (statistics.mean(column) for column in zip(*ends, strict=True))
        error = 100 * (mean / 100 * (1 - mean / 100) / own[0]["test_photos"]) ** 0.5
        kept = f"{own[0]['memory']} per class" if keeps(approach) == "remembered" else keeps(approach)
        share = f"{100 * statistics.mean(shares):.0f} %" if shares else ""
        cells = [approach, kept, f"{mean:.1f} ± {error:.1f}", share, f"{first:.1f}", f"{last:.1f}"]
        cells += ["" if approach == given.default else ", ".join(f"{value:+.1f}" for value in paired)]
        cells += ["" if approach in FROZEN else f"{statistics.mean(row['seconds'] for row in own):.0f}"]
        print(f"| {' | '.join(cells)} |")


def compare(given: argparse.Namespace) -> None:
    """Markdown: one column per file, accuracy after the last `learn`, mean of the orders, and in brackets the least
    lead of the default over the orders; empty if a file does not have the approach."""
    files = [read_rows(file) for file in given.json]
    means = [
        {row["approach"]: statistics.mean(final(rows, row["approach"]).values()) for row in rows} for rows in files
    ]
    order = {approach: -value for mean in reversed(means) for approach, value in mean.items()}
    common = sorted({approach for mean in means for approach in mean}, key=lambda approach: order[approach])
    print(f"| approach | keeps photos | {' | '.join(rows[0]['name'] for rows in files)} |")
    print("|---|---|" + "---|" * len(files))
    for approach in common:
        cells = [approach, keeps(approach).replace("remembered", f"{files[0][0]['memory']} per class")]
        for rows, mean in zip(files, means, strict=True):
            if approach not in mean:
                cells.append("")
                continue
            own, default = final(rows, approach), final(rows, given.default)
            lead = min((default[seed] - value for seed, value in own.items() if seed in default), default=0.0)
            error = 100 * (mean[approach] / 100 * (1 - mean[approach] / 100) / rows[0]["test_photos"]) ** 0.5
            cells += [f"{mean[approach]:.1f} ± {error:.1f}" + ("" if approach == given.default else f" ({lead:+.1f})")]
        print(f"| {' | '.join(cells)} |")


def draw(given: argparse.Namespace) -> None:
    """Accuracy on all classes so far after each `learn`, mean of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_rows(given.json)
    figure = Figure(figsize=(7.5, 4.6), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    final_mean = {row["approach"]: statistics.mean(final(rows, row["approach"]).values()) for row in rows}
    for number, approach in enumerate(sorted(final_mean, key=lambda a: -final_mean[a])):
        curves = [[after[0] for after in row["accuracy"]] for row in rows if row["approach"] == approach]
        mean = np.mean(curves, axis=0)
        sizes = np.cumsum(rows[0]["sizes"])[-len(mean) :]
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linestyle": ("-", "--", ":")[number // 10 % 3]}
        if approach in BOUNDS:
            style |= {"color": "0.4", "linestyle": ":", "marker": "*", "markersize": 9}
        width = 2.8 if approach == given.default else 1.2
        axes.plot(sizes, mean, label=f"{approach} ({mean[-1]:.1f})", linewidth=width, **style)
    axes.set_xlabel("classes learned so far")
    axes.set_ylabel("accuracy on all of them, %")
    axes.set_xticks(np.cumsum(rows[0]["sizes"]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    chosen = commands.add_parser("held-out")
    chosen.add_argument("photos", type=Path)
    chosen.add_argument("--backbone", default="lite0")
    chosen.add_argument("--side", type=int, default=None)
    chosen.add_argument("--cache", type=Path, default=Path("runs/features"))
    chosen.add_argument("--json", type=Path, default=None)
    chosen.set_defaults(run=held_out)
    part = commands.add_parser("fold")
    part.add_argument("photos", type=Path)
    part.add_argument("out", type=Path)
    part.add_argument("--number", type=int, choices=range(4), default=0)
    part.set_defaults(run=fold)
    one = commands.add_parser("measure")
    one.add_argument("photos", type=Path)
    one.add_argument("--name", default="photos", help="of the data, for the record")
    one.add_argument("--first", type=int, default=8, help="classes of the first learn")
    one.add_argument("--step", type=int, default=4, help="classes of every later one")
    one.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    one.add_argument("--approaches", nargs="+", default=list(FROZEN))
    one.add_argument("--memory", type=int, default=20)
    one.add_argument("--backbone", default="lite0")
    one.add_argument("--power", type=float, default=0.5)
    one.add_argument("--shrinkage", type=float, default=0.5)
    one.add_argument("--epochs", type=int, default=None, help="of approaches that train the network")
    one.add_argument("--base-epochs", type=int, default=None, help="of their first learn")
    one.add_argument("--lr", type=float, default=None, help="of approaches that train the network")
    one.add_argument("--side", type=int, default=None)
    one.add_argument("--device", default="auto")
    one.add_argument("--cache", type=Path, default=Path("runs/features"))
    one.add_argument("--json", type=Path, required=True)
    one.set_defaults(run=measure)
    for name, function in (("table", table), ("compare", compare), ("draw", draw)):
        other = commands.add_parser(name)
        other.add_argument("json", type=Path, nargs="+" if name == "compare" else None)
        if name == "draw":
            other.add_argument("out", type=Path)
        other.add_argument("--default", default="lda", help="the approach that the others are compared with")
        other.set_defaults(run=function)
    given = parser.parse_args(arguments)
    given.run(given)


if __name__ == "__main__":
    main()
