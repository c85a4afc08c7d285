"""`incvec sweep`: train many configurations, several at a time, with one record for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from incvec.addons import ADDONS
from incvec.cli.common import DataRoot, PluginFiles, SeedList, complete_sweeps, is_torchrun, load_plugins, option, say
from incvec.cluster.job import is_address
from incvec.config import RunConfig
from incvec.engine.sweep import Check, check_count, data_key, default_at_once, expand_blocks, read_check, read_runs
from incvec.errors import ConfigError, check_out, nearest
from incvec.methods import METHODS
from incvec.presets import changed_settings, check_names, resolve, run_name, sweeps
from incvec.presets.given import Given, parse_seeds
from incvec.presets.streams import check_stream, complete_stream
from incvec.study.runs import settings_text

if TYPE_CHECKING:
    import torch

    from incvec.cli.progress import RunStatus
    from incvec.data import Dataset
    from incvec.engine.run import Run

EXAMPLES = """[bold]Examples[/bold]

incvec sweep digits

incvec sweep digits --seeds 0,1,2

incvec sweep cifar100-podnet --data-root ~/data --at-once 4

incvec sweep my_sweep.yaml --set method.epochs=20 --set seed=1 --dry-run

incvec sweep cifar100-hosts --on ray --address 10.0.0.1:6379 --storage /shared/runs

incvec sweep cifar100-hosts --on slurm --partition gpu --nodes 4 --gpus-per-node 8 --dry-run

[bold]Sweep files[/bold]

A sweep is YAML with a list [italic]runs[/italic]. Every list of values in an entry is varied: \
[italic]runs: \\[{method: podnet, addons: \\[\\[], \\[ivt]], seed: \\[0, 1], ivt: {interval: \\[5, 10]}}][/italic] \
stands for six runs: the section of an add-on applies to the runs that have it."""

# Settings that do not change the experiment, but the name of the run's folder.
HANDLING = ("placement", "snapshots")
LABEL_WIDTH = 80  # characters of the column that describes a run, in the output of --dry-run

ON_HELP = "Where to train: on this machine, on a Ray cluster, or on Ray inside a Slurm job."
ADDRESS_HELP = "Ray cluster, such as 10.0.0.1:6379; auto: the one that `ray start` started on this machine."
STORAGE_HELP = (
    "Where the nodes keep the runs: a folder that all of them see, or an fsspec address such as s3://bucket/runs."
)
SOURCE_HELP = "fsspec address of a folder that nodes without --data-root copy there, such as s3://bucket/store."
SBATCH_HELP = "Further option of sbatch, such as --time=24:00:00. Repeat for several."

Plan = list[tuple[str, RunConfig]]  # the name of each run's folder, and its configuration


class Where(StrEnum):
    """Where a sweep is trained."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


on_cluster, on_slurm = partial(option, "Cluster"), partial(option, "Slurm")


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(sweep)


