"""Slurm jobs, with stubs of `sbatch` and `srun` that run the scripts on this machine. No real Slurm was at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import invoke, message
from tests.cluster.conftest import TWELVE, same_sweep, sweep, until

# Runs the script as Slurm does: on the first node, with the variables of the job, its output in a file.
SBATCH = """#!/bin/bash
script=$1
output=$(sed -n 's/^#SBATCH --output=//p' "$script")
nodes=$(sed -n 's/^#SBATCH --nodes=//p' "$script")
export SLURM_JOB_ID=@JOB@ SLURM_NNODES=$nodes
echo "Submitted batch job $SLURM_JOB_ID"
bash "$script" > "${output//%j/$SLURM_JOB_ID}" 2>&1 < /dev/null
echo $? > "$script.exit"
"""

# Starts the command once for each task, and ends all of them when it is ended itself.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  case $1 in --ntasks=*) tasks=${1#*=};; esac
  shift
done
pids=()
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task "$@" & pids+=($!)
done
trap 'kill "${pids[@]}"' TERM
wait
wait
"""


@pytest.fixture
def slurm(tmp_path: Path) -> tuple[str, int]:
    """A PATH with the stubs, and the number of the next job."""
    job = 4000 + os.getpid() % 10000
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH.replace("@JOB@", str(job))), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}", job


def processes(text: str) -> list[str]:
    """The commands of this machine's processes that contain the text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [command for command in found if text in command]


@pytest.mark.slow
def test_job_trains_the_sweep_and_leaves_nothing_behind(slurm: tuple[str, int], local: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path, job = slurm
    out = tmp_path / "runs"
    printed = sweep(*TWELVE, "--on", "slurm", "--partition", "gpu", "--nodes", "2", "--out", out, PATH=path)
    assert f"Submitted batch job {job}" in printed
    log = (out / "slurm" / f"{job}.log").read_text()
    assert (out / "slurm/digits.sh.exit").read_text().strip() == "0", log
    assert "2 nodes, 2 workers" in log
    same_sweep(out, local)
    until(lambda: not processes(f":{20000 + job}"), seconds=60)


def test_script_asks_slurm_for_what_was_given(tmp_path: Path) -> None:
    result = invoke(
        "sweep", "cifar100-hosts", "--on", "slurm", "--partition", "a100", "--nodes", "4", "--gpus-per-node", "8",
        "--sbatch=--time=24:00:00", "--seeds", "0,1", "--only", "podnet", "--set", "ivt.interval=5", "--per-gpu", "6",
        "--storage", "s3://bucket/runs", "--out", tmp_path, "--data-root", tmp_path, "--dry-run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for option in ("--nodes=4", "--partition=a100", "--gpus-per-node=8", "--time=24:00:00"):
        assert f"#SBATCH {option}" in lines
    command = next(line for line in lines if " -m incvec sweep " in line)
    expected = [
        "cifar100-hosts", "--seeds 0,1", "--only podnet", "--set ivt.interval=5", "--per-gpu 6", "--on ray",
        "--storage s3://bucket/runs", f"--data-root {tmp_path}", '--address "$head:$port"',
    ]  # fmt: skip
    assert [words for words in expected if words not in command] == []
    script = tmp_path / "script.sh"
    script.write_text(result.output)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert not (tmp_path / "slurm").exists()


@pytest.mark.parametrize("option", ["time=1", "--time=1\n#SBATCH --uid=0"])
def test_option_of_sbatch_is_one_line_and_an_option(option: str, tmp_path: Path) -> None:
    result = invoke("sweep", "digits", "--on", "slurm", f"--sbatch={option}", "--out", tmp_path, "--dry-run")
    assert result.exit_code == 1
    assert "is not an option of sbatch" in message(result)


def test_without_sbatch_an_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("sbatch") is None
    result = invoke("sweep", "digits", "--on", "slurm", "--out", tmp_path)
    assert result.exit_code == 1
    assert "there is no `sbatch` on this machine" in message(result)


def test_sbatch_that_refuses_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = invoke("sweep", "digits", "--on", "slurm", "--partition", "x", "--out", tmp_path)
    assert result.exit_code == 1
    assert "invalid partition" in message(result)
