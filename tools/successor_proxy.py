"""The proxy study of docs/successor.md and docs/log/fisher.md: its images, its runs, and the tables of the pages.

    python tools/successor_proxy.py images DATA_ROOT FOLDER    50 classes of CIFAR-100 as class folders
    python tools/successor_proxy.py other-images DATA_ROOT FOLDER    the other 50
    incvec sweep successor-proxy --data-root FOLDER --out RUNS
    incvec sweep proxy-10 --data-root FOLDER --out RUNS
    python tools/successor_proxy.py collect RUNS JSON          adds the records of the folder to the file
    python tools/successor_proxy.py scales RUNS JSON           S of every weight, from the snapshots of runs with IVT
    python tools/successor_proxy.py tables RESULTS             the tables of the page, from the folder `results`

Of each class the first 200 training images become `train/`, the next 100 training images `test/`. No test image of
CIFAR-100 is used. `successor_classifier.py` makes the analyses with frozen features.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import torch
from PIL import Image

from incvec import scale
from incvec.addons.carry import STAGE
from incvec.atomic_files import read_tensors
from incvec.data import load_dataset
from incvec.records import find_records, read_record

CLASSES, TRAIN, TEST, SEED = 50, 200, 100, 28
METHODS = ["podnet", "mrfa", "pass", "fcs", "icarl", "finetune"]  # in tables
KEPT = ("method", "addons", "oracle", "tasks", "accuracy", "metrics", "correct")
Row = dict[str, Any]


def write_images(data_root: str, folder: str, first: int = 0) -> None:
    data = load_dataset("cifar100", data_root)
    shuffled = torch.randperm(data.n_classes, generator=torch.Generator().manual_seed(SEED)).tolist()
    for label in shuffled[first : first + CLASSES]:
        rows = (data.train_labels == label).nonzero().flatten().tolist()
        for part, selected in (("train", rows[:TRAIN]), ("test", rows[TRAIN : TRAIN + TEST])):
            target = Path(folder) / part / data.class_names[label]
            target.mkdir(parents=True, exist_ok=True)
            for row in selected:
                Image.fromarray(data.train_images[row].permute(1, 2, 0).numpy()).save(target / f"{row:05d}.png")


# The runs -----------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    return cast(list[Row], json.loads(path.read_text())["runs"]) if path.exists() else []


def write(path: Path, runs: Iterable[Row]) -> None:
    path.write_text('{\n"runs": [\n' + ",\n".join(json.dumps(row) for row in runs) + "\n]\n}\n")


def compact(record: Any) -> Row:
    """What the page needs of a record; of the classifiers only the last task's counts."""
    config, row = record["config"], {name: record[name] for name in KEPT if name in record}
    row["correct"] = {name: counts[-1] for name, counts in record["correct"].items()}
    row["metrics"] = {name: round(record["metrics"][name], 4) for name in ("AA", "LA", "FM")}
    row["accuracy"] = [[round(value, 2) for value in values] for values in record["accuracy"]]
    row["config"] = {name: config[name] for name in (record["method"], *record["addons"])} | {"seed": config["seed"]}
    environment = record["environment"]
    row["environment"] = {"commit": environment["commit"], "torch": environment["versions"]["torch"]}
    row["seconds"] = seconds(record)
    if "last_batch" in config:  # not the default
        row["last_batch"] = config["last_batch"]
    return row


def seconds(record: Any) -> dict[str, float]:
    """Of the increments: the host's own stages, the stage of `carry`, and everything."""
    stages = [(row["stage"] == STAGE, row["seconds"]) for row in record["losses"] if row["task"] > 0]
    return {
        "host": round(sum(time for own, time in stages if not own), 1),
        "carry": round(sum(time for own, time in stages if own), 1),
        "all": round(sum(record["task_seconds"][1:]), 1),
    }


def key(row: Row) -> str:
    return json.dumps([row["addons"], row["oracle"], row["tasks"], row["config"], row.get("last_batch")])


def collect(folder: str, target: str) -> None:
    """Add the folder's runs to the file. A run that it has already is replaced."""
    runs = {key(row): row for row in read(Path(target))}
    for path in find_records([Path(folder)]):
        row = compact(read_record(path))
        runs[key(row)] = row
    write(Path(target), sorted(runs.values(), key=order))


def order(row: Row) -> tuple[int, int, bool, int, int]:
    return METHODS.index(row["method"]), row["tasks"], row["oracle"], len(row["addons"]), seed_of(row)


