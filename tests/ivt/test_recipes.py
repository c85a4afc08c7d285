"""The recipes of docs/plugin-recipes.md inside the real code bases, compared with an independent float64 witness.

INCVEC_MAMMOTH and INCVEC_PYCIL name checkouts of them; without, the tests are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .recipes.recipe import source

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def checkout(variable: str) -> Path:
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no checkout")
    return Path(path).resolve()


def run(script: str, *arguments: Any, folder: Path) -> dict[str, Any]:
    paths = [str(HERE.parents[1] / "src"), str(HERE / "recipes"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:witness", str(HERE / "recipes" / script), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print({"host": arguments[1], **result})
    return result


def check(seen: dict[str, Any], steps: list[int]) -> None:
    assert seen["steps"] == [[count] * 3 for count in steps]  # three epochs per task, of which no step was missed
    assert seen["teleports"] == 2 * (len(steps) - 1)  # after all but the last epoch of tasks 2, 3, ...
    assert seen["distance"] > 1e-3
    assert seen["unseen_distance"] == 0
    for kind in ("theta", "fisher", "scale", "cumulative"):
        assert seen[kind] < 4e-7, kind


@pytest.mark.parametrize(("name", "options"), [("icarl", {}), ("icarl", {"exclude": []}), ("podnet", {"exclude": []})])
def test_pycil(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    options = {"interval": 1, "batchnorm": "keep", **options}
    seen = run("run_pycil.py", checkout("INCVEC_PYCIL"), name, json.dumps(options), folder=tmp_path)
    check(seen, [4, 5, 4])  # the classes 5, 4, 3 with 12 images each, and 24 exemplars; batches of 16


@pytest.fixture
def mammoth(tmp_path: Path) -> Path:
    """A copy of the checkout with the recipes' files, without data sets that download CLIP when they are imported."""
    copy = tmp_path / "mammoth"
    shutil.copytree(checkout("INCVEC_MAMMOTH"), copy, ignore=shutil.ignore_patterns(".git", "data", "docs", "*.ipynb"))
    for path in (copy / "datasets").glob("*.py"):
        if "open_clip" in path.read_text(encoding="utf-8"):
            path.unlink()
    for name in ("er", "icarl"):
        (copy / "models" / f"{name}_ivt.py").write_text(source(f"models/{name}_ivt.py"), encoding="utf-8")
    return copy


def test_mammoth_er_and_its_checkpoints(mammoth: Path, tmp_path: Path) -> None:
    saving = ["--savecheck", "task", "--ckpt_name", "test"]
    check(run("run_mammoth.py", mammoth, "er-ivt", *saving, folder=tmp_path), [3, 3, 3])
    first = next(mammoth.glob("**/test_*_0.pt"))
    resumed = run("run_mammoth.py", mammoth, "er-ivt", "--loadcheck", first, "--start_from", 1, folder=tmp_path)
    assert resumed["task"] == 3  # tasks 2 and 3 follow the checkpoint's first
    assert resumed["teleports"] == 4
    check({**resumed, "steps": [[3] * 3, *resumed["steps"]]}, [3, 3, 3])


def test_mammoth_icarl(mammoth: Path, tmp_path: Path) -> None:
    seen = run("run_mammoth.py", mammoth, "icarl-ivt", "--ivt_exclude", folder=tmp_path)
    check(seen, [3, 6, 6])  # with 20 exemplars
