"""Approaches that train the classifier's network, compared on one device by several processes at once.

    python benchmarks/classifier_trained.py prepare DATA --archives x.tar y.tar --cifar FOLDER
    python benchmarks/classifier_trained.py run DATA --out OUT --jobs 8 --seconds 300
    python benchmarks/classifier_trained.py run DATA --out OUT --list
    python benchmarks/classifier_trained.py collect OUT/rows.json --name aircraft20 --with frozen.json --json y.json

DATA has one folder per data set, like PHOTOS of classifier_methods.py, and `prepare` makes it: aircraft20 and
tiny-imagenet from archives, cifar100 from the published files (the first 30 training and 20 test photos per class), and
aircraft20-fold, a fold of the aircraft's training photos.

`run` measures the rows of `PLAN` in this order, as far as time allows. Settings are chosen on the fold, before the
approach is measured on test photos, and are used for the other data sets as they are, with fewer epochs. Each finished
row is written to OUT/rows.json at once. Rows that are there already, or in a file given with --have, are not measured
again; so a run that was cut off can be continued. A row that fails is reported in OUT/failures.json and stops no other.
`replay@4` is replay with 4 epochs per `learn`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from classifier_features import FROZEN, Features
from classifier_methods import fold, keeps, measure_trained, method_of, read_rows

from incvec.atomic_files import write_bytes
from incvec.engine.build import pick_device
from incvec.methods import find_method
from incvec.nets.pretrained import expected_input
from incvec.records import environment

# The plan ---------------------------------------------------------------------------------------------------

SIZES = {"aircraft20": [8, 4, 4, 4], "cifar100": [50, *[10] * 5], "tiny-imagenet": [20, *[10] * 4]}
FOLD = "aircraft20-fold"
EPOCHS = 10
LARGER_SETS = {"all-finetuned": 10}  # epochs on the other two sets; 5 for every other approach
BOUND = "all-finetuned"
ALIGNED = "finetune+carry"  # tuned slowly, then its classifier aligned on class Gaussians, as in SLCA
# Settings from which the best on the fold are chosen, by the approach that they are compared with.
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    BOUND: [{"lr": 0.02}, {"lr": 0.04}, {"lr": 0.02, "epochs": 25}, {"lr": 0.02, "crop_area": 0.08}],
    "replay": [{"lr": 0.02}, {"lr": 0.01}, {"lr": 0.04}],
    "lucir": [{"lr": 0.02, "lambda_base": 5.0}, {"lr": 0.02, "lambda_base": 1.0}],
    "podnet": [
        {"lr": 0.02, "lambda_flat": 1.0, "lambda_spatial": 3.0},
        {"lr": 0.02, "lambda_flat": 0.3, "lambda_spatial": 1.0},
    ],
    "pass": [{"lr": 0.02, "epochs": 4, "lambda_distil": 0.3}, {"lr": 0.02, "epochs": 4, "lambda_distil": 3.0}],
    "lda-adapted": [{"adapt_epochs": EPOCHS, "lr": 0.02}, {"adapt_epochs": EPOCHS, "lr": 0.005}],
    ALIGNED: [{"lr": 0.01}, {"lr": 0.003}, {"lr": 0.001}],
}
FIRST = ("replay", "replay+ivt", "icarl", "icarl+ivt")
SECOND = ("lucir", "lucir+ivt", "podnet", "podnet+ivt")
CARRIED = ("replay+carry", "replay+ivt+carry")
NO_PHOTOS = ("finetune", "finetune+ivt", "lwf", "lwf+ivt", "pass", "pass+ivt")
SHORT = ("replay@4", "icarl@4")


@dataclass(frozen=True)
class Job:
    """One row to measure. On the fold, `settings` are candidates; else they are chosen when it begins."""

    data: str
    approach: str
    seed: int
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def on_fold(self) -> bool:
        return self.data == FOLD

    @property
    def group(self) -> str:
        """The approach whose fold rows choose the settings."""
        names = (self.approach, method_of(self.approach))
        return next((name for name in names if name in CANDIDATES), "replay")

    def describe(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings)
        return f"{self.data}: {self.approach}, seed {self.seed}" + (f" ({settings})" if settings else "")


def on_fold(*groups: str) -> list[Job]:
    pairs = [(group, candidate) for group in groups for candidate in CANDIDATES[group]]
    epochs = {"epochs": EPOCHS}
    return [Job(FOLD, g, 0, tuple((c if "adapt_epochs" in c else epochs | c).items())) for g, c in pairs]


def on_test(data: str, approaches: Sequence[str], *seeds: int) -> list[Job]:
    return [Job(data, approach, seed) for seed in seeds for approach in approaches]


PLAN = [
    *on_fold(BOUND, "replay"),
    *on_test("aircraft20", (BOUND, *FIRST), 0),
    *on_fold("lucir", "podnet"),
    *on_test("aircraft20", (BOUND, *FIRST), 1, 2),
    *on_test("aircraft20", (*SECOND, *CARRIED, *SHORT), 0),
    *on_test("tiny-imagenet", (BOUND, *FIRST[:2]), 0),
    *on_fold("lda-adapted", "pass"),
    *on_test("aircraft20", NO_PHOTOS, 0),
    # LUCIR is ahead on the fold and on the first order, so its other orders come first.
    *on_test("aircraft20", ("lucir", "lucir+ivt"), 1, 2),
    *on_test("tiny-imagenet", ("lucir",), 0, 1, 2),
    *on_test("cifar100", ("lucir",), 0, 1, 2),
    *on_test("aircraft20", ("replay+carry", "podnet"), 1, 2),
    *on_test("cifar100", (BOUND,), 0),
    *on_test("tiny-imagenet", (BOUND, "replay"), 1, 2),
    *on_test("cifar100", (BOUND, "replay"), 1, 2),
    *on_fold(ALIGNED),
    *on_test("aircraft20", (ALIGNED, "lda-adapted"), 0, 1, 2),
    *on_test("tiny-imagenet", (ALIGNED,), 0, 1, 2),
    *on_test("aircraft20", ("replay+ivt+carry", "podnet+ivt", *SHORT), 1, 2),
    *on_test("tiny-imagenet", ("icarl",), 0, 1, 2),
    *on_test("cifar100", ("icarl", "replay", "replay+ivt"), 0),
    *on_test("cifar100", ("icarl",), 1, 2),
    *on_test("aircraft20", NO_PHOTOS, 1, 2),
    *on_test("tiny-imagenet", ("replay+ivt",), 1, 2),
    *on_test("cifar100", ("replay+ivt",), 1, 2),
]


def epochs_of(settings: Mapping[str, Any]) -> int:
    return int(settings.get("epochs", settings.get("adapt_epochs", EPOCHS)))


def settings_of(job: Job, rows: Sequence[Mapping[str, Any]], failed: Collection[Job] = ()) -> dict[str, Any] | None:
    """The job's settings; None while the fold rows that choose them are missing. Candidates that failed are left out:
    with a large learning rate, training may diverge."""
    if job.on_fold:
        return dict(job.settings)
    candidates = [other for other in PLAN if other.on_fold and other.approach == job.group]
    wanted = [dict(other.settings) for other in candidates if other not in failed]
    found = [row for row in rows if row["name"] == FOLD and row["approach"] == job.group and row["settings"] in wanted]
    if not found or len(found) < len(wanted):
        return None
    chosen: dict[str, Any] = dict(max(found, key=lambda row: row["accuracy"][-1][0])["settings"])
    if job.approach.startswith("podnet"):
        chosen["balance_epochs"] = chosen["epochs"]
    epochs = {"epochs": LARGER_SETS.get(job.approach, 5)} if job.data in ("cifar100", "tiny-imagenet") else {}
    _, separator, given = job.approach.partition("@")
    return chosen | epochs | ({"epochs": int(given.partition("+")[0])} if separator else {})


def work(approach: str, settings: Mapping[str, Any], sizes: Sequence[int], memory: int, photos: int) -> float:
    """Images that are trained on, with a factor for rotations, teachers and stages: for estimates of the time."""
    method, epochs = method_of(approach), epochs_of(settings)
    kept = memory if keeps(approach) == "remembered" else 0
    seen = np.cumsum([0, *sizes])
    rows = sum(size * photos + kept * int(old) for size, old in zip(sizes, seen, strict=False))
    if approach == "lda-adapted":
        rows = sizes[0] * photos
    factor = {"pass": 5.4, "podnet": 1.8, "icarl": 1.35, "lucir": 1.35, "lwf": 1.35}.get(method, 1.0)
    return factor * epochs * rows


# Workers ----------------------------------------------------------------------------------------------------


def measure_row(job: Mapping[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    data = Features(Path(job["photos"]), job["backbone"], Path("unused"), job["side"])
    order = np.random.RandomState(job["seed"]).permutation(len(data.classes))[: sum(job["sizes"])].tolist()
    options = {key: job[key] for key in ("memory", "side", "device", "backbone")}
    approach, given = job["approach"], argparse.Namespace(**options)
    sections: dict[str, Any] = {}
    accuracy = measure_trained(data, approach, order, job["sizes"], given, job["seed"], job["settings"], sections)
    key = {name: job[name] for name in ("approach", "seed", "memory", "sizes", "backbone", "name", "settings")}
    row = {**key, "side": data.preprocessing.side, "accuracy": accuracy}
    row |= {"seconds": round(time.monotonic() - began, 1), "sections": sections}
    row |= {"train_photos": data.count("train", order), "test_photos": data.count("test", order)}
    device = pick_device(job["device"])
    row["precision"] = "bf16" if device.type == "cuda" and find_method(method_of(approach)).trains else "fp32"
    return row | {"classes": [data.classes[c] for c in order], "environment": environment(device)}


def worker(given: argparse.Namespace) -> None:
    """Jobs as lines of JSON on the standard input, rows or errors as lines on the standard output."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes to the log
    torch.set_num_threads(1)
    device = pick_device(given.device)
    torch.zeros(1, device=device)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            replies.write(json.dumps({"row": measure_row(job)}) + "\n")
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"
            replies.write(json.dumps({"error": text}) + "\n")
            return  # a device error may have left the process unusable
        if device.type == "cuda":
            torch.cuda.empty_cache()