# The page -----------------------------------------------------------------------------------------------------


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, *rows]).replace(
        "\n", "\n" + "|---" * len(heads) + "|\n", 1
    )


def spread(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return float(stdev(values) / len(values) ** 0.5)


def signed(values: Sequence[float], digits: int = 2) -> str:
    """The mean and its standard error."""
    text = f"{round(fmean(values), digits) + 0:+.{digits}f}"  # no -0
    return f"{text} ± {spread(values):.{digits}f}" if len(values) > 1 else text


def name_of(row: Row) -> str:
    return " + ".join([row["method"], *row["addons"]]) + (" (oracle)" if row["oracle"] else "")


def settings(row: Row) -> str:
    """What an attempt is called: its add-ons with the settings that matter."""
    shown: dict[str, dict[str, Any]] = {
        "ivt": {"fisher_loss": "whole"},
        "carry": {"drift": "map"},
        "consolidate": {"tail": 0, "share": None, "distil_epochs": 0, "head_epochs": 0, "drift": "map"},
        "podnet": {"memory": 10, "lr": 0.1},
        "mrfa": {"memory": 10},
    }
    sections = [(name, row["config"][name]) for name in (row["method"], *row["addons"])]
    return ", ".join(
        f"{key}={section[key]}"
        for name, section in sections
        for key, usual in shown.get(name, {}).items()
        if key in section and section[key] != usual
    )


def seed_of(row: Row) -> int:
    return cast(int, row["config"]["seed"])


def over_classes(rows: Sequence[Row], hosts: dict[int, Row]) -> str:
    """The standard error of the gain over the classes, each averaged over the seeds."""

    def counts(row: Row) -> list[int]:
        return cast(list[int], row["correct"][reported(row)])

    gains = [[a - b for a, b in zip(counts(row), counts(hosts[seed_of(row)]), strict=True)] for row in rows]
    return f"{spread([fmean(values) for values in zip(*gains, strict=True)]):.2f}"


def reported(row: Row) -> str:
    """The classifier of a run's accuracy: the first of the record."""
    return str(next(iter(row["correct"])))


def runs_table(runs: Sequence[Row], references: Sequence[Row]) -> str:
    """One line per group of seeds. Gains and shares of the gap are paired with the references of the same seed."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in runs:
        groups.setdefault((row["method"], row["tasks"], name_of(row), settings(row)), []).append(row)
    lines = []
    for (method, tasks, name, text), rows in groups.items():
        plain = {
            oracle: {
                seed_of(row): row
                for row in references
                if (row["method"], row["tasks"], row["oracle"], row["addons"], settings(row))
                == (method, tasks, oracle, [], "")
            }
            for oracle in (False, True)
        }
        hosts, oracles = plain[False], plain[True]
        paired = [row for row in rows if seed_of(row) in hosts]
        itself = all(row is hosts.get(seed_of(row)) for row in rows)
        gains = [row["metrics"]["LA"] - hosts[seed_of(row)]["metrics"]["LA"] for row in paired]
        shares = [
            100 * gain / (oracles[seed]["metrics"]["LA"] - hosts[seed]["metrics"]["LA"])
            for gain, row in zip(gains, paired, strict=True)
            if (seed := seed_of(row)) in oracles
        ]
        metrics = [fmean(row["metrics"][metric] for row in rows) for metric in ("AA", "LA", "FM")]
        last = [row["accuracy"][-1] for row in rows]
        metrics += [fmean(values[0] for values in last), fmean(fmean(values[1:]) for values in last)]
        lines.append(
            [
                name,
                text,
                ", ".join(str(seed) for seed in sorted(map(seed_of, rows))),
                *(f"{value:.2f}" for value in metrics),
                "" if itself or not gains else signed(gains),
                "" if itself or not gains else over_classes(paired, hosts),
                "" if itself or not shares or rows[0]["oracle"] else signed(shares, 0).lstrip("+") + " %",
                ", ".join(sorted({short(row["environment"]["commit"]) for row in rows})),
            ]
        )
    heads = ["run", "settings", "seeds", "AA", "LA", "FM", "base", "new", "gain in LA"]
    return markdown([*heads, "± over classes", "of the gap", "commit"], lines)


def short(commit: str) -> str:
    return commit[:7] + "*" * commit.endswith("-dirty")


def two_classifiers_table(runs: Sequence[Row]) -> str:
    """LA by the classifier that is trained and by the nearest class mean. The first of a record is reported."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in runs:
        groups.setdefault((name_of(row), settings(row)), []).append(row)
    lines = []
    for (name, text), rows in groups.items():
        trained, nearest = (
            fmean(100 * sum(row["correct"][kind]) / (TEST * CLASSES) for row in rows) for kind in ("cnn", "nme")
        )
        first = {"cnn": "trained", "nme": "nearest mean"}[reported(rows[0])]
        lines.append([name, text, f"{trained:.2f}", f"{nearest:.2f}", first])
    return markdown(["run", "settings", "trained classifier", "nearest mean", "reported"], lines)


def differences(rows: Sequence[Row], others: Sequence[Row]) -> list[str]:
    """AA, LA and FM of the rows minus those of the others, paired by seed; and the seeds."""
    reference = {seed_of(row): row for row in others}
    paired = [(row, reference[seed_of(row)]) for row in rows if seed_of(row) in reference]
    cells = [
        signed([row["metrics"][metric] - other["metrics"][metric] for row, other in paired])
        for metric in ("AA", "LA", "FM")
    ]
    return [", ".join(str(seed_of(row)) for row, _ in paired), *cells]


def fisher_table(runs: Sequence[Row]) -> str:
    """What IVT adds to each host with F of the whole loss, of the task's own, with F = 1, and with F permuted."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in runs:
        if not row["oracle"] and "carry" not in row["addons"] and not variant_of(row):
            kind = row["config"]["ivt"]["fisher_loss"] if row["addons"] == ["ivt"] else "".join(row["addons"])
            kinds.setdefault((row["method"], kind), []).append(row)
    names = {
        "whole": "whole loss",
        "own": "own loss",
        "ivt-shuffled": "permuted within tensors",
        "ivt-uniform": "F = 1",
        "ivt-constant": "S = 2/3",
        "ivt-normalized": "scaled to the mean of the past F",
    }
    lines = []
    for method in dict.fromkeys(method for method, _ in kinds):
        host = kinds[method, ""]
        for kind, name in names.items():
            if rows := kinds.get((method, kind)):
                seeds, *gains = differences(rows, host)
                against = [""] * 3 if kind == "whole" else differences(rows, kinds[method, "whole"])[1:]
                lines.append([method, name, seeds, *gains, *against])
    heads = ["host", "F", "seeds", "gain in AA", "in LA", "in FM"]
    return markdown([*heads, "to the whole loss: AA", "LA", "FM"], lines)


def carried(row: Row) -> bool:
    """Whether a run over ten increments is one of the comparison with `carry`."""
    hosts = ("podnet", "mrfa", "pass")
    plain = row["method"] in hosts and not variant_of(row) and set(row["addons"]) <= {"ivt", "carry"}
    return plain and row["config"].get("ivt", {}).get("fisher_loss") != "own"


AUDITED: dict[str, dict[str, Any]] = {
    "podnet": {"jitters": "one"},
    "pass": {"draws": "batch"},
    "fcs": {"mixups": 4},
    "finetune": {"backbone_rate": 1.0},
    "icarl": {"loss": "softmax", "memory_total": None},
    "mrfa": {},
}


def variant_of(row: Row) -> str:
    """The setting of a variant that follows published code, or ""."""
    own = row["config"][row["method"]]
    changed = [f"{key}={own[key]}" for key, usual in AUDITED[row["method"]].items() if own[key] != usual]
    if "cofima" in row["addons"] and row["config"]["cofima"]["buffers"] != "average":
        changed.append(f"cofima.buffers={row['config']['cofima']['buffers']}")
    return ", ".join(changed + ["last_batch=keep"] * (row.get("last_batch") == "keep"))


def audit_table(runs: Sequence[Row]) -> str:
    """Variants that follow published code, against our settings."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in runs:
        own = row["config"].get("ivt", {}).get("fisher_loss") == "own"
        if set(row["addons"]) <= {"ivt", "cofima"} and not own and not row["oracle"]:
            groups.setdefault((name_of(row), variant_of(row)), []).append(row)
    lines = []
    for name in dict.fromkeys(name for name, _ in groups):
        variants = sorted(variant for other, variant in groups if other == name)  # "" first: our settings
        for variant in variants if len(variants) > 1 else []:
            rows = groups[name, variant]
            means = [f"{fmean(row['metrics'][metric] for row in rows):.2f}" for metric in ("AA", "LA", "FM")]
            base = [f"{fmean(row['accuracy'][-1][0] for row in rows):.2f}"]
            changes = differences(rows, groups[name, ""])[1:] if variant else [""] * 3
            seeds = ", ".join(str(seed_of(row)) for row in rows)
            lines.append([name, variant, seeds, *means, *base, *changes])
    heads = ["run", "variant", "seeds", "AA", "LA", "FM", "base classes", "change in AA", "in LA", "in FM"]
    return markdown(heads, lines)


TASKS = (2, 3, 4, 6, 11, 26)  # of the tables of S


def spread_of_scales(folder: Path) -> dict[str, dict[str, float]]:
    """Mean, standard deviation and two quantiles of S over the backbone's weights, by task, from a run's snapshots."""
    summed: list[dict[str, torch.Tensor]] = []
    for path in sorted((folder / "snapshots").glob("*.safetensors")):
        tensors, prefix = read_tensors(path)[0], "addon/ivt/cumulative/"
        summed.append({key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)})
    found = {}
    for task in TASKS:
        if task <= len(summed):
            before, after = summed[task - 2 : task]
            names = [name for name in before if name.startswith("backbone")]
            scales = torch.cat([scale(before[name], after[name] - before[name]).flatten() for name in names])
            low, high = torch.quantile(scales, torch.tensor([0.05, 0.95])).tolist()
            values = {"mean": scales.mean().item(), "std": scales.std().item(), "low": low, "high": high}
            found[str(task)] = {name: round(value, 3) for name, value in values.items()}
    return found


