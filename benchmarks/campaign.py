"""A campaign of bad inputs: does every command refuse them with a clear message, and is nothing ever lost?

    python benchmarks/campaign.py --cases 1000 --seed 0 --json results/benchmarks/campaign.json

`bad_inputs.py` generates the inputs from the seed. Everything is imported once; each command runs in a forked process
with a limit on time and memory. The outcome of a case is one of

    accepted    the input is valid, if odd: exit code 0, and a record with finite numbers if one was written
    refused     exit code 1 or 2, and one message that names what was wrong
    completed   after an interruption or a full disk, the same command completed the work, with the same result
    unclear     refused with a message that does not name the input
    traceback   a traceback, or a crash
    hang        neither an end nor training within the limit
    wrong       accepted although it must be refused, or a record that is invalid or differs from the unbroken run's
    lost        a file that has to be kept was changed, or the work could not be completed afterwards

The last five must not occur. Full disks need the right to mount a file system, at least in a user namespace; without
it they are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from bad_inputs import KINDS, Case, Fixtures
from measuring import Report

import incvec.cli
import incvec.study
from incvec.__main__ import interrupt
from incvec.__main__ import main as incvec_main

OUTCOMES = ("accepted", "refused", "completed", "unclear", "traceback", "hang", "wrong", "lost")
FAILURES = OUTCOMES[3:]
SECONDS = 40.0  # of the processor, for a command
TRAINING_SECONDS = 8.0  # a command that still trains then has accepted its input
MEMORY = 6 << 30  # bytes, for a command
COMPARED = ("metrics", "accuracy", "correct", "config", "statistics")  # of a record, with the unbroken run's


class Ended(NamedTuple):
    """How a command ended: its exit code, negative for a signal, None if it had to be killed; and its output."""

    code: int | None
    out: str
    err: str

    @property
    def has_traceback(self) -> bool:
        crashed = self.code is not None and self.code < 0 and self.code not in (-signal.SIGKILL, -signal.SIGINT)
        return "Traceback (most recent call last)" in self.err or crashed


def call(arguments: Sequence[str], folder: Path, case: Case | None = None) -> Ended:
    """Run one command in the folder, in a forked process or, for `start_up`, in a new interpreter."""
    out, err = folder / ".out", folder / ".err"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the command can handle it
    pid = os.fork()
    if pid == 0:
        _child(arguments, folder, out, err, case is not None and case.start_up)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with suppress(OSError):  # the child does so too; whichever is first
        os.setpgid(pid, pid)
    code = _wait(pid, out, list(case.signals) if case else [], may_train=case is None or case.expect == "resumed")
    texts = [file.read_text(errors="replace") if file.exists() else "" for file in (out, err)]
    return Ended(code, *texts)


def _child(arguments: Sequence[str], folder: Path, out: Path, err: Path, start_up: bool) -> NoReturn:
    code = 70
    try:
        os.chdir(folder)
        os.setpgid(0, 0)
        for stream, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        signal.signal(signal.SIGINT, signal.SIG_DFL if start_up else interrupt)
        os.environ.update(COLUMNS="100", INCVEC_COMMIT="campaign", NO_COLOR="1")
        if start_up:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            os.execv(sys.executable, [sys.executable, "-m", "incvec", *arguments])
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        vars(sys)["__stderr__"] = sys.stderr  # for faulthandler
        sys.argv = ["incvec", *arguments]
        sys.modules["__main__"] = sys.modules["incvec.__main__"]  # what processes that the command starts import
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            incvec_main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _wait(pid: int, out: Path, signals: list[tuple[float, int]], may_train: bool) -> int | None:
    began = time.monotonic()
    used, last_used = 0.0, 0.0  # seconds of the processor, and when they last increased
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic() - began
        if (seconds := cpu_seconds(pid)) > used:
            used, last_used = seconds, now
        while signals and now >= signals[0][0]:
            number = signals.pop(0)[1]
            (os.killpg if number == signal.SIGINT else os.kill)(pid, number)  # a terminal interrupts all processes
        stuck = used > SECONDS or now - last_used > SECONDS  # a busy machine may leave it little time
        training = (
            not may_train
            and now > TRAINING_SECONDS
            and "task 1/" in (out.read_text(errors="replace") if out.exists() else "")
        )
        if stuck or training or now > 10 * SECONDS:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 0 if training else None
        time.sleep(0.0005 if signals else 0.004)


def cpu_seconds(pid: int) -> float:
    """What a process has used: on a busy machine, a command may take long without being stuck."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Judging -----------------------------------------------------------------------------------------------------


