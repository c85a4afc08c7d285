"""A run on two processes ends like a run on one process with the same global batch.

The processes are started by torchrun and communicate by gloo on the CPU. They run all cases in one go (`work`), since
starting them takes most of the time; the tests then check their results. Views draw nothing here (no padding, no flip,
no jitter), and BatchNorm is synchronized if weights are compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from incvec import atomic_files as files
from incvec.addons import ADDONS
from incvec.atomic_files import read_meta
from incvec.contracts import Optimizer, Stage
from incvec.data import Dataset, load_dataset
from incvec.engine import events as ev
from incvec.engine.distributed import Distributed, SyncNorm, init_distributed, is_peer_failure
from incvec.engine.evaluate import confusion_by_classifier
from incvec.engine.loop import StageLoop
from incvec.engine.run import Run, finish
from incvec.errors import ConfigError
from incvec.methods import METHODS
from incvec.nets.resnet import Norm
from incvec.presets import resolve
from tests.conftest import quick, weights
from tests.data.pictures import make_root, make_store

ROOT = Path(__file__).parents[2]
STILL = {"brightness": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "finetune": quick("finetune", finetune=STILL),
    "podnet+ivt": quick("podnet", "ivt", podnet=STILL),
    "ewc": quick("ewc", ewc=STILL),
    "last batch": quick("replay", "ivt", replay=STILL, last_batch="keep"),  # of 16, 22 and 28 images
    "ivt measured": quick("replay", "ivt", replay=STILL, ivt={"first_fisher": "sample", "batchnorm": "recalibrate"}),
    # (With seed 0, rounding decides whether a unit next to its ReLU's kink has a gradient.)
    "ivt layers": quick("finetune", "ivt", finetune=STILL, ivt={"batchnorm": "layer"}, seed=1),
    "streamed": quick("replay", "ivt", replay={**STILL, "batch_size": 8}, dataset="packed", placement="streamed"),
}
# These depend on local batches or draws, so they end with other weights than one process, but the same on both.
OTHERS = {
    **{name: quick(name) for name in sorted(METHODS) if name not in ("finetune", "ewc")},
    **{f"icarl+{name}": quick("icarl", name) for name in sorted(ADDONS) if name != "ivt"},
    "pass with layers": quick("pass", "ivt", ivt={"batchnorm": "layer"}),
}
COUNTS = (1, 2, 7, 60)


def still(digits: Dataset) -> Dataset:
    """Six digits, at most 40 images each, in views that draw nothing."""
    rows = torch.cat([(digits.train_labels == c).nonzero().flatten()[:40] for c in range(6)])
    test = torch.cat([(digits.test_labels == c).nonzero().flatten()[:20] for c in range(6)])
    return replace(
        digits, train_images=digits.train_images[rows], train_labels=digits.train_labels[rows],
        test_images=digits.test_images[test], test_labels=digits.test_labels[test],
        class_names=digits.class_names[:6], fingerprint="still digits", pad=0, flip=False,
    )  # fmt: skip


def still_store(out: Path) -> Dataset:
    """Six classes of a packed store, which is created by the first call, in views that draw nothing."""
    if not (out / "store").exists():
        make_store(make_root(out / "images", classes=6, train=12, test=3), out / "store", 12)
    return replace(load_dataset("packed", out / "store", placement="streamed"), pad=0, flip=False)


class Interrupted(Exception):
    pass


def interrupt(run: Run, task: int, epoch: int) -> None:
    """Run until this epoch of a task's main stage begins, then drop the run."""
    with pytest.MonkeyPatch.context() as patch:
        original = StageLoop.begin_epoch

        def begin_epoch(self: StageLoop, now: int, shuffle: torch.Generator) -> None:
            if (self.method.task.index, self.stage.role, now) == (task, "main", epoch):
                raise Interrupted
            original(self, now, shuffle)

        patch.setattr(StageLoop, "begin_epoch", begin_epoch)
        with pytest.raises(Interrupted):
            finish(run)