def scales(folder: str, target: str) -> None:
    rows: list[Row] = []
    for path in find_records([Path(folder)]):
        row = compact(read_record(path))
        if row["addons"] == ["ivt"] and seed_of(row) == 0 and not variant_of(row):
            kept = {key: row[key] for key in ("method", "environment")} | {
                "fisher": row["config"]["ivt"]["fisher_loss"]
            }
            rows.append(kept | {"scales": spread_of_scales(path.parent)})
    write(Path(target), sorted(rows, key=lambda row: (METHODS.index(row["method"]), row["fisher"] == "own")))


def scales_table(rows: Sequence[Row]) -> str:
    tasks = [task for task in TASKS if any(str(task) in row["scales"] for row in rows)]
    lines = [
        [row["method"], row["fisher"], *(scale_cell(row["scales"].get(str(task))) for task in tasks)] for row in rows
    ]
    lines.append(["F = 1", "", *(f"{task / (2 * task - 1):.2f}" for task in tasks)])
    return markdown(["host", "Fisher of the loss", *(f"task {task}" for task in tasks)], lines)


def scale_cell(values: dict[str, float] | None) -> str:
    return f"{values['mean']:.2f} ({values['low']:.2f} to {values['high']:.2f})" if values else ""


def layers_table(folder: Path) -> str:
    """Of the CIFAR-100 records: mean S of the backbone's weights, and the range of the means of its parts."""
    lines = []
    for name, title in (("podnet", "PODNet"), ("mrfa", "MRFA"), ("pass", "PASS")):
        statistics = read_record(folder / f"{name}+ivt-25-s0.json")["statistics"]
        cells = []
        for task in TASKS:
            parts = [v["scale"] for key, v in statistics[task - 1]["ivt"].items() if key.startswith("backbone")]
            cells.append(f"{min(parts):.2f} to {max(parts):.2f}")
        lines.append([title, *cells])
    lines.append(["F = 1", *(f"{task / (2 * task - 1):.2f}" for task in TASKS)])
    return markdown(["host", *(f"task {task}" for task in TASKS)], lines)