# The processes and their jobs --------------------------------------------------------------------------------


@dataclass
class Board:
    """What is measured, under way and left. Its methods are called by one thread per worker."""

    given: argparse.Namespace
    began: float
    rows: list[dict[str, Any]]
    left: list[Job]
    counts: dict[str, int]  # photos per class, by data set
    failures: list[dict[str, str]] = field(default_factory=list)
    failed: set[Job] = field(default_factory=set)
    running: set[Job] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    rates: list[tuple[float, float]] = field(default_factory=list)  # work and seconds of the rows of this call
    stopped: bool = False

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def predict(self, job: Job, settings: Mapping[str, Any]) -> float:
        """Seconds that the row will take, from those of the rows so far; 0 if there are none."""
        if not self.rates:
            return 0.0
        rate = sum(amount for amount, _ in self.rates) / sum(seconds for _, seconds in self.rates)
        return self.work(job, settings) / rate

    def work(self, job: Job, settings: Mapping[str, Any]) -> float:
        sizes = SIZES["aircraft20" if job.on_fold else job.data]
        return work(job.approach, settings, sizes, self.given.memory, self.counts[job.data])

    def take(self) -> tuple[Job, dict[str, Any]] | None:
        """The next job that can begin and end in time; waits for fold rows; None if there is nothing more to do."""
        with self.changed:
            while not self.stopped:
                waiting = False
                for job in self.left:
                    settings = settings_of(job, self.rows, self.failed)
                    if settings is None:
                        group = [o for o in (*self.left, *self.running) if o.on_fold and o.approach == job.group]
                        waiting |= bool(group)
                    elif self.seconds() + self.predict(job, settings) < self.given.seconds:
                        self.left.remove(job)
                        self.running.add(job)
                        return job, settings
                if not waiting or not self.running:
                    return None
                self.changed.wait(1.0)
            return None

    def finish(self, job: Job, settings: dict[str, Any], reply: Mapping[str, Any], seconds: float) -> None:
        with self.changed:
            self.running.discard(job)
            if "row" in reply:
                row = dict(reply["row"])
                self.rows.append(row)
                self.rates.append((self.work(job, settings), seconds))
                save(self.given.out / "rows.json", {"rows": self.rows})
                print(f"{self.seconds():6.1f} s  {row['accuracy'][-1][0]:5.1f} %  {seconds:5.1f} s  "
                      f"{replace(job, settings=tuple(settings.items())).describe()}", flush=True)  # fmt: skip
            elif not self.stopped:
                self.failed.add(job)
                self.failures.append({"job": job.describe(), "error": str(reply.get("error", "the process ended"))})
                save(self.given.out / "failures.json", {"failures": self.failures})
                print(
                    f"{self.seconds():6.1f} s  FAILED {job.describe()}: {self.failures[-1]['error'][:300]}", flush=True
                )
            self.changed.notify_all()


