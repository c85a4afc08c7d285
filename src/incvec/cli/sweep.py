"""`incvec sweep`: shows many runs at once, and leaves a record for each."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from incvec.addons import ADDONS
from incvec.cli.demo import steady_threads
from incvec.config import RunConfig, assign
from incvec.data import Dataset, load_dataset
from incvec.engine import events as ev
from incvec.engine.build import check_names, pick_device
from incvec.engine.device_errors import translate_device_errors
from incvec.engine.run import Run, finish
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.engine.sweep import Check, default_at_once, read_check, read_runs
from incvec.errors import Busy, ConfigError, IncvecError, nearest
from incvec.methods import METHODS
from incvec.presets import changed_settings, resolve, run_name, sweeps
from incvec.study.compare import yaml_value
from incvec.study.tables import duration

QUIET = 10.0  # seconds between two accounts where there is no terminal
HANDLING = ("placement", "snapshots")  # they make a run no other experiment, but its folder has another name


def find_sweep(name: str) -> Path:
    """A packaged sweep of that name, or a file of the user's."""
    known = sweeps()
    if name in known:
        return known[name]
    path = Path(name)
    if path.exists():
        return path
    raise ConfigError(f"{name!r} is neither a sweep nor a file.{nearest(name, known)} Sweeps: {', '.join(known)}.")


def applies(setting: str, given: Mapping[str, Any]) -> bool:
    """Whether a setting is for this run: one of a method's or add-on's is for the runs that have it."""
    section = setting.partition("=")[0].partition(".")[0].strip()
    return section not in {*METHODS, *ADDONS} - {given["method"], *given.get("addons", ())}


def plan(name: str, settings: Sequence[str]) -> list[tuple[str, RunConfig]]:
    """Every run of the sweep with its folder's name; all settings are checked before anything starts.

    `method.KEY=VALUE` sets the option of whatever method a run has.
    """
    found: dict[str, RunConfig] = {}
    runs = read_runs(find_sweep(name))
    for setting in settings:
        if runs and not any(applies(setting, given) for _, given in runs):
            raise ConfigError(f"--set {setting}: no run of the sweep {name!r} has that method or add-on.")
    for where, given in runs:
        tree: dict[str, Any] = copy.deepcopy(dict(given))
        for setting in settings:
            if applies(setting, given):
                own = setting.startswith("method.")
                assign(tree, f"{given['method']}.{setting.removeprefix('method.')}" if own else setting)
        try:
            config = resolve(tree)
            check_names(config)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        found[run_name(config)] = config
    if not found:
        raise ConfigError(f"the sweep {name!r} holds no runs.")
    return list(found.items())


def first_of(check: Check, planned: Sequence[tuple[str, RunConfig]]) -> tuple[str, RunConfig]:
    """The run to be checked."""
    for folder, config in planned:
        if all(config.resolved().get(key) == value for key, value in check.of.items()):
            return folder, config
    raise ConfigError(f"no run of the sweep fits its check, {dict(check.of)}.")


@dataclass
class Row:
    """What is shown of one run."""

    name: str
    state: str = "waiting"
    where: str = ""
    fraction: float = 0.0
    left: float | None = None
    accuracy: str = ""
    error: str = ""

    def hear(self, event: ev.Event) -> None:
        if isinstance(event, ev.Started):
            self.state = "going on" if event.resumed else "training"
        elif isinstance(event, ev.Tick) and event.blocked:
            self.state = "waits for its base"
        elif isinstance(event, ev.EpochEnded):
            self.state = "training"
            self.where = f"task {event.task + 1} {event.stage} {event.epoch}/{event.epochs}"
            self.fraction, self.left = event.fraction, event.seconds_left
        elif isinstance(event, ev.TaskEnded):
            self.accuracy = f"{event.accuracy:.2f}"
        elif isinstance(event, ev.Notice):
            self.where = event.text[:60]
        elif isinstance(event, Failed) and isinstance(event.error, Busy):
            self.state = "elsewhere"  # another process does it: several may share a sweep
        elif isinstance(event, Failed):
            self.state = "failed"
            self.error = f"{type(event.error).__name__}: {event.error}"
        elif isinstance(event, ev.Finished):
            self.state, self.fraction, self.left, self.where = "done", 1.0, None, ""
            metrics = event.record["metrics"]
            forgetting = "" if metrics["FM"] is None else f"  FM {metrics['FM']:.2f}"
            self.accuracy = f"AA {metrics['AA']:.2f}  LA {metrics['LA']:.2f}{forgetting}"