def cost_table(runs: Iterable[tuple[str, str, dict[str, float]]]) -> str:
    """Of runs with `carry`: the time of its stage, and of all but the host's stages, against the host's stages."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for device, name, times in runs:
        groups.setdefault((device, name), []).append(times)
    lines = []
    for (device, name), rows in groups.items():
        own, rest = (
            ", ".join(f"{100 * time / host:.0f} %" for time, host in pairs)
            for pairs in ([(t["carry"], t["host"]) for t in rows], [(t["all"] - t["host"], t["host"]) for t in rows])
        )
        lines.append([device, name, own, rest])
    return markdown(["device", "run", "its stage", "all but the host's stages"], lines)


def costs(results: Path, proxy: Sequence[Row]) -> str:
    runs = [("CPU, proxy", name_of(row), row["seconds"]) for row in proxy if "carry" in row["addons"]]
    for name in ("podnet+carry", "podnet+ivt+carry"):
        record = json.loads((results / "successor" / "held-out" / f"{name}-5-s0.json").read_text())
        runs.append(("H200, CIFAR-100", name.replace("+", " + "), seconds(record)))
    return cost_table(run for run in runs if "oracle" not in run[1])


def classifier_table(rows: Sequence[Row]) -> str:
    lines = [
        [f"{row['run']}, seed {row['seed']}, {row['classes']} classes", name, *(f"{value:.1f}" for value in values)]
        for row in rows
        for name, values in row.items()
        if isinstance(values, list)
    ]
    return markdown(["model after the last task", "classifier", "all", "base", "new"], lines)


def ablation_table(rows: Sequence[Row]) -> str:
    """Means over the seeds of each run, side by side; the difference to the map of `carry` is paired."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    lines = []
    for name in rows[0]["rows"]:
        cells = [name]
        for number, run in enumerate(runs):
            own = [row["rows"] for row in rows if row["run"] == run]
            variants = [each[name] for each in own]
            cells += [
                f"{fmean(v[kind] for v in variants):.2f}" if kind in variants[0] else ""
                for kind in ("mean", "covariance")
            ]
            parts = range(1 if number else 3)
            cells += [f"{fmean(v['accuracy'][part] for v in variants):.2f}" for part in parts]
            against = [v["accuracy"][0] - each["map"]["accuracy"][0] for v, each in zip(variants, own, strict=True)]
            cells.append("" if name == "map" else signed(against))
        lines.append(cells)
    heads = ["statistics or images", "error of means", "of covariances", "all", "base", "new", "to `map`"]
    for run in runs[1:]:
        heads += [f"{run}: error of means", "of covariances", "all", "to `map`"]
    return markdown(heads, lines)