def try_case(kind: str, seed: int, number: int, fixtures: Fixtures) -> dict[str, Any]:
    """Generate one case, run its command and judge what happened."""
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=fixtures.root))
    try:
        case = KINDS[kind][0](random.Random(f"{seed} {kind} {number}"), fixtures, folder)
        if case.disk is not None:
            outcome, detail = judge_full_disk(case, folder, fixtures)
        elif case.expect == "resumed":
            outcome, detail = judge_resumed(case, folder, fixtures, call(case.arguments, folder, case))
        else:
            before = hashes(folder, case.protected)
            outcome, detail = judge(case, folder, call(case.arguments, folder, case))
            if outcome not in FAILURES and hashes(folder, case.protected) != before:
                outcome, detail = "lost", "a protected file changed"
        return {"kind": kind, "number": number, "case": case.name[:160], "outcome": outcome, "detail": detail[-1500:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(case: Case, folder: Path, ended: Ended) -> tuple[str, str]:
    if ended.has_traceback:
        return "traceback", ended.err or f"exit code {ended.code}"
    if ended.code is None:
        return "hang", ended.out + ended.err
    if ended.code == 0:
        if case.expect == "refused":
            return "wrong", "accepted"
        problem = invalid_record(folder / "out" / "record.json")
        return ("wrong", problem) if problem else ("accepted", "")
    message = " ".join(ended.err.split())
    if ended.code not in (1, 2) or "error" not in message.lower():
        return "unclear", f"exit code {ended.code}: {message or ended.out}"
    if case.mentions and not any(word in message for word in case.mentions):
        return "unclear", message
    return "refused", message


def judge_resumed(case: Case, folder: Path, fixtures: Fixtures, ended: Ended) -> tuple[str, str]:
    """Judge an interrupted command, then run it again and compare its result with that of an unbroken run."""
    interrupted = (0, 130, -signal.SIGKILL) if case.signals else (0, 1, 2)
    # Before the first line of the program runs, an interpreter ends as it always does.
    early = case.start_up and "in main" not in ended.err
    if ended.code is None:
        return "hang", ended.out + ended.err
    if (ended.has_traceback or "Exception ignored" in ended.err or ended.code not in interrupted) and not early:
        return "traceback", f"exit code {ended.code}: {ended.err}"
    if ended.code in (1, 2) and "error" not in ended.err:
        return "unclear", ended.err
    if ended.code == 0:
        return "completed", ""
    again = call(case.arguments, folder)
    if again.code != 0:
        return "lost", f"after {ended.code} {ended.err[:300]}: the same command ended with {again.code}: {again.err}"
    if case.result is not None:
        record = json.loads((folder / case.result).read_text())
        if any(record[key] != fixtures.records["ivt"][key] for key in COMPARED):
            return "wrong", "another result than the unbroken run"
    return "completed", ended.err


def judge_full_disk(case: Case, folder: Path, fixtures: Fixtures) -> tuple[str, str]:
    assert case.disk is not None
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(case.disk * 1e6)}", "tmpfs", str(disk)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        ended = call(case.arguments, folder, case)
        subprocess.run(["mount", "-o", "remount,size=64M", str(disk)], check=True, capture_output=True)
        return judge_resumed(case, folder, fixtures, ended)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False, capture_output=True)


