"""What `incvec sweep --on ray` and `--on slurm` do: start, follow, stop and submit sweeps of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from incvec.cli.common import say
from incvec.cluster.job import ClusterSweep, absolute, check_devices, is_address
from incvec.cluster.slurm import SlurmJob, make_script
from incvec.cluster.slurm import submit as submit_script
from incvec.config import RunConfig
from incvec.engine.sweep import Check
from incvec.file_names import safe_name

if TYPE_CHECKING:
    from incvec.cluster import client

__all__ = ["Options", "SlurmJob", "attach", "check_devices", "connect", "stop", "submit", "train"]


@dataclass(frozen=True)
class Options:
    """The options of the command that have to do with a cluster."""

    out: Path
    storage: str
    address: str | None = None
    per_gpu: int | None = None
    workers: int | None = None
    cores: int = 1
    data_root: Path | None = None
    download: bool = False
    data_source: str | None = None
    plugins: tuple[Path, ...] = ()


def connect(options: Options) -> bool:
    """Connect to the cluster. Returns True if it is one of this process, which ends with it."""
    from incvec.cluster import client

    return client.connect(options.address)


def train(title: str, planned: Sequence[tuple[str, RunConfig]], check: Check | None, options: Options) -> int:
    """Train the unfinished runs of a sweep on Ray; returns the number of runs that failed."""
    sweep, own = start(title, planned, check, options)
    return follow(sweep, options, own)


def start(
    title: str, planned: Sequence[tuple[str, RunConfig]], check: Check | None, options: Options
) -> tuple[client.Sweep, bool]:
    """Start a sweep, or find the one that is running. Also returns whether the cluster ends with this process."""
    own = connect(options)
    from incvec.cluster import client
    from incvec.cluster.storage import check_storage
    from incvec.cluster.versions import own_versions

    storage = absolute(options.storage)
    check_storage(storage)
    sweep = ClusterSweep(
        title,
        tuple(planned),
        storage,
        check,
        None if options.data_root is None else str(options.data_root.expanduser().resolve()),
        options.download,
        options.data_source,
        tuple(str(file.resolve()) for file in options.plugins),
        options.per_gpu,
        options.workers,
        options.cores,
        own_versions(),
    )
    return client.start(sweep), own


def attach(title: str, options: Options) -> int:
    """Show the progress of a running sweep; returns the number of runs that failed."""
    from incvec.cluster import client

    return follow(client.attach(title, absolute(options.storage)), options)


def stop(title: str, options: Options) -> None:
    from incvec.cluster import client

    client.stop(title, absolute(options.storage))
    say(f"the sweep {title} has ended; the same command without --stop resumes it")


def follow(sweep: client.Sweep, options: Options, own: bool = False) -> int:
    """Display a sweep until it ends. Ctrl-C leaves it running, unless the cluster belongs to this process."""
    from incvec.cli.progress import follow_sweep
    from incvec.cli.sweep import report_failed

    console = Console()
    title = f"{sweep.title}: {len(sweep.names)} runs on Ray, in {sweep.storage}"
    try:
        runs = follow_sweep(sweep.names, sweep.events(), title, console, lambda: sweep.nodes)
    except KeyboardInterrupt:
        if not own:
            say("the sweep continues on the cluster: --attach shows its progress again, --stop ends it")
        raise
    failed = report_failed(runs, console)
    sweep.close()
    if is_address(sweep.storage):
        copy_records(sweep, options.out)
    return failed


def copy_records(sweep: client.Sweep, out: Path) -> None:
    """Copy the records into the folder of the sweep on this machine, for `incvec show` and `incvec report`."""
    from incvec.cluster.storage import Storage

    storage = Storage(sweep.storage, out)
    for name in sweep.names:
        storage.fetch(out / name / "record.json")
    say(f"records copied to {out}; snapshots are in {sweep.storage}")


def submit(arguments: Sequence[str], title: str, job: SlurmJob, options: Options, dry_run: bool) -> None:
    """Write a batch script that runs the sweep on Ray inside a Slurm job, and submit it.

    `arguments` select the runs; the options of the cluster are added to them.
    """
    given = {
        "--data-root": None if options.data_root is None else options.data_root.expanduser().resolve(),
        "--data-source": options.data_source,
        "--out": options.out.resolve(),
        "--storage": absolute(options.storage),
        "--per-gpu": options.per_gpu,
        "--workers": options.workers,
        "--cores": options.cores if options.cores > 1 else None,
    }
    more = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    more += [text for file in options.plugins for text in ("--plugin", str(file.resolve()))]
    more += ["--download"] * options.download
    folder = options.out.resolve() / "slurm"
    text = make_script(title, [*arguments, *more], job, folder / "%j.log")
    if dry_run:
        say(text)
        return
    folder.mkdir(parents=True, exist_ok=True)
    say(submit_script(text, folder / f"{safe_name(title)}.sh"))
    say(f"the progress of the sweep is in the job's log in {folder}")