def sweep(
    name: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP",
            help="A packaged sweep (see `incvec list sweeps`), or a YAML file.",
            autocompletion=complete_sweeps,
        ),
    ],
    data_root: DataRoot = None,
    seeds: SeedList = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs' folders.")] = Path("runs"),
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Number of concurrent runs.", show_default="by the device's memory")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Train only runs whose folder's name contains this text.", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One setting for all runs that have it; method.KEY is an option of every run's method. Repeat for "
            "several.",
            show_default=False,
        ),
    ] = None,
    plugin: PluginFiles = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs without training them.")] = False,
    on: Annotated[Where, on_cluster(ON_HELP, default="local")] = Where.LOCAL,
    address: Annotated[
        str | None, on_cluster(ADDRESS_HELP, default="RAY_ADDRESS, or a cluster on this machine")
    ] = None,
    storage: Annotated[str | None, on_cluster(STORAGE_HELP, default="--out")] = None,
    per_gpu: Annotated[
        int | None, on_cluster("Concurrent runs of each worker.", min=1, default="by the device's memory")
    ] = None,
    workers: Annotated[int | None, on_cluster("Number of workers.", min=1, default="one for each GPU, or core")] = None,
    cores: Annotated[int, on_cluster("CPU cores of each worker, without GPUs.", min=1, default="1")] = 1,
    download: Annotated[bool, on_cluster("Download the data set on nodes that lack it.", "--download")] = False,
    data_source: Annotated[str | None, on_cluster(SOURCE_HELP)] = None,
    attach: Annotated[bool, on_cluster("Show the progress of a sweep that is running on Ray.", "--attach")] = False,
    stop: Annotated[bool, on_cluster("End a sweep that is running on Ray.", "--stop")] = False,
    partition: Annotated[str | None, on_slurm("Partition.")] = None,
    nodes: Annotated[int, on_slurm("Number of nodes.", min=1, default="1")] = 1,
    gpus_per_node: Annotated[int | None, on_slurm("GPUs of each node.", min=0)] = None,
    sbatch: Annotated[list[str] | None, on_slurm(SBATCH_HELP, metavar="OPTION")] = None,
) -> None:
    """Train many runs, several at once on a GPU. Base tasks that runs have in common are trained once.

    When the same command is given again, only unfinished runs are trained. If a run fails, the others continue; the
    exit code is then 1.
    """
    if is_torchrun():
        raise ConfigError("a sweep trains its runs in one process; use torchrun with a single `incvec run`.")
    check_out(out, "a sweep")
    load_plugins(plugin)
    given = {
        "--address": address,
        "--storage": storage,
        "--per-gpu": per_gpu,
        "--workers": workers,
        "--cores": cores > 1,
        "--download": download,
        "--data-source": data_source,
    }
    if on is Where.LOCAL and not attach and not stop and (unused := [key for key, value in given.items() if value]):
        raise ConfigError(f"{', '.join(unused)}: only with --on ray or --on slurm.")
    of_slurm = {
        "--partition": partition is not None,
        "--nodes": nodes > 1,
        "--gpus-per-node": gpus_per_node is not None,
        "--sbatch": bool(sbatch),
    }
    if on is not Where.SLURM and (unused := [key for key, value in of_slurm.items() if value]):
        raise ConfigError(f"{', '.join(unused)}: only with --on slurm.")
    if on is Where.SLURM and address is not None:
        raise ConfigError("--address: only with --on ray; a Slurm job starts its own cluster.")
    if attach and stop:
        raise ConfigError("--attach and --stop: give one of them.")
    if data_source is not None and data_root is None:
        raise ConfigError("--data-source needs --data-root, the folder of each node that it is copied to.")
    if (on is Where.LOCAL and not attach and not stop) or (dry_run and on is not Where.SLURM):
        folder = out if storage is None or is_address(storage) else Path(storage)
        failed = run_sweep(name, folder, data_root, settings or (), at_once, only, dry_run, seeds=seeds)
    else:
        from incvec.cli import cluster

        if at_once is not None:
            raise ConfigError("--at-once is for a sweep on this machine; on a cluster give --per-gpu.")
        options = cluster.Options(
            out,
            storage or str(out),
            address,
            per_gpu,
            workers,
            cores,
            data_root,
            download,
            data_source,
            tuple(plugin or ()),
        )
        if attach or stop:
            if not (address or os.environ.get("RAY_ADDRESS")):
                raise ConfigError("--attach and --stop need the cluster that the sweep is running on: give --address.")
            cluster.connect(options)
            if stop:
                cluster.stop(name, options)
                return
            failed = cluster.attach(name, options)
        else:
            planned, check = select_runs(name, settings or (), only, seeds, data_root)
            cluster.check_devices(dict(planned))
            if on is Where.SLURM:
                source = str(Path(name).resolve()) if Path(name).is_file() and name not in sweeps() else name
                arguments = [source, *(text for setting in settings or () for text in ("--set", setting))]
                arguments += [] if only is None else ["--only", only]
                arguments += [] if seeds is None else ["--seeds", seeds]
                job = cluster.SlurmJob(nodes, partition, gpus_per_node, tuple(sbatch or ()))
                cluster.submit(arguments, name, job, options, dry_run)
                return
            failed = cluster.train(name, planned, check, options)
    if failed:
        raise typer.Exit(1)