def can_mount() -> bool:
    """Whether this process may mount file systems; tries a name space of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=False)
        return mounted.returncode == 0


def invalid_record(path: Path) -> str:
    """Why a record must not have been written; empty if there is none or it is right. Reads it independently."""
    if not path.exists():
        return ""
    record = json.loads(path.read_text(), parse_constant=lambda name: math.nan)
    numbers = [record["metrics"][name] for name in ("AA", "LA")] + [x for row in record["accuracy"] for x in row]
    settings = list(leaves(record["config"]))
    if not all(isinstance(x, float | int) and 0 <= x <= 100 for x in numbers):
        return f"accuracies are not between 0 and 100: {numbers}"
    if any(isinstance(x, float) and not math.isfinite(x) for x in settings):
        return "a setting is not finite"
    return ""


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [value]


def hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() if (folder / name).is_file() else "missing"
        for name in names
    }


# The campaign ------------------------------------------------------------------------------------------------


def planned(cases: int, kinds: Sequence[str]) -> list[tuple[str, int]]:
    """Kind and number of every case, in the proportions of `KINDS`."""
    total = sum(KINDS[kind][1] for kind in kinds)
    return [(kind, number) for kind in kinds for number in range(max(1, round(cases * KINDS[kind][1] / total)))]


_fixtures: Fixtures  # inherited by the forked workers


def _work(job: tuple[str, int, int]) -> dict[str, Any]:
    kind, seed, number = job
    return try_case(kind, seed, number, _fixtures)


def run_campaign(cases: int, seed: int, kinds: Sequence[str], jobs: int, root: Path) -> list[dict[str, Any]]:
    """The outcome of every case."""
    global _fixtures
    torch.set_num_threads(1)
    for package in (incvec.cli, incvec.study):  # what a command imports when it runs, once for all
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    _fixtures = Fixtures.make(root)
    work = [(kind, seed, number) for kind, number in planned(cases, kinds)]
    random.Random(seed).shuffle(work)  # slow kinds at the same time as quick ones
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        rows = []
        for job in as_completed([pool.submit(_work, each) for each in work]):
            rows.append(row := job.result())
            if row["outcome"] in FAILURES:
                detail = " ".join(row["detail"].split())[-300:]
                print(f"{row['outcome']}: {row['kind']} {row['number']}: {row['case']}: {detail}", file=sys.stderr)
    return sorted(rows, key=lambda row: (list(KINDS).index(row["kind"]), row["number"]))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/reliability.md."""
    names = ["tried", *OUTCOMES]
    total = {"kind": "all"} | {name: sum(row[name] for row in rows) for name in names}
    lines = [f"| inputs | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    return "\n".join(
        lines + [f"| {row['kind']} | {' | '.join(str(row[name]) for name in names)} |" for row in [*rows, total]]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of inputs, separated by commas")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--small", action="store_true", help="40 cases")
    given = parser.parse_args(arguments)
    kinds = given.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"there is no kind {', '.join(unknown)}; kinds: {', '.join(KINDS)}")
    skipped = [] if can_mount() else [kind for kind in kinds if kind == "full disks"]
    kinds = [kind for kind in kinds if kind not in skipped]
    report = Report(given.json, "campaign.py", arguments, seed=given.seed, skipped=skipped)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-") as root:
        rows = run_campaign(40 if given.small else given.cases, given.seed, kinds, given.jobs, Path(root))
    for kind in kinds:
        counts = Counter(row["outcome"] for row in rows if row["kind"] == kind)
        report.add({"kind": kind, "tried": counts.total(), **{outcome: counts[outcome] for outcome in OUTCOMES}})
    failures = [row for row in rows if row["outcome"] in FAILURES]
    report.put(seconds=round(time.monotonic() - began, 1), jobs=given.jobs, failures=failures)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
