"""Shared beginnings, runs that begin at a snapshot, many runs at once, and locks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.contracts import Batch, Terms
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine import run as run_module
from incvec.engine.run import finish
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.engine.sweep import expand, read_sweep
from incvec.errors import Busy, CheckpointError, ConfigError, TrainingError
from incvec.methods.podnet import PODNet
from incvec.presets import changed_settings
from tests.conftest import always_saving_run, make_run, quick, same_record, same_weights


def test_a_shared_base_is_trained_once_and_changes_no_bit(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without and with IVT, the oracle, another number of tasks: one base, the same ends as from scratch."""
    trained = 0
    original = PODNet.begin_stage

    def counting(self: PODNet, task: object, stage: object) -> torch.Tensor:
        nonlocal trained
        trained += self.task.index == 0
        return original(self, task, stage)  # type: ignore[arg-type]

    monkeypatch.setattr(PODNet, "begin_stage", counting)
    cases = {
        "plain": quick("podnet"),
        "ivt": quick("podnet", "ivt"),
        "oracle": quick("podnet", oracle=True),
        "one": quick("podnet", tasks=1),
    }
    for name, given in cases.items():
        finish(make_run(few, tmp_path / "shared" / name, given, tmp_path / "bases"))
    assert trained == 1
    for name, given in cases.items():
        alone = make_run(few, tmp_path / "alone" / name, given)
        record = finish(alone)
        again = finish(make_run(few, tmp_path / "shared" / name, given, tmp_path / "bases"))
        same_record(again, record)
        last = len(record["accuracy"]) - 1
        same_weights(
            alone.snapshot_path(last), tmp_path / "shared" / name / "snapshots" / f"task-{last:02d}.safetensors"
        )
    assert finish(make_run(few, tmp_path / "shared" / "ivt", cases["ivt"]))["base"]["shared"]


def test_another_seed_or_setting_has_another_base(few: Dataset, tmp_path: Path) -> None:
    for given in (quick("podnet"), quick("podnet", seed=1), quick("podnet", podnet={"lr": 0.01})):
        run = make_run(few, tmp_path / str(len(list(tmp_path.iterdir()))), given, tmp_path / "bases")
        finish(run)
    assert len(list((tmp_path / "bases").glob("*.safetensors"))) == 3


def test_a_base_published_meanwhile(few: Dataset, tmp_path: Path) -> None:
    """Broken off inside the base, while another run finishes that base: it goes on with its own."""
    given, bases = quick("podnet"), tmp_path / "bases"
    first = always_saving_run(few, tmp_path / "first", given, bases)
    events = first.events()
    for _ in events:
        if first.checkpoint_path.exists():
            break
    events.close()
    record = finish(make_run(few, tmp_path / "second", given, bases))
    same_record(finish(make_run(few, tmp_path / "first", given, bases)), record)


def test_what_another_run_is_writing_in_the_folder_of_bases_is_let_be(few: Dataset, tmp_path: Path) -> None:
    given, bases = quick("podnet"), tmp_path / "bases"
    finish(make_run(few, tmp_path / "first", given, bases))
    (base,) = bases.glob("*.safetensors")
    base.unlink()
    own, others = bases / f".{base.name}.killed", bases / ".0123456789abcdef01234567.safetensors.written"
    own.touch()
    others.touch()
    finish(make_run(few, tmp_path / "second", given, bases))
    assert base.exists()
    assert others.exists()
    assert not own.exists()


def test_beginning_at_a_snapshot(few: Dataset, tmp_path: Path) -> None:
    given = quick("podnet", "ivt")
    whole = make_run(few, tmp_path / "whole", given)
    record = finish(whole)
    later = make_run(few, tmp_path / "later", {**given, "start": str(whole.snapshot_path(1))})
    assert finish(later)["accuracy"] == record["accuracy"]
    same_weights(whole.snapshot_path(2), later.snapshot_path(2))