def say(console: Console, text: str) -> None:
    """A line as it is: names and errors may hold brackets, which are no markup."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def table(rows: Sequence[Row], title: str) -> Table:
    shown = Table(title=Text(title), title_justify="left")
    for column in ("run", "state", "where", "done", "left", "accuracy"):
        shown.add_column(column, overflow="fold")  # names that differ in their last letters stay apart
    for row in rows:
        left = "" if row.left is None else duration(row.left)
        cells = (row.name, row.state, row.where, f"{100 * row.fraction:.0f} %", left, row.accuracy)
        shown.add_row(*map(Text, cells))
    return shown


def data_key(config: RunConfig) -> str:
    """Runs with one key read the same data."""
    return f"{config.dataset} {config.data_options()}"


def sweep(
    name: str,
    out: Path,
    data_root: Path | None,
    settings: Sequence[str],
    at_once: int | None,
    only: str | None,
    console: Console,
    dry_run: bool = False,
) -> int:
    """Run what is left of a sweep; returns how many runs failed."""
    everything = plan(name, settings)
    planned = [(n, c) for n, c in everything if only is None or only in n]
    if not planned:
        raise ConfigError(f"no run of the sweep {name!r} has {only!r} in its name.")
    check = read_check(find_sweep(name))
    if check is not None:
        before = first_of(check, everything)
        planned = [before, *(pair for pair in planned if pair != before)]
    if dry_run:
        if check is not None:
            say(console, f"first  {check.metric} of {planned[0][0]}: {check.expected}, within {check.within}")
        for folder, config in planned:
            state = "done" if (out / folder / "record.json").exists() else "to do"
            own = config.resolved()
            changed = changed_settings(own) | {key: own[key] for key in HANDLING if key in own}
            changes = "".join(f" {key}={yaml_value(value)}" for key, value in changed.items())
            say(console, f"{state:6} {folder}  (device {config.device}, engine {config.engine}){changes}")
        return 0
    device = pick_device(planned[0][1].device)
    data: dict[str, Dataset] = {}
    for _, config in planned:
        if data_key(config) not in data:
            loaded = load_dataset(config.dataset, data_root, **config.data_options())
            activity = f"while the images of {config.dataset} were copied to it"
            with translate_device_errors(device, activity, "Another device may help."):
                data[data_key(config)] = replace(  # one copy on the device for all runs
                    loaded, train_images=loaded.train_images.to(device), test_images=loaded.test_images.to(device)
                )

    def maker(folder: str, config: RunConfig) -> Callable[[], Run]:
        return lambda: Run(config, data[data_key(config)], out / folder, out / "bases")

    many = at_once or default_at_once(device, [config for _, config in planned])
    title = f"{name}: {len(planned)} runs, {many} at once on {device}"
    with ExitStack() as threads:
        for each in data.values():
            threads.enter_context(steady_threads(each))
        if check is not None:
            say(console, f"first {planned[0][0]}: {check.metric} is to be {check.expected}, within {check.within}")
            check.judge(finish(maker(*planned[0])()))
        rows = show(
            [folder for folder, _ in planned],
            run_concurrently([maker(*pair) for pair in planned], many),
            title,
            console,
        )
    failed = [row for row in rows if row.state == "failed"]
    for row in failed:
        console.print(Text.assemble(("failed", "red"), f" {row.name}: {row.error}"), soft_wrap=True)
    return len(failed)


def show(names: Sequence[str], events: Iterable[tuple[int, ev.Event]], title: str, console: Console) -> list[Row]:
    """Follow all runs to their ends: a table that changes on a terminal, a line now and then elsewhere."""
    rows = [Row(name) for name in names]
    live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
    told = time.monotonic()
    if live:
        live.start()
    else:
        say(console, title)
    try:
        for number, event in events:
            rows[number].hear(event)
            if isinstance(event, Failed) and not isinstance(event.error, IncvecError):
                rows[number].error += " (a fault of the program: please report it)"
            now = time.monotonic()
            if isinstance(event, ev.Finished | Failed) and live is None:
                row = rows[number]
                say(console, f"{row.state} {row.name}: {row.error or row.accuracy}")
            if now - told < (0.5 if live else QUIET):
                continue
            told = now
            if live:
                live.update(table(rows, title))
            else:
                busy = [f"{r.name} {r.where} {100 * r.fraction:.0f} %" for r in rows if r.state == "training"]
                say(console, f"{sum(r.state == 'done' for r in rows)}/{len(rows)} done; " + "; ".join(busy))
    finally:
        if live:
            live.update(table(rows, title))
            live.stop()
    console.print(table(rows, title) if not live else "")
    return rows