def norm_case(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """A batch with different statistics in its parts, and the part of the rank."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(8, 3, 4, 4, generator=generator) * 3 + torch.arange(8.0)[:, None, None, None]
    return whole, whole[rank * 8 // size : (rank + 1) * 8 // size]


def run_norm(norm: nn.Module, x: Tensor) -> list[Tensor]:
    """Two steps: the output, the gradients of a loss that is a mean over samples, and the statistics."""
    x = x.clone().requires_grad_()
    norm(x * 0.5)
    y = norm(x)
    (y.sin() * x).square().flatten(1).sum(1).mean().backward()  # type: ignore[no-untyped-call]
    return [y.detach(), x.grad, norm.weight.grad, norm.running_mean, norm.running_var]  # type: ignore[list-item]


# What each process runs -----------------------------------------------------------------------------------------


def work(out: Path) -> None:
    torch.set_num_threads(1)
    distributed = init_distributed("auto")
    results: dict[str, Any] = {"rank": distributed.rank, "writes": []}
    original = files.write_bytes

    def counted(path: Path, content: bytes, **options: Any) -> None:
        results["writes"].append(str(path))
        original(path, content, **options)

    files.write_bytes = counted
    sys.modules["incvec.engine.run"].write_bytes = counted  # type: ignore[attr-defined]
    data = {"digits": still(load_dataset("digits")), "packed": still_store(out)}

    def make(name: str, given: dict[str, Any], bases: Path | None = None, save_interval: float | None = None) -> Run:
        return Run(resolve(given), data[given["dataset"]], out / "two" / name, bases, distributed, save_interval)

    results["sources"] = {}
    for name, given in CASES.items():
        run = make(name, given)
        results[name] = finish(run)
        results["sources"][name] = [type(source).__name__ for source in (run.parts.world.train, run.parts.test)]
    record_run(results, make("local", {**CASES["podnet+ivt"], "sync_batchnorm": False}))
    for name, given in OTHERS.items():
        run = make(name, given)
        correct = finish(run)["correct"]
        results[f"end of {name}"] = [correct, {key: hashed(tensor) for key, tensor in run.state.tensors().items()}]
    results["shared"] = finish(make("shared", CASES["finetune"], out / "bases"))["base"]
    results["shares"] = finish(make("shares", quick("finetune", "ivt", finetune=STILL), out / "bases"))["base"]
    interrupt(make("two then one", CASES["podnet+ivt"], out / "bases", save_interval=0), task=0, epoch=1)
    results["one then two"] = finish(make("one then two", CASES["podnet+ivt"], out / "bases"))
    results["evaluation"] = evaluate(make("evaluated", CASES["podnet+ivt"]), out)
    norm = Norm(3)
    distributed.set_sync_batchnorm(norm, True)
    assert type(norm) is SyncNorm
    torch.save(
        run_norm(norm, norm_case(distributed.rank, distributed.world_size)[1]), out / f"norm-{distributed.rank}.pt"
    )
    mixed = {
        "a": torch.tensor([distributed.rank + 1.0]),
        "b": torch.tensor([[distributed.rank, 7]]),
        "c": torch.ones(2) > distributed.rank,
    }
    distributed.broadcast(mixed)
    results["broadcast"] = {name: tensor.tolist() for name, tensor in mixed.items()}
    (out / f"results-{distributed.rank}.json").write_text(json.dumps(results))
    distributed.close()


def hashed(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def record_run(results: dict[str, Any], run: Run) -> None:
    """The seeds of the process's generators, and its final weights."""
    seeds: list[tuple[int, int]] = []
    original = StageLoop.begin_epoch

    def begin_epoch(self: StageLoop, epoch: int, shuffle: torch.Generator) -> None:
        seeds.append((self.views_generator.initial_seed(), shuffle.initial_seed()))
        original(self, epoch, shuffle)

    StageLoop.begin_epoch = begin_epoch  # type: ignore[method-assign]
    try:
        results["local"] = finish(run)
    finally:
        StageLoop.begin_epoch = original  # type: ignore[method-assign]
    results["seeds"] = seeds
    results["weights"] = {name: hashed(tensor) for name, tensor in run.state.tensors().items()}


def evaluate(run: Run, out: Path) -> list[dict[str, list[list[int]]]]:
    """Confusion of a model trained by one process, on few and many rows."""
    run.config = run.config.model_copy(
        update={"start": str(out / "one" / "podnet+ivt" / "snapshots" / "task-01.safetensors")}
    )
    for event in run.events():
        if isinstance(event, ev.Started):
            break
    parts, task = run.parts, run.parts.tasks[1]
    rows = parts.test.rows_of(0, task.n_seen)
    each = [
        confusion_by_classifier(parts.method, parts.world, parts.test, rows[::2][:n], task, run.distributed)
        for n in COUNTS
    ]
    return [{name: counts.tolist() for name, counts in one.items()} for one in each]


# The comparison ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of one process, the runs of two, and the results of each."""
    out = tmp_path_factory.mktemp("ranks")
    data = {"digits": still(digits), "packed": still_store(out)}
    for name, given in CASES.items():
        finish(Run(resolve(given), data[given["dataset"]], out / "one" / name))
    half = Run(resolve(CASES["podnet+ivt"]), data["digits"], out / "two" / "one then two", save_interval=0)
    interrupt(half, task=1, epoch=1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    process = subprocess.Popen(
        [*torchrun, "-m", "tests.engine.test_distributed", str(out)],
        env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes; a kill would leave them behind
        _, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    return out


def results_of(left: Path, rank: int) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((left / f"results-{rank}.json").read_text())
    return results


def close(a: Path, b: Path, within: float) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        unit = 2.0**-64 if "/cumulative/" in name else 1  # of stored Fishers
        torch.testing.assert_close(
            tensor * unit, second[name] * unit, rtol=within, atol=within, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES))
def test_two_processes_end_with_the_weights_of_one(case: str, left: Path) -> None:
    """Weights, buffers, exemplars, Fisher sums: every tensor of every task's snapshot."""
    for task in range(3):
        file = f"snapshots/task-{task:02d}.safetensors"
        close(left / "one" / case / file, left / "two" / case / file, 2e-5)
    one = json.loads((left / "one" / case / "record.json").read_text())
    two = json.loads((left / "two" / case / "record.json").read_text())
    assert one["engine"]["ranks"] == [1]
    assert two["engine"]["ranks"] == [2]
    assert one["correct"] == two["correct"]
    for a, b in zip(one["losses"], two["losses"], strict=True):
        assert a["terms"] == {name: pytest.approx(values, rel=1e-3, abs=1e-4) for name, values in b["terms"].items()}


@pytest.mark.slow
def test_every_process_uses_a_streamed_source(left: Path) -> None:
    for rank in (0, 1):
        sources = results_of(left, rank)["sources"]
        assert sources["streamed"] == ["StreamedSource"] * 2
        assert sources["finetune"] == ["ImageSource"] * 2


@pytest.mark.slow
def test_only_rank_0_writes_files(left: Path) -> None:
    assert results_of(left, 1)["writes"] == []
    written = [path for path in results_of(left, 0)["writes"] if path.endswith("record.json")]
    assert len(written) == len(set(written)) == len(CASES) + len(OTHERS) + 4
    for case in CASES:
        assert results_of(left, 0)[case]["correct"] == results_of(left, 1)[case]["correct"]


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(OTHERS))
def test_both_processes_end_in_the_same_state(case: str, left: Path) -> None:
    """Weights, store, add-ons' state, bit for bit."""
    first, second = results_of(left, 0)[f"end of {case}"], results_of(left, 1)[f"end of {case}"]
    assert len(first[1]) > 10
    assert first == second


@pytest.mark.slow
def test_resume_with_another_number_of_processes(left: Path, digits: Dataset) -> None:
    out = left / "two" / "two then one"
    assert (out / "checkpoint.safetensors").exists()
    record = finish(Run(resolve(CASES["podnet+ivt"]), still(digits), out, left / "bases"))
    assert record["engine"]["ranks"] == [2, 1]
    assert results_of(left, 0)["one then two"]["engine"]["ranks"] == [1, 2]
    for folder in ("two then one", "one then two"):
        for task in range(3):
            file = f"snapshots/task-{task:02d}.safetensors"
            close(left / "one" / "podnet+ivt" / file, left / "two" / folder / file, 2e-5)


@pytest.mark.slow
def test_base_is_shared_among_runs_with_the_same_number_of_processes(left: Path) -> None:
    """Published by a run on two processes and loaded by another. A run that changed their number publishes none."""
    assert results_of(left, 0)["shared"] == {}
    for rank in (0, 1):
        assert results_of(left, rank)["shares"]["shared"]
    assert len(list((left / "bases").glob("*.safetensors"))) == 1


@pytest.mark.slow
def test_evaluation_sums_over_processes(left: Path, digits: Dataset) -> None:
    """Also with fewer rows than processes, and numbers that are not divisible."""
    given = {**CASES["podnet+ivt"], "start": str(left / "one" / "podnet+ivt" / "snapshots" / "task-01.safetensors")}
    run = Run(resolve(given), still(digits), left / "evaluated alone")
    for event in run.events():
        if isinstance(event, ev.Started):
            break
    parts, task = run.parts, run.parts.tasks[1]
    rows = parts.test.rows_of(0, task.n_seen)
    each = [confusion_by_classifier(parts.method, parts.world, parts.test, rows[::2][:n], task) for n in COUNTS]
    assert each[-1]["cnn"].diagonal().sum() > 0
    alone = [{name: counts.tolist() for name, counts in one.items()} for one in each]
    assert results_of(left, 0)["evaluation"] == results_of(left, 1)["evaluation"] == alone


def two_commands(*arguments: str | Path, killed_at: Path | None = None) -> list[tuple[int, str]]:
    """Exit status and error output of two processes of a command. The second is killed once a file exists."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}/src", "COLUMNS": "300"}
    command = [sys.executable, "-m", "incvec", *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        while killed_at is not None and not killed_at.exists() and ranks[0].poll() is None:
            time.sleep(0.01)
        if killed_at is not None:
            ranks[1].kill()
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, errors, strict=True)]


@pytest.mark.slow
def test_only_rank_0_reports_a_user_error(tmp_path: Path) -> None:
    """The others lose their connection and stay silent: missing data, a batch that is not divisible."""
    common = ("run", "--method", "finetune", "--device", "cpu", "--out", tmp_path / "run")
    missing = two_commands(*common, "--dataset", "folder", "--data-root", tmp_path / "nowhere")
    assert [status for status, _ in missing] == [1, 1]
    assert missing[0][1].startswith("error: ")
    assert "nowhere does not exist" in missing[0][1]
    odd = two_commands(*common, "--dataset", "digits", "--set", "finetune.batch_size=33")
    assert [status for status, _ in odd] == [1, 1]
    assert "batches of 33" in odd[0][1]
    assert "divisible by 2" in odd[0][1]
    assert missing[1][1] == odd[1][1] == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_rank_0_reports_a_killed_process(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("run", "--method", "podnet", "--device", "cpu", "--out", out, "--set", "podnet.epochs=500")
    first, second = two_commands(*command, killed_at=out / "checkpoint.safetensors")
    assert second[0] == -signal.SIGKILL
    assert read_meta(out / "checkpoint.safetensors")["position"]
    if first[0] == -signal.SIGABRT and "gloo::" in first[1]:
        return  # a thread of gloo noticed first and aborts: https://github.com/pytorch/pytorch/issues/50701
    assert first[0] == 1, first[1]
    assert "unless it was killed" in first[1]
    assert "Run the same command again" in first[1]
    assert "Traceback" not in first[1]


def test_only_rank_0_checks_batch_sizes() -> None:
    stages = [Stage("main", "main", epochs=1, batch_size=33, optimizer=Optimizer("sgd"))]
    with pytest.raises(ConfigError, match=r"batches of 33, which 2 processes .*divisible by 2"):
        Distributed(0, 2).check_batch_sizes(stages)
    Distributed(1, 2).check_batch_sizes(stages)


def test_closed_connection_is_a_peer_failure_only_if_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:41001")
    assert not is_peer_failure(closed)  # a single process has no peers
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_peer_failure(closed)
    assert not is_peer_failure(RuntimeError("shapes do not match"))
    assert not is_peer_failure(ConfigError("Connection closed by peer"))


@pytest.mark.slow
def test_processes_share_the_order_of_rows_but_not_their_views(left: Path) -> None:
    first, second = results_of(left, 0)["seeds"], results_of(left, 1)["seeds"]
    assert [shuffle for _, shuffle in first] == [shuffle for _, shuffle in second]
    assert all(a != b for (a, _), (b, _) in zip(first, second, strict=True))
    assert len(first) == 2 * 3 + 2 * 2  # two epochs of three main stages and two balanced ones


@pytest.mark.slow
def test_processes_agree_without_synchronized_batchnorm(left: Path) -> None:
    """Running statistics are averaged at the end of each epoch."""
    assert results_of(left, 0)["weights"] == results_of(left, 1)["weights"]
    config = json.loads((left / "two" / "local" / "record.json").read_text())["config"]
    assert config["sync_batchnorm"] is False
    synchronized = weights(left / "two" / "podnet+ivt" / "snapshots" / "task-00.safetensors")
    local = weights(left / "two" / "local" / "snapshots" / "task-00.safetensors")
    assert not torch.allclose(
        synchronized["method/model.backbone.stem.norm.running_var"],
        local["method/model.backbone.stem.norm.running_var"],
    )


@pytest.mark.slow
def test_sync_norm_equals_batchnorm_on_the_whole_batch(left: Path) -> None:
    """Against torch's own BatchNorm on the whole batch: output, gradients, statistics."""
    whole = norm_case(0, 1)[0]
    y, x_grad, weight_grad, mean, variance = run_norm(nn.BatchNorm2d(3), whole)
    parts = [torch.load(left / f"norm-{rank}.pt") for rank in (0, 1)]
    near = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), y, **near)
    # Each rank's loss is the mean over its half of the batch, and the gradients are averaged: twice, then half.
    torch.testing.assert_close(torch.cat([part[1] for part in parts]) / 2, x_grad, **near)
    torch.testing.assert_close((parts[0][2] + parts[1][2]) / 2, weight_grad, **near)
    for part in parts:
        torch.testing.assert_close(part[3], mean, **near)
        torch.testing.assert_close(part[4], variance, **near)


@pytest.mark.slow
def test_values_of_rank_0_are_broadcast(left: Path) -> None:
    for rank in (0, 1):
        assert results_of(left, rank)["broadcast"] == {"a": [1.0], "b": [[0, 7]], "c": [True, True]}


def test_single_process_changes_nothing() -> None:
    alone, tensor = Distributed(), torch.ones(3)
    alone.broadcast({"a": tensor})
    alone.mean_([tensor])
    alone.barrier()
    assert alone.is_main
    assert alone.broadcast_bool(True)
    assert not alone.any(False)
    assert torch.equal(alone.sum_(tensor), torch.ones(3))
    assert alone.slice(6) == slice(0, 6)
    assert [Distributed(rank, 3).slice(6) for rank in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 6)]


if __name__ == "__main__":
    work(Path(sys.argv[1]))