def run_sweep(
    sweep: str | Path | Sequence[Mapping[str, Any]],
    out: Path,
    data_root: Path | None = None,
    settings: Sequence[str] = (),
    at_once: int | None = None,
    only: str | None = None,
    dry_run: bool = False,
    console: Console | None = None,
    seeds: str | None = None,
) -> int:
    """Train the unfinished runs of a sweep; returns the number of runs that failed."""
    console = console or Console()
    planned, check = select_runs(sweep, settings, only, seeds, data_root)
    if dry_run:
        print_plan(planned, check, out, console)
        return 0
    title = sweep if isinstance(sweep, str) else "sweep"
    return report_failed(train_planned(planned, check, out, data_root, at_once, title, console), console)


def report_failed(runs: Sequence[RunStatus], console: Console) -> int:
    """Print why runs have failed, each reason once; returns their number."""
    reasons: dict[str, list[str]] = {}
    for run in runs:
        if run.state == "failed":
            reasons.setdefault(run.error, []).append(run.name)
    for error, names in reasons.items():
        others = f" and {len(names) - 1} other{'s' * (len(names) > 2)}" if len(names) > 1 else ""
        console.print(Text.assemble(("failed", "red"), f" {names[0]}{others}: {error}"), soft_wrap=True)
    return sum(map(len, reasons.values()))


def select_runs(
    sweep: str | Path | Sequence[Mapping[str, Any]],
    settings: Sequence[str] = (),
    only: str | None = None,
    seeds: str | None = None,
    data_root: Path | None = None,
) -> tuple[Plan, Check | None]:
    """The runs to train, the one that the sweep checks first; and the check."""
    complete = plan(sweep, settings, seeds, data_root)
    planned = [(folder, config) for folder, config in complete if only is None or only in folder]
    if not planned:
        raise ConfigError(f"no run of the sweep {sweep!r} has {only!r} in its name.")
    check = read_check(find_sweep(sweep)) if isinstance(sweep, str | Path) else None
    if check is not None:
        checked = checked_run(check, complete)
        planned = [checked, *(pair for pair in planned if pair != checked)]
    return planned, check


def train_planned(
    planned: Plan,
    check: Check | None,
    out: Path,
    data_root: Path | None,
    at_once: int | None,
    title: str,
    console: Console,
) -> list[RunStatus]:
    """Train the unfinished ones of the planned runs; returns the state of each."""
    from incvec.cli.progress import follow_sweep
    from incvec.engine.build import pick_device
    from incvec.engine.run import Run, finish
    from incvec.engine.scheduler import run_concurrently
    from incvec.engine.threads import single_thread_for_small_images

    device = pick_device(planned[0][1].device)
    data = load_data(planned, data_root, device)

    def maker(folder: str, config: RunConfig) -> Callable[[], Run]:
        return lambda: Run(config, data[data_key(config)], out / folder, out / "bases")

    if at_once is not None and at_once < 1:
        raise ConfigError(f"at_once is {at_once}: expected 1 or more concurrent runs.")
    count = at_once or default_at_once(device, [config for _, config in planned])
    title = f"{title}: {len(planned)} runs, {count} at once on {device}"
    with ExitStack() as threads:
        for dataset in data.values():
            threads.enter_context(single_thread_for_small_images(dataset))
        if check is not None:
            expected = f"{check.metric} {check.expected}, within {check.within}"
            say(f"check: {planned[0][0]} must have {expected}", console=console)
            check.judge(finish(maker(*planned[0])()))
        events = run_concurrently([maker(*pair) for pair in planned], count)
        return follow_sweep([folder for folder, _ in planned], events, title, console)


def find_sweep(name: str | Path) -> Path:
    """The file of a packaged sweep, or the user's own file."""
    packaged = sweeps()
    if isinstance(name, str) and name in packaged:
        return packaged[name]
    path = Path(name)
    if path.exists():
        return path
    raise ConfigError(
        f"{name!r} is neither a packaged sweep nor a file.{nearest(name, packaged)} Packaged sweeps: "
        f"{', '.join(packaged)}."
    )