def test_beginning_at_ones_own_base(few: Dataset, tmp_path: Path) -> None:
    """A snapshot of the base task that a run would have trained itself counts as a shared base, no other does."""
    whole = make_run(few, tmp_path / "whole", quick("podnet"))
    finish(whole)
    cases: list[tuple[int, dict[str, Any], bool]] = [
        (0, {"oracle": True}, True), (1, {}, False), (0, {"seed": 3}, False), (0, {"precision": "bf16"}, False),
    ]  # fmt: skip
    for number, (task, change, shared) in enumerate(cases):
        given = {**quick("podnet", start=str(whole.snapshot_path(task))), **change}
        record = finish(make_run(few, tmp_path / str(number), given))
        assert (record["base"]["snapshot"], record["base"]["shared"]) == (given["start"], shared)
        assert ("start" in changed_settings(record["config"])) is not shared
        same_weights(whole.snapshot_path(task), make_run(few, tmp_path / str(number), given).snapshot_path(task))
        assert finish(make_run(few, tmp_path / str(number), given)) == record  # done already
        without = {key: value for key, value in given.items() if key != "start"}
        if shared:
            assert finish(make_run(few, tmp_path / str(number), without)) == record
        for other in [{**given, "start": str(whole.snapshot_path(2))}, *([] if shared else [without])]:
            with pytest.raises(CheckpointError, match="another configuration"):
                finish(make_run(few, tmp_path / str(number), other))


def test_beginning_at_a_snapshot_in_ones_own_folder(few: Dataset, tmp_path: Path) -> None:
    """It stays as it is, and says whose it was."""
    whole = make_run(few, tmp_path / "whole", quick("podnet"))
    finish(whole)
    whole.record_path.unlink()
    before = whole.snapshot_path(0).read_bytes()
    finish(make_run(few, tmp_path / "whole", quick("podnet", oracle=True, start=str(whole.snapshot_path(0)))))
    assert whole.snapshot_path(0).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order_seed": 5}, "its classes so far, or their images, differ"),
        ({"addons": ["ivt"]}, "did not use the add-on ivt"),
        ({"podnet": {"net": "small"}}, "podnet with small"),
        ({"stop_after": 1}, "it is of task 2, this run ends after task 1"),
        ({"stop_after": 2}, "it is of task 2, this run ends after task 2, so nothing is left to train"),
        ({"base_classes": 4, "tasks": 2}, r"its tasks so far have \[2, 2\] classes, this run's \[4, 1\]"),
    ],
)
def test_a_snapshot_of_another_past_is_refused(
    change: dict[str, object], message: str, few: Dataset, tmp_path: Path
) -> None:
    whole = make_run(few, tmp_path / "whole", quick("podnet"))
    finish(whole)
    given = quick("podnet", start=str(whole.snapshot_path(1)))
    given = {**given, **change, "podnet": {**given["podnet"], **change.get("podnet", {})}}  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=message):
        finish(make_run(few, tmp_path / "later", given))


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), (b"no tensors", "it is damaged")])
def test_a_beginning_that_cannot_be_read(content: bytes | None, message: str, few: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "task-00.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{message}.*RUN/snapshots/task-NN"):
        finish(make_run(few, tmp_path / "run", quick("podnet", start=str(file))))


def test_a_snapshot_is_no_checkpoint(few: Dataset, tmp_path: Path) -> None:
    """Gone on from, it would leave a folder without the snapshots before it."""
    run = make_run(few, tmp_path / "run", quick("finetune"))
    finish(run)
    run.record_path.unlink()
    run.checkpoint_path.write_bytes(run.snapshot_path(1).read_bytes())
    with pytest.raises(CheckpointError, match="is not a checkpoint but a snapshot; move it away"):
        finish(make_run(few, tmp_path / "run", quick("finetune")))


def test_two_runs_in_one_folder(few: Dataset, tmp_path: Path) -> None:
    first = make_run(few, tmp_path / "run", quick("finetune"))
    events = first.events()
    next(events)
    with pytest.raises(CheckpointError, match="another process is working"):
        finish(make_run(few, tmp_path / "run", quick("finetune")))
    events.close()
    finish(make_run(few, tmp_path / "run", quick("finetune")))


