"""The studies of docs/successor.md: where the gap is, and the proxy's images, runs and table.

    python tools/successor_proxy.py images DATA_ROOT FOLDER    50 classes of CIFAR-100 as class folders
    incvec sweep successor-proxy --data-root FOLDER --out RUNS
    python tools/successor_proxy.py collect RUNS JSON          adds the records of the folder to the file
    python tools/successor_proxy.py classifier RUN DATA_ROOT JSON   adds classifiers of the last snapshot to the file
    python tools/successor_proxy.py table JSON                 the tables of the page

Of each class the first 200 training images become `train/`, the next 100 training images `test/`. No test image of
CIFAR-100 is used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from incvec.addons.carry import scaled_logits
from incvec.class_statistics import class_gaussians, draw
from incvec.data import load_dataset
from incvec.methods.common import ImageMethod
from incvec.presets import resolve
from incvec.records import find_records, read_record
from incvec.study.geometry.snapshots import last_task, load_snapshot, read_snapshot

CLASSES, TRAIN, TEST, SEED = 50, 200, 100, 28
KEPT = ("method", "addons", "oracle", "accuracy", "metrics", "correct")
Row = dict[str, Any]


def write_images(data_root: str, folder: str) -> None:
    data = load_dataset("cifar100", data_root)
    chosen = torch.randperm(data.n_classes, generator=torch.Generator().manual_seed(SEED))[:CLASSES].tolist()
    for label in chosen:
        rows = (data.train_labels == label).nonzero().flatten().tolist()
        for part, selected in (("train", rows[:TRAIN]), ("test", rows[TRAIN : TRAIN + TEST])):
            target = Path(folder) / part / data.class_names[label]
            target.mkdir(parents=True, exist_ok=True)
            for row in selected:
                Image.fromarray(data.train_images[row].permute(1, 2, 0).numpy()).save(target / f"{row:05d}.png")


# The runs -----------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, list[Row]]:
    return cast(dict[str, list[Row]], json.loads(path.read_text())) if path.exists() else {"runs": [], "classifier": []}


def write(path: Path, content: dict[str, list[Row]]) -> None:
    lines = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for name, rows in content.items()
    )
    path.write_text("{\n" + lines + "\n}\n")


def compact(record: Any) -> Row:
    """What the page needs of a record; of the classifiers only the last task's counts."""
    config, row = record["config"], {name: record[name] for name in KEPT if name in record}
    row["correct"] = {name: counts[-1] for name, counts in record["correct"].items()}
    row["metrics"] = {name: round(record["metrics"][name], 4) for name in ("AA", "LA", "FM")}
    row["accuracy"] = [[round(value, 2) for value in values] for values in record["accuracy"]]
    row["config"] = {name: config[name] for name in (record["method"], *record["addons"])} | {"seed": config["seed"]}
    environment = record["environment"]
    row["environment"] = {"commit": environment["commit"], "torch": environment["versions"]["torch"]}
    row["seconds"] = round(sum(stage["seconds"] for stage in record["losses"] if stage["task"] > 0), 1)
    return row


def collect(folder: str, target: str) -> None:
    """Add the folder's runs to the file. A run that it has already is replaced."""
    content = read(Path(target))
    runs = {json.dumps([row["addons"], row["oracle"], row["config"]]): row for row in content["runs"]}
    for path in find_records([Path(folder)]):
        row = compact(read_record(path))
        runs[json.dumps([row["addons"], row["oracle"], row["config"]])] = row
    content["runs"] = list(runs.values())
    write(Path(target), content)


# Where the gap is ---------------------------------------------------------------------------------------------


