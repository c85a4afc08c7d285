"""The lab from Python: `incvec.run` and `incvec.sweep`; `incvec.load_record` and `incvec.records` read the results.

    import incvec

    record = incvec.run(method="podnet", addons=["ivt"], dataset="digits", settings={"podnet.epochs": 2}, out="runs/a")
    record["metrics"]["LA"]
    incvec.sweep([{"method": "podnet", "addons": [[], ["ivt"]]}], seeds=[0, 1, 2])
    incvec.records("runs").frame()          # a pandas DataFrame

These functions use what the command line uses: the same settings, presets, folders and records, so that a run begun
with one can be continued with the other. Errors that a user can fix are subclasses of `incvec.errors.IncvecError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from incvec.errors import ConfigError, TrainingError, check_out
from incvec.presets import run_name
from incvec.presets.given import Given
from incvec.presets.streams import resolve_seeds
from incvec.records import Records, read_record
from incvec.study.runs import settings_text

PathArgument = str | PathLike[str]
RUNS = Path("runs")


def run(
    method: str,
    addons: Sequence[str] = (),
    dataset: str = "digits",
    *,
    settings: Mapping[str, Any] | None = None,
    out: PathArgument | None = None,
    data_root: PathArgument | None = None,
    download: bool = False,
    share: bool | PathArgument = True,
    progress: bool = False,
    log: str | Sequence[str] = (),
    **fields: Any,
) -> dict[str, Any]:
    """Train one configuration, resume it, or return its record if it is finished.

    Args:
        method: Its name, as in `incvec list methods`.
        addons: Names of add-ons, applied in this order.
        dataset: Its name, as in `incvec list datasets`.
        settings: Any setting by its dotted name, `{"podnet.epochs": 2, "ivt.interval": 5}`, or nested. `method.KEY` is
            an option of the method.
        out: Folder of the run; by default `runs/NAME`, with the name that the command line gives it.
        data_root: Folder with the data set's files.
        download: Download the data set if it is missing.
        share: Whether runs share their trained base task, in the folder `bases` beside `out`; or another folder.
        progress: Display progress as the command line does. Otherwise warnings are Python warnings.
        log: `"csv"`, `"tensorboard"`, `"wandb"`, or several of them.
        fields: Settings of the run itself, such as `seed=1`, `tasks=5`, `base_classes=50`, `oracle=True`,
            `variant="authors"`, `device="cpu"`.

    Returns:
        The record: a mapping with `metrics`, `accuracy`, `config` and more, also written to `out/record.json`.
    """
    given = Given()
    given.update({"method": method, "addons": addons, "dataset": dataset}, "argument")
    given.update(fields, "argument")
    given.update(settings or {}, "settings")
    root = None if data_root is None else Path(data_root).expanduser()
    (config,), _ = resolve_seeds(given.tree(), None, root)
    folder = Path(out).expanduser() if out is not None else RUNS / run_name(config)
    check_out(folder, "a run", "out=")
    shared = folder.parent / "bases" if isinstance(share, bool) else Path(share).expanduser()
    bases = None if share is False else shared

    from incvec.cli.logs import Log, logged
    from incvec.cli.progress import follow
    from incvec.engine.launch import launch, read_finished
    from incvec.engine.run import drain

    logs = [log] if isinstance(log, str) else log
    for name in logs:
        if name not in list(Log):
            raise ConfigError(f"log {name!r} is not possible: expected {', '.join(Log)}, or several of them.")
    finished = read_finished(config, folder, root)
    if finished is not None:
        return finished
    consume = logged(follow if progress else drain, [Log(name) for name in logs], folder, config)
    record, _ = launch(config, folder, bases, root, download, consume)
    return record


def sweep(
    runs: PathArgument | Sequence[Mapping[str, Any]],
    *,
    settings: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    out: PathArgument = RUNS,
    data_root: PathArgument | None = None,
    at_once: int | None = None,
    only: str | None = None,
    progress: bool = False,
) -> Records:
    """Train many configurations, several at once on a GPU; base tasks that they have in common are trained once.

    Args:
        runs: The name of a packaged sweep, a sweep file, or the blocks that such a file has under `runs`: mappings of
            settings in which lists are varied.
        settings: Settings of all runs that have them, by their dotted names.
        seeds: Train every run once with each of these seeds.
        out: Folder for the runs' folders.
        data_root: Folder with the data set's files.
        at_once: Number of concurrent runs; by default as many as the device's memory allows.
        only: Train only runs whose name contains this text.
        progress: Display progress as the command line does.

    Returns:
        The records of all runs, in the order of the sweep.

    Raises:
        TrainingError: If runs failed. The others are finished; `incvec.records(out)` has their records.
    """
    from rich.console import Console

    from incvec.cli.sweep import select_runs, train_planned

    given = [settings_text({key: value}) for key, value in (settings or {}).items()]
    folder = Path(out).expanduser()
    check_out(folder, "a sweep", "out=")
    root = None if data_root is None else Path(data_root).expanduser()
    source = runs if isinstance(runs, str) or not isinstance(runs, PathLike) else Path(runs)
    chosen = None if seeds is None else ",".join(map(str, seeds))
    planned, check = select_runs(source, given, only, chosen, root)
    title = runs if isinstance(runs, str) else "sweep"
    states = train_planned(planned, check, folder, root, at_once, title, Console(quiet=not progress))
    failed = [f"{state.name}: {state.error}" for state in states if state.state == "failed"]
    if failed:
        raise TrainingError(f"{len(failed)} of {len(states)} runs failed: " + "; ".join(failed))
    paths = [folder / name / "record.json" for name, _ in planned]
    return Records((read_record(path) for path in paths), paths)