def test_a_folder_is_looked_at_before_the_device_is_filled(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = always_saving_run(few, tmp_path / "run", quick("finetune"))
    events = first.events()
    for _ in events:
        if first.checkpoint_path.exists():
            break

    def build(*_: Any) -> Any:
        raise AssertionError("data were placed on the device")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "build", build)
        with pytest.raises(CheckpointError, match="another process is working"):
            finish(make_run(few, tmp_path / "run", quick("finetune")))
        events.close()
        with pytest.raises(CheckpointError, match=r"another configuration \(seed: 0 -> 1\)"):
            finish(make_run(few, tmp_path / "run", quick("finetune", seed=1)))
    finish(make_run(few, tmp_path / "run", quick("finetune")))  # neither has kept the lock


def test_whoever_stops_listening_stops_the_runs(few: Dataset, tmp_path: Path) -> None:
    runs = [make_run(few, tmp_path / str(seed), quick("finetune", seed=seed)) for seed in (0, 1)]
    events = run_concurrently([lambda run=run: run for run in runs], 2)  # type: ignore[misc]
    seen = set()
    for number, event in events:
        seen.add(number) if isinstance(event, ev.EpochEnded) else None
        if len(seen) == 2:
            break
    events.close()
    for seed in (0, 1):  # their folders are free at once, without waiting for a collector
        finish(make_run(few, tmp_path / str(seed), quick("finetune", seed=seed)))


def test_many_at_once_as_one_after_another(few: Dataset, tmp_path: Path) -> None:
    """Four runs on one base, two at a time: never more than two at work, and each as if it were alone."""
    cases = [quick("podnet", *addons, seed=seed) for seed in (0, 1) for addons in ((), ("ivt",))]
    cases.append(quick("podnet", seed=2))
    bases = tmp_path / "bases"
    runs = [make_run(few, tmp_path / str(n), given, bases) for n, given in enumerate(cases)]
    working: set[int] = set()
    most, ended = 0, {}
    for number, event in run_concurrently([lambda run=run: run for run in runs], at_once=2):  # type: ignore[misc]
        if isinstance(event, ev.EpochEnded):
            working.add(number)
            most = max(most, len(working))
        elif isinstance(event, ev.Finished):
            working.discard(number)
            ended[number] = event.record
    assert most == 2
    for number, given in enumerate(cases):
        same_record(ended[number], finish(make_run(few, tmp_path / f"alone{number}", given)))


def test_two_processes_share_the_runs_of_one_base(few: Dataset, tmp_path: Path) -> None:
    """The first has begun them all, and all but one wait for the base: they are free for the second to take."""
    cases = [quick("podnet", *addons, oracle=oracle) for oracle in (False, True) for addons in ((), ("ivt",))]
    make = [partial(make_run, few, tmp_path / str(n), given, tmp_path / "bases") for n, given in enumerate(cases)]
    first = run_concurrently(make, 2)
    begun: set[int] = set()
    while len(begun) < len(cases):
        number, event = next(first)
        begun.add(number) if isinstance(event, ev.Started) else None
    processes = {"first": first, "second": run_concurrently(make, 2)}
    did: dict[str, set[int]] = {"first": set(), "second": set()}
    while processes:
        for name, events in list(processes.items()):
            found = next(events, None)
            if found is None:
                del processes[name]
            elif isinstance(found[1], ev.Finished) and not found[1].already:
                did[name].add(found[0])
            elif isinstance(found[1], Failed):
                assert isinstance(found[1].error, Busy)
    assert did["first"] | did["second"] == set(range(len(cases)))
    assert did["first"]
    assert did["second"]
    assert not did["first"] & did["second"]
    assert len(list((tmp_path / "bases").glob("*.safetensors"))) == 1
    for number, given in enumerate(cases[:2]):
        same_record(finish(make[number]()), finish(make_run(few, tmp_path / f"alone{number}", given)))