def classifier(run: str, root: str, target: str) -> None:
    """Accuracy (all, base, new classes) of the last snapshot: as delivered, and with classifiers of all past images."""
    number = last_task(run)
    config = resolve(read_snapshot(run, number)[1]["config"])
    snapshot = load_snapshot(run, number, load_dataset(config.dataset, root, **config.data_options()))
    method, world, test, task = (
        cast(ImageMethod, snapshot.method),
        snapshot.parts.world,
        snapshot.parts.test,
        snapshot.task,
    )
    generator = torch.Generator().manual_seed(0)
    rows, labels = method.rows_of(range(task.n_seen)), world.train.labels

    @torch.no_grad()
    def features_of(source: Any, rows: Tensor) -> Tensor:
        method.eval()
        return torch.cat(
            [method.model(source.fetch(part, None, ("test",)).images).features.cpu() for part in rows.split(500)]
        )

    def accuracies(features: Tensor, labels: Tensor) -> list[float]:
        correct = (scaled_logits(method, features).argmax(1) == labels).float()
        base = labels < world.tasks[0].last
        return [round(100 * float(part.mean()), 2) for part in (correct, correct[base], correct[~base])]

    def trained(sample: Callable[[Tensor], tuple[Tensor, Tensor]], steps: int = 3000) -> list[float]:
        start = {name: tensor.clone() for name, tensor in method.model.state_dict().items()}
        parameters = [p.requires_grad_() for p in method.model.head.blocks.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            classes = torch.randint(task.n_seen, (64,), generator=generator)
            features, targets = sample(classes)
            optimizer.zero_grad()
            F.cross_entropy(scaled_logits(method, features), targets).backward()
            optimizer.step()
            schedule.step()
        found = accuracies(test_features, test_targets)
        method.model.load_state_dict(start)
        return found

    features, targets = features_of(world.train, rows), labels[rows].cpu()
    test_rows = test.rows_of(0, task.n_seen)
    test_features, test_targets = features_of(test, test_rows), test.labels[test_rows].cpu()
    method.model.head.cpu()
    means, factors = class_gaussians(features, targets, range(task.n_seen), 1e-5)
    by_class = [(targets == c).nonzero().flatten() for c in range(task.n_seen)]

    def real(classes: Tensor) -> tuple[Tensor, Tensor]:
        picks = [by_class[c][torch.randint(len(by_class[c]), (1,), generator=generator)] for c in classes.tolist()]
        return features[torch.cat(picks)], classes

    def gaussian(classes: Tensor) -> tuple[Tensor, Tensor]:
        return draw(means, factors, classes, generator), classes

    content = read(Path(target))
    content["classifier"].append(
        {
            "run": " + ".join([snapshot.config.method, *snapshot.config.addons])
            + (" (oracle)" if snapshot.config.oracle else ""),
            "classes": task.n_seen,
            "seed": snapshot.config.seed,
            "as delivered": accuracies(test_features, test_targets),
            "trained on the features of all past images": trained(real),
            "trained on draws from the Gaussians of all past images": trained(gaussian),
        }
    )
    write(Path(target), content)


# The page -----------------------------------------------------------------------------------------------------


def settings(row: Row) -> str:
    """What an attempt is called: its add-ons with the settings that matter."""
    shown = {
        "ivt": ("fisher_loss",),
        "carry": ("drift",),
        "consolidate": ("tail", "share", "distil_epochs", "head_epochs", "drift"),
    }
    usual = {"whole", "map", 0}
    host = row["config"][row["method"]]
    texts = [f"memory={host['memory']}"] if row["method"] == "podnet" and host["memory"] != 10 else []
    texts += [f"lr={host['lr']}"] if row["method"] == "podnet" and host["lr"] != 0.1 else []
    for name in row["addons"]:
        section = row["config"][name]
        texts += [f"{key}={section[key]}" for key in shown[name] if key in section and section[key] not in usual]
    return ", ".join(texts)


def group(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        name = " + ".join([row["method"], *row["addons"]]) + (" (oracle)" if row["oracle"] else "")
        groups.setdefault((row["method"], name, settings(row)), []).append(row)
    return groups


def by_seed(rows: list[Row], **wanted: Any) -> dict[int, float]:
    return {
        row["config"]["seed"]: row["metrics"]["LA"]
        for row in rows
        if all(row[key] == value for key, value in wanted.items()) and not settings(row)
    }


def table(content: dict[str, list[Row]]) -> str:
    """One line per attempt, means over its seeds. The gain and the share of the gap are paired by seed."""
    lines = [
        "| run | settings | seeds | AA | LA | FM | base | new | gain in LA | of the gap | seconds |",
        "|---" * 11 + "|",
    ]
    runs = sorted(content["runs"], key=lambda row: (row["method"] != "podnet", row["method"]))
    for (method, name, text), rows in group(runs).items():
        host = by_seed(runs, method=method, addons=[], oracle=False)
        oracle = by_seed(runs, method=method, addons=[], oracle=True)
        seeds = sorted(row["config"]["seed"] for row in rows)
        cells = [fmean(row["metrics"][metric] for row in rows) for metric in ("AA", "LA", "FM")]
        last = [row["accuracy"][-1] for row in rows]
        cells += [fmean(values[0] for values in last), fmean(fmean(values[1:]) for values in last)]
        pairs = [(row["metrics"]["LA"] - host[seed], seed) for row in rows if (seed := row["config"]["seed"]) in host]
        plain = not rows[0]["addons"] and not text and not rows[0]["oracle"]
        gain = "" if plain or not pairs else f"{fmean(gain for gain, _ in pairs):+.2f}"
        shares = [100 * gain / (oracle[seed] - host[seed]) for gain, seed in pairs if seed in oracle]
        share = "" if plain or not shares or rows[0]["oracle"] else f"{fmean(shares):.0f} %"
        numbers = " | ".join(f"{cell:.2f}" for cell in cells)
        seconds = f"{fmean(row['seconds'] for row in rows):.0f}"
        lines.append(f"| {name} | {text} | {', '.join(map(str, seeds))} | {numbers} | {gain} | {share} | {seconds} |")
    return "\n".join(lines)


def classifier_table(content: dict[str, list[Row]]) -> str:
    lines = ["| model after the last task | classifier | all | base | new |", "|---|---|---|---|---|"]
    for row in content["classifier"]:
        for name, values in row.items():
            if isinstance(values, list):
                numbers = " | ".join(f"{value:.1f}" for value in values)
                classes = f", {row['classes']} classes" if "classes" in row else ""
                lines.append(f"| {row['run']}, seed {row['seed']}{classes} | {name} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "table":
        loaded = read(Path(arguments[0]))
        sys.stdout.write(classifier_table(loaded) + "\n\n" + table(loaded) + "\n")
    else:
        commands: dict[str, Callable[..., None]] = {
            "images": write_images,
            "collect": collect,
            "classifier": classifier,
        }
        commands[command](*arguments)
