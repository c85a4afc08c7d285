"""Groups of runs with one base, kinds of failures, and what a sweep needs without Ray."""

from __future__ import annotations

import errno
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import incvec
from incvec.cluster.job import check_devices, classify, portable
from incvec.cluster.versions import different_versions, own_versions
from incvec.data import Dataset
from incvec.engine.build import build
from incvec.engine.shared_bases import base_key
from incvec.engine.sweep import base_group
from incvec.errors import Busy, CheckpointError, ConfigError, DataError, StorageError, TrainingError
from incvec.presets import resolve
from tests.cli.conftest import invoke, message
from tests.conftest import quick

VARIATIONS: list[dict[str, Any]] = [
    {}, {"oracle": True}, {"tasks": 1}, {"stop_after": 1}, {"snapshots": False}, {"task_sizes": [2, 1, 3]},
    {"seed": 1}, {"order_seed": 3}, {"base_classes": 4, "tasks": 1}, {"task_sizes": [3, 3]},
    {"base_classes": 0, "tasks": 6}, {"base_classes": 0, "tasks": 1}, {"last_batch": "keep"},
    {"podnet": {"lr": 0.05}}, {"podnet": {"memory": 2}}, {"podnet": {"memory_total": 20}},
]  # fmt: skip


def test_groups_are_the_runs_with_one_base_key(few: Dataset) -> None:
    given = [quick("podnet", *addons, **variation) for variation in VARIATIONS for addons in ((), ("ivt",))]
    configs = [resolve(each) for each in [*given, quick("finetune"), quick("finetune", "magmax")]]
    device = torch.device("cpu")
    keys = [base_key(config, few, build(config, few, torch.Generator(), device)) for config in configs]
    for (a, b), (first, second) in zip(
        itertools.combinations(configs, 2), itertools.combinations(keys, 2), strict=True
    ):
        assert (base_group(a) == base_group(b)) == (first == second), (a, b)
    assert 5 < len(set(keys)) < len(keys) / 2


def test_a_run_that_starts_from_a_snapshot_waits_for_nobody() -> None:
    assert base_group(resolve(quick("podnet", start="runs/a/snapshots/task-00.safetensors"))) is None


def full_disk() -> Exception:
    error = CheckpointError("could not write")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("wrong"), "run"),
        (TrainingError("the loss is not finite"), "run"),
        (KeyError("a bug"), "run"),
        (CheckpointError("another configuration"), "run"),
        (full_disk(), "node"),
        (OSError(errno.EIO, "broken disk"), "node"),
        (DataError("no images here"), "node"),
        (StorageError("not reachable"), "node"),
        (Busy("another process"), "busy"),
    ],
)
def test_kinds_of_failures(error: Exception, kind: str) -> None:
    assert classify(error) == kind
    assert classify(TrainingError("full"), out_of_memory=True) == "memory"


def test_errors_are_sent_with_their_message_alone() -> None:
    assert str(portable(ConfigError("wrong"))) == "wrong"
    assert isinstance(portable(ConfigError("wrong")), ConfigError)
    assert "No space left" in str(portable(full_disk().__cause__))  # type: ignore[arg-type]
    assert str(portable(KeyError("x"))) == "KeyError: 'x'"


def test_a_device_by_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="device=cuda:1"):
        check_devices({"run": resolve(quick("podnet", device="cuda:1"))})
    check_devices({"run": resolve(quick("podnet", device="cuda"))})


def test_versions_that_differ_are_named() -> None:
    assert different_versions(own_versions()) == ""
    assert " instead of 1.0: install the same" in different_versions([("torch", "1.0")])


WITHOUT_RAY = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Missing())
sys.argv = ["incvec", *sys.argv[1:]]
from incvec.__main__ import main
main()
"""


def without_ray(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_RAY, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE), "PATH": ""})


SOURCE = Path(incvec.__file__).parent.parent


def test_without_ray_an_error_says_what_to_install(tmp_path: Path) -> None:
    shown = without_ray("sweep", "digits", "--on", "ray", "--out", tmp_path)
    assert shown.returncode == 1
    assert "pip install 'incvec[cluster]'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_other_sweeps_do_not_need_ray(tmp_path: Path) -> None:
    """Nothing imports Ray, neither a sweep on this machine nor a Slurm script."""
    file = tmp_path / "one.yaml"
    file.write_text("runs: [{method: finetune, dataset: digits, stop_after: 1, finetune: {net: tiny, epochs: 1}}]")
    assert "finished digits" in without_ray("sweep", file, "--out", tmp_path / "out").stdout
    assert "#SBATCH" in without_ray("sweep", "digits", "--on", "slurm", "--dry-run").stdout


def test_at_once_is_for_this_machine(tmp_path: Path) -> None:
    result = invoke("sweep", "digits", "--on", "ray", "--at-once", "2", "--out", tmp_path)
    assert result.exit_code == 1
    assert "--per-gpu" in message(result)


@pytest.mark.parametrize("option", [["--storage", "s3://a"], ["--workers", "2"], ["--cores", "2"], ["--download"]])
def test_options_of_a_cluster_need_one(option: list[str], tmp_path: Path) -> None:
    result = invoke("sweep", "digits", *option, "--out", tmp_path)
    assert result.exit_code == 1
    assert f"{option[0]}: only with --on ray" in message(result)


@pytest.mark.parametrize("option", [["--partition", "a"], ["--nodes", "2"], ["--gpus-per-node", "0"], ["--sbatch=-x"]])
def test_options_of_slurm_need_it(option: list[str], tmp_path: Path) -> None:
    result = invoke("sweep", "digits", "--on", "ray", *option, "--out", tmp_path)
    assert result.exit_code == 1
    assert f"{option[0].partition('=')[0]}: only with --on slurm" in message(result)


def test_a_slurm_job_has_its_own_cluster(tmp_path: Path) -> None:
    result = invoke("sweep", "digits", "--on", "slurm", "--address", "10.0.0.1:6379", "--dry-run", "--out", tmp_path)
    assert result.exit_code == 1
    assert "--address: only with --on ray" in message(result)


def test_data_source_needs_a_place_on_the_nodes(tmp_path: Path) -> None:
    result = invoke("sweep", "digits", "--on", "ray", "--data-source", "s3://a", "--out", tmp_path)
    assert result.exit_code == 1
    assert "needs --data-root" in message(result)


@pytest.mark.parametrize("on", ["ray", "slurm"])
def test_a_device_by_number_is_refused_before_anything_starts(on: str, tmp_path: Path) -> None:
    result = invoke("sweep", "digits", "--on", on, "--set", "device=cuda:0", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "has device=cuda:0; on a cluster every worker has a GPU of its own" in message(result)
    assert not (tmp_path / "out").exists()


def test_attach_or_stop(tmp_path: Path) -> None:
    result = invoke("sweep", "digits", "--attach", "--stop", "--address", "10.0.0.1:1", "--out", tmp_path)
    assert result.exit_code == 1
    assert "give one of them" in message(result)


def test_dry_run_finds_what_is_in_the_storage(tmp_path: Path) -> None:
    given = ["sweep", "digits", "--on", "ray", "--storage", tmp_path, "--dry-run"]
    folder = invoke(*given).stdout.splitlines()[1].split()[-1]
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "record.json").touch()
    line = invoke(*given).stdout.splitlines()[1]
    assert line.startswith("finished")
    assert line.endswith(folder)


@pytest.mark.parametrize("option", ["--attach", "--stop"])
def test_a_running_sweep_is_found_by_its_address(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = invoke("sweep", "digits", option, "--out", tmp_path)
    assert result.exit_code == 1
    assert "give --address" in message(result)