def test_begun_elsewhere_while_it_waited_for_its_base(few: Dataset, tmp_path: Path) -> None:
    """Another process took a waiting run, and was stopped: this one goes on from there."""
    given, bases = quick("podnet"), tmp_path / "bases"
    trains = always_saving_run(few, tmp_path / "trains", given, bases).events()
    waits = always_saving_run(few, tmp_path / "run", given, bases)
    events = waits.events()
    while not isinstance(next(trains), ev.EpochEnded):
        pass
    while not (isinstance(event := next(events), ev.Tick) and event.blocked):
        pass
    other = always_saving_run(few, tmp_path / "run", given, tmp_path / "others")
    broken = other.events()
    while not isinstance(next(broken), ev.TaskEnded):
        pass
    broken.close()
    trains.close()
    rest = list(events)
    assert all(event.task > 0 for event in rest if isinstance(event, ev.EpochEnded))
    assert isinstance(rest[-1], ev.Finished)
    same_record(rest[-1].record, finish(always_saving_run(few, tmp_path / "alone", given)))


def test_a_run_of_another_process_is_asked_for_once_more(few: Dataset, tmp_path: Path) -> None:
    """That process is stopped before this one has ended: its run is done here."""
    make = [partial(make_run, few, tmp_path / str(seed), quick("finetune", seed=seed)) for seed in (0, 1)]
    other = make[0]().events()
    next(other)
    ended = []
    for number, event in run_concurrently(make, 2):
        assert not isinstance(event, Failed)
        if isinstance(event, ev.Finished):
            other.close()
            ended.append(number)
    assert ended == [1, 0]


def test_one_failure_does_not_stop_the_others(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PODNet.end_task

    def failing(self: PODNet, task: object) -> None:
        if self.options.lr == 0.01:
            raise RuntimeError("broken")
        original(self, task)  # type: ignore[arg-type]

    monkeypatch.setattr(PODNet, "end_task", failing)
    runs = [
        make_run(few, tmp_path / "bad", quick("podnet", podnet={"lr": 0.01})),
        make_run(few, tmp_path / "good", quick("podnet")),
    ]
    events = list(run_concurrently([lambda run=run: run for run in runs], at_once=2))  # type: ignore[misc]
    assert [n for n, event in events if isinstance(event, Failed)] == [0]
    assert [n for n, event in events if isinstance(event, ev.Finished)] == [1]


def test_a_sweeps_combinations() -> None:
    block = {"method": "podnet", "addons": [[], ["ivt"]], "seed": [0, 1], "podnet": {"memory": [5, 20], "lr": 0.1}}
    found = list(expand(block))
    assert len(found) == 8
    assert {"method": "podnet", "addons": ["ivt"], "seed": 1, "podnet": {"memory": 5, "lr": 0.1}} in found
    assert list(expand({"method": "podnet", "podnet": {"milestones": [3, 4]}})) == [
        {"method": "podnet", "podnet": {"milestones": [3, 4]}}
    ]


def test_no_block_of_a_sweep_vanishes(tmp_path: Path) -> None:
    assert list(expand({"method": "podnet", "addons": []})) == [{"method": "podnet", "addons": []}]
    assert list(expand({"podnet": {"milestones": [[], [3]]}})) == [
        {"podnet": {"milestones": []}},
        {"podnet": {"milestones": [3]}},
    ]
    file = tmp_path / "mine.yaml"
    for text, name in (("seed: []", "seed"), ("podnet: {lr: []}", "podnet.lr"), ("class_order: []", "class_order")):
        file.write_text(f"runs: [{{method: finetune}}, {{method: podnet, {text}}}]")
        with pytest.raises(ConfigError, match=rf"mine.yaml, block 2 of `runs`.*{name} is an empty list"):
            read_sweep(file)


def test_a_loss_that_does_not_reach_the_network(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from incvec.methods.finetune import Finetune

    original = Finetune.loss

    def cut(self: Finetune, batch: Batch) -> Terms:
        with torch.no_grad():
            features = self.model(batch.images).features
        return {"ce": self.model.head(features).square().mean()} if self.task.index else original(self, batch)

    monkeypatch.setattr(Finetune, "loss", cut)
    with pytest.raises(TrainingError, match="depends on none of them"):
        finish(make_run(few, tmp_path / "run", quick("finetune")))
