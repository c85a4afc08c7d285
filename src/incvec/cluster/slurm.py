"""A sweep as a Slurm job: a batch script that starts Ray on the nodes of its allocation and runs the sweep there.

Inside the allocation it is a sweep on Ray. A job that was ended by its time limit is submitted again: the runs continue
from their checkpoints.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from incvec.atomic_files import write_bytes
from incvec.errors import ConfigError
from incvec.file_names import safe_name

# The head of the Ray cluster is on the first node of the allocation, where Slurm runs the batch script. Its port comes
# from the number of the job, so that two jobs on one node do not meet.
BODY = """\
set -euo pipefail
export RAY_USAGE_STATS_ENABLED=0
unset RAY_ADDRESS
# A secret of this job: other users of the nodes cannot connect to its cluster.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
head=$(hostname --ip-address | awk '{{print $1}}')
port=$((20000 + SLURM_JOB_ID % 20000))
export INCVEC_HEAD="$head" INCVEC_PORT="$port" INCVEC_PYTHON={python}
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}"

# One Ray process per node, until the sweep has ended.
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 bash -c '
  start() {{
    exec "$INCVEC_PYTHON" -m ray.scripts.scripts start --block --num-cpus="$SRUN_CPUS_PER_TASK"{gpus} "$@"
  }}
  if [ "$SLURM_PROCID" = 0 ]; then
    start --head --node-ip-address="$INCVEC_HEAD" --port="$INCVEC_PORT" --include-dashboard=false
  fi
  for attempt in $(seq 120); do
    (: >"/dev/tcp/$INCVEC_HEAD/$INCVEC_PORT") 2>/dev/null && break
    sleep 1
  done
  start --address="$INCVEC_HEAD:$INCVEC_PORT"
' &
cluster=$!
trap 'kill "$cluster" 2>/dev/null || true; wait "$cluster" 2>/dev/null || true' EXIT

for attempt in $(seq 120); do
  (: >"/dev/tcp/$head/$port") 2>/dev/null && break
  kill -0 "$cluster" || {{ echo "Ray did not start on the nodes of this job" >&2; exit 1; }}
  sleep 1
done
{command} --address "$head:$port"
"""


@dataclass(frozen=True)
class SlurmJob:
    """What is asked of Slurm."""

    nodes: int = 1
    partition: str | None = None
    gpus_per_node: int | None = None
    options: tuple[str, ...] = ()  # further ones of sbatch, such as --time=24:00:00


def make_script(title: str, arguments: Sequence[str], job: SlurmJob, log: Path) -> str:
    """The batch script. `arguments` are those of `incvec sweep`, without --on and --address."""
    for option in job.options:
        if not option.startswith("-"):
            raise ConfigError(f"--sbatch {option!r} is not an option of sbatch; expected one such as --time=24:00:00.")
    settings = [
        f"--job-name=incvec-{safe_name(title)}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--output={log}",
        *([] if job.partition is None else [f"--partition={job.partition}"]),
        *([] if job.gpus_per_node is None else [f"--gpus-per-node={job.gpus_per_node}"]),
        *job.options,
    ]
    for setting in settings:
        if not setting.isprintable():  # another line of the script
            raise ConfigError(f"{setting!r} is not an option of sbatch: it has characters that are not printable.")
    python = sys.executable
    body = BODY.format(
        nodes=job.nodes,
        python=shlex.quote(python),
        gpus="" if job.gpus_per_node is None else f" --num-gpus={job.gpus_per_node}",
        command=shlex.join([python, "-m", "incvec", "sweep", *arguments, "--on", "ray"]),
    )
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {setting}" for setting in settings), body])


def submit(script: str, file: Path) -> str:
    """Write the script and submit it; returns what sbatch printed."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no `sbatch` on this machine. Submit from a node where Slurm is installed, or print the script "
            "with --dry-run."
        )
    write_bytes(file, script.encode(), ConfigError)
    done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"sbatch refused {file}: {done.stderr.strip() or done.stdout.strip()}.")
    return done.stdout.strip()