def save(file: Path, content: Any) -> None:
    write_bytes(file, (json.dumps(content, indent=1) + "\n").encode())


def serve(board: Board) -> None:
    """One thread: gives jobs to its process, and starts another one if it ends."""
    given, process = board.given, start_worker(board.given)
    while (taken := board.take()) is not None:
        job, settings = taken
        if process.poll() is not None:
            process = start_worker(given)
        assert process.stdin is not None
        assert process.stdout is not None
        sizes = SIZES["aircraft20" if job.on_fold else job.data]
        content = {"photos": str(given.data / job.data), "name": job.data, "approach": job.approach, "seed": job.seed}
        content |= {"sizes": sizes, "memory": given.memory, "backbone": given.backbone, "side": given.side}
        content |= {"settings": settings, "device": given.device}
        began = time.monotonic()
        guard = threading.Timer(given.row_seconds, process.kill)
        guard.start()
        reply: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(json.dumps(content) + "\n")
            process.stdin.flush()
            reply = json.loads(process.stdout.readline())
        guard.cancel()
        if "row" not in reply:
            process.kill()
            process.wait()
        board.finish(job, settings, reply, time.monotonic() - began)
    process.kill()
    process.wait()


PROCESSES: list[subprocess.Popen[str]] = []


def start_worker(given: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "worker", str(given.data), "--device", given.device]
    with (given.out / "workers.log").open("a") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=worker_environment()
        )
    PROCESSES.append(process)
    return process