def held_out_table(folder: Path) -> str:
    lines = []
    for name in ("podnet", "podnet+ivt", "podnet+carry", "podnet+ivt+carry"):
        record = json.loads((folder / f"{name}-5-s0.json").read_text())
        metrics, last = record["metrics"], record["accuracy"][-1]
        cells = [f"{metrics[metric]:.2f}" for metric in ("AA", "LA", "FM")]
        lines.append([name.replace("+", " + "), *cells, f"{last[0]:.1f}", f"{fmean(last[1:]):.1f}"])
    return markdown(["run", "AA", "LA", "FM", "base classes", "new classes"], lines)


def gap_table(folder: Path) -> str:
    """LA of the reported runs by the trained classifier and by the nearest mean, means of three seeds."""
    lines = []
    for name, title in (("podnet", "PODNet"), ("podnet+ivt", "PODNet + IVT"), ("podnet-oracle", "oracle")):
        records = [json.loads((folder / f"{name}-5-s{seed}.json").read_text()) for seed in range(3)]
        trained, nearest = (
            fmean(sum(record["correct"][kind][-1]) / 100 for record in records) for kind in ("cnn", "nme")
        )
        lines.append([title, f"{trained:.2f}", f"{nearest:.2f}", f"{trained - nearest:.2f}"])
    return markdown(["run", "trained classifier", "nearest mean", "difference"], lines)


def tables(results: Path) -> dict[str, str]:
    folder = results / "successor"
    proxy, other = (read(folder / f"{name}.json") for name in ("proxy", "confirmation"))
    ten = read(folder / "ten-increments.json")
    compared = [row for row in ten if carried(row)]
    return {
        "held out": held_out_table(folder / "held-out"),
        "gap": gap_table(results / "cifar100"),
        "classifiers": classifier_table(json.loads((folder / "classifiers.json").read_text())["last"]),
        "proxy": runs_table(proxy, proxy),
        "confirmation": runs_table(other, other),
        "ablation": ablation_table(json.loads((folder / "ablation.json").read_text())["ablation"]),
        "both classifiers": two_classifiers_table(proxy),
        "cost": costs(results, proxy),
        "attempts": runs_table(read(folder / "attempts.json"), proxy),
        "ten increments": runs_table(compared, compared),
        "Fisher": fisher_table(ten),
        "scales": scales_table(read(folder / "scales.json")),
        "layers": layers_table(results / "cifar100"),
        "audit": audit_table(ten),
    }


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "tables":
        for title, table in tables(Path(arguments[0])).items():
            sys.stdout.write(f"{title}\n\n{table}\n\n")
    else:
        other_images = partial(write_images, first=CLASSES)
        commands: dict[str, Callable[..., None]] = {
            "images": write_images, "other-images": other_images, "collect": collect, "scales": scales
        }  # fmt: skip
        commands[command](*arguments)