def plan(
    sweep: str | Path | Sequence[Mapping[str, Any]],
    settings: Sequence[str] = (),
    seeds: str | None = None,
    data_root: Path | None = None,
) -> Plan:
    """Every run of a sweep, all settings validated; `method.KEY=VALUE` sets an option of the method of any run.

    With `seeds`, every run is planned once for each of them. With a data root, streams are cut to fit its classes.
    """
    planned: dict[str, RunConfig] = {}
    runs = read_runs(find_sweep(sweep)) if isinstance(sweep, str | Path) else expand_blocks(sweep, "the sweep")
    name = sweep if isinstance(sweep, str) else "given"
    for setting in settings:
        if runs and not any(applies(setting, given) for _, given in runs):
            raise ConfigError(f"--set {setting}: no run of the sweep {name!r} has that method or add-on.")
    chosen = [{}] if seeds is None else [{"seed": seed} for seed in parse_seeds(seeds)]
    check_count(len(runs) * len(chosen), f"the sweep {name!r} with --seeds")
    for location, given in runs:
        merged = Given()
        merged.update(given, location)
        for setting in settings:
            if applies(setting, given):
                merged.set_text(setting)
        try:
            tree = merged.tree()
            if data_root is not None:
                tree, _ = complete_stream(tree, data_root)
            configs = [resolve({**tree, **seed}) for seed in chosen]
            check_names(configs[0])
            check_stream(configs[0])
        except ConfigError as error:
            raise ConfigError(f"{location}: {error}") from None
        planned |= {run_name(config): config for config in configs}
    if not planned:
        raise ConfigError(f"the sweep {name!r} contains no runs.")
    return list(planned.items())


def applies(setting: str, given: Mapping[str, Any]) -> bool:
    """Whether a setting applies to a run. Options of a method or add-on apply to runs that have it."""
    section = setting.partition("=")[0].partition(".")[0].strip()
    return section not in {*METHODS, *ADDONS} - {given["method"], *given.get("addons", ())}


def checked_run(check: Check, planned: Plan) -> tuple[str, RunConfig]:
    """The first run that matches the settings of the sweep's check."""
    for folder, config in planned:
        if all(config.resolved().get(key) == value for key, value in check.of.items()):
            return folder, config
    raise ConfigError(f"no run of the sweep matches the settings of its check, {dict(check.of)}.")


def print_plan(planned: Plan, check: Check | None, out: Path, console: Console) -> None:
    """Print the settings that all runs have in common, then each run: its state, what differs, and its folder."""
    settings = [plan_settings(config) for _, config in planned]
    common = {key: value for key, value in settings[0].items() if all(s.get(key, ...) == value for s in settings)}
    say(f"{len(planned)} run(s) in {out}, all with {settings_text(common)}", console=console)
    if check is not None:
        say(f"check: {check.metric} of {planned[0][0]} is {check.expected}, within {check.within}", console=console)
    labels = []
    for (_, config), each in zip(planned, settings, strict=True):
        differing = settings_text({key: value for key, value in each.items() if key not in common})
        labels.append(", ".join(filter(None, ("+".join([config.method, *config.addons]), differing))))
    width = min(max(map(len, labels)), LABEL_WIDTH)
    for (folder, _), label in zip(planned, labels, strict=True):
        state = "finished" if (out / folder / "record.json").exists() else "to do"
        say(f"{state:8} {label:{width}}  {folder}", console=console)


def plan_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of a run that identify it among others: those of its name, and those that are not its presets'."""
    resolved = config.resolved()
    named = {key: resolved[key] for key in ("dataset", "tasks", "seed", "device", "engine")}
    oracle = {"oracle": True} if config.oracle else {}
    return named | oracle | changed_settings(resolved) | {key: resolved[key] for key in HANDLING if key in resolved}


def load_data(planned: Plan, data_root: Path | None, device: torch.device) -> dict[str, Dataset]:
    """Load each data set once, with one copy of its images on the device for all runs."""
    from incvec.engine.launch import load_on_device

    data: dict[str, Dataset] = {}
    for _, config in planned:
        if data_key(config) not in data:
            data[data_key(config)] = load_on_device(config, data_root, device)
    return data