def worker_environment() -> dict[str, str]:
    """Model folders in memory if possible: they are written often, and removed after the row."""
    shared = Path("/dev/shm")
    fast = {"TMPDIR": str(shared)} if shared.is_dir() and os.access(shared, os.W_OK) else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", **fast}


def start_mps() -> bool:
    """NVIDIA's multi-process service, so that kernels of several processes run at the same time. False if it fails."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return False
    folder = Path("/tmp/nvidia-mps")
    folder.mkdir(exist_ok=True)
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    os.environ.update(dict.fromkeys(names, str(folder)))
    probe = "import torch; print(float(torch.ones(4, device='cuda').sum()))"
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], timeout=20, check=True)
        subprocess.run([sys.executable, "-c", probe], timeout=60, check=True, stdout=subprocess.DEVNULL)
        return True
    except (OSError, subprocess.SubprocessError) as error:
        print(f"without MPS: {error}", flush=True)
        stop_mps()
        for name in names:
            os.environ.pop(name, None)
        return False


def stop_mps() -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=20)


# Commands ---------------------------------------------------------------------------------------------------


def matches(job: Job, settings: Mapping[str, Any] | None, row: Mapping[str, Any]) -> bool:
    same = (row["name"], row["approach"], row["seed"]) == (job.data, job.approach, job.seed)
    return same and (not job.on_fold or row["settings"] == settings)


def comparable(row: Mapping[str, Any], given: argparse.Namespace) -> bool:
    """Whether a row was measured with the backbone, the memory and the side that are given now."""
    side = given.side or expected_input(given.backbone)[0]
    return (row["backbone"], row["memory"], row.get("side", side)) == (given.backbone, given.memory, side)


def run(given: argparse.Namespace) -> None:
    began = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = read_rows(given.out / "rows.json")
    if not all(comparable(row, given) for row in rows):
        raise SystemExit(f"{given.out} has rows with another backbone, memory or side: give another folder with --out.")
    rows += [row for file in given.have for row in read_rows(file) if comparable(row, given)]
    rows = list({json.dumps(row, sort_keys=True): row for row in rows}.values())
    present = [name for name in (*SIZES, FOLD) if (given.data / name).is_dir()]
    left = [job for job in PLAN if job.data in present]
    left = [job for job in left if not any(matches(job, dict(job.settings), row) for row in rows)]
    listed = {name: Features(given.data / name, given.backbone, Path("unused"), given.side) for name in present}
    counts = {n: round(f.count("train", range(len(f.classes))) / len(f.classes)) for n, f in listed.items()}
    if given.only:
        left = [job for job in left if any(text in job.describe() for text in given.only)]
    board = Board(given, began, rows, left, counts)
    if given.list:
        for job in left:
            larger = job.data in ("cifar100", "tiny-imagenet")
            settings = dict(job.settings) or {"epochs": LARGER_SETS.get(job.approach, 5) if larger else EPOCHS}
            print(f"{board.work(job, settings):9.0f} images  {job.describe()}")
        return
    with_mps = pick_device(given.device).type == "cuda" and not given.no_mps and start_mps()
    print(f"{len(left)} rows to measure, {given.jobs} processes, MPS: {with_mps}", flush=True)
    threads = [threading.Thread(target=serve, args=(board,), daemon=True) for _ in range(given.jobs)]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and board.seconds() < given.seconds + given.grace:
            time.sleep(0.2)
    finally:
        board.stopped = True
        for process in PROCESSES:
            process.kill()
        if with_mps:
            stop_mps()
        print(f"{board.seconds():6.1f} s  {len(board.rows)} rows, {len(board.left)} not begun, "
              f"{len(board.failures)} failed", flush=True)  # fmt: skip


def prepare(given: argparse.Namespace) -> None:
    given.data.mkdir(parents=True, exist_ok=True)
    for archive in given.archives:
        with tarfile.open(archive) as file:
            file.extractall(given.data, filter="data")
    if given.cifar is not None and not (given.data / "cifar100").exists():
        write_cifar(given.cifar, given.data / "cifar100")
    if (given.data / "aircraft20").is_dir() and not (given.data / FOLD).exists():
        fold(argparse.Namespace(photos=given.data / "aircraft20", out=given.data / FOLD, number=0))


def write_cifar(source: Path, target: Path, train: int = 30, test: int = 20) -> None:
    """The first photos of each class of CIFAR-100, from its published files."""
    from torchvision.datasets import CIFAR100

    for part, at_most in (("train", train), ("test", test)):
        data, done = CIFAR100(str(source), train=part == "train"), [0] * 100
        for index, label in enumerate(data.targets):
            if done[label] < at_most:
                done[label] += 1
                folder = target / part / data.classes[label]
                folder.mkdir(parents=True, exist_ok=True)
                data[index][0].save(folder / f"{index:05d}.png")


def collect(given: argparse.Namespace) -> None:
    """One data set's rows, with those of frozen features from another file."""
    rows = [row for row in read_rows(given.rows) if row["name"] == given.name]
    others = [r for file in given.frozen for r in read_rows(file) if r["approach"] in FROZEN]
    for row in rows:
        row.setdefault("side", None)
    save(given.json, {"rows": [*others, *rows]})
    print(f"{given.json}: {len(rows)} rows, and {len(others)} of frozen features")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in _commands():
        command = commands.add_parser(name)
        command.set_defaults(run=function)
        if name in ("prepare", "run", "worker"):
            command.add_argument("data", type=Path)
        if name == "prepare":
            command.add_argument("--archives", type=Path, nargs="*", default=[])
            command.add_argument("--cifar", type=Path, help="folder of cifar-100-python")
        if name in ("run", "worker"):
            command.add_argument("--device", default="auto")
        if name == "run":
            command.add_argument("--out", type=Path, required=True)
            command.add_argument("--have", type=Path, nargs="*", default=[], help="rows measured before")
            command.add_argument("--only", nargs="*", default=[], help="rows whose description contains one of these")
            command.add_argument("--jobs", type=int, default=8, help="processes")
            command.add_argument("--seconds", type=float, default=300, help="no row begins that would end later")
            command.add_argument("--grace", type=float, default=20, help="seconds until rows under way are given up")
            command.add_argument("--row-seconds", type=float, default=400, help="limit for one row")
            command.add_argument("--memory", type=int, default=20)
            command.add_argument("--backbone", default="lite0")
            command.add_argument("--side", type=int, default=None)
            command.add_argument("--no-mps", action="store_true")
            command.add_argument("--list", action="store_true", help="print the rows and measure nothing")
        if name == "collect":
            command.add_argument("rows", type=Path)
            command.add_argument("--name", required=True, help="of the data set")
            command.add_argument("--with", dest="frozen", type=Path, nargs="*", default=[])
            command.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    given.run(given)


def _commands() -> Iterator[tuple[str, Any]]:
    yield from (("prepare", prepare), ("run", run), ("worker", worker), ("collect", collect))


if __name__ == "__main__":
    main()
