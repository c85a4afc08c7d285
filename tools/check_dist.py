"""Build the distributions and try them in fresh environments: `make dist`.

1. Builds the sdist, and the wheel from the sdist; `twine check --strict` reads their metadata.
2. Compares the files of the wheel with those of src/incvec.
3. Installs the wheel into an environment with torch alone: the plug-in works, and `incvec` says how to install the lab.
4. Installs the wheel with the extra `lab` into a second environment: `incvec demo` runs.

Torch and the other requirements are linked from the environment that runs this program, which saves a download of
several GB. With --full, pip downloads them as it would for a user.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = """
import torch
from incvec import IVT

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ivt = IVT(model, interval=1, last="teleport")
for task in range(2):
    ivt.begin_task(optimizer=optimizer)
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    ivt.end_epoch()
    ivt.end_task()
assert ivt.report()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Build wheel and sdist, install them and try them.")
    parser.add_argument("--full", action="store_true", help="download all requirements, torch included")
    full = parser.parse_args().full
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel = build(work / "dist")
        compare_files(wheel)

        print("an environment with torch alone")
        python = make_environment(work / "plugin", None if full else ["torch"])
        install(python, str(wheel), full)
        run(python, "-c", PLUGIN, cwd=work)
        without_lab = subprocess.run([python, "-m", "incvec"], cwd=work, capture_output=True, text=True)
        if without_lab.returncode != 2 or "pip install 'incvec[lab]'" not in without_lab.stderr:
            sys.exit(f"`incvec` without the lab should say how to install it, but said:\n{without_lab.stderr}")

        print("an environment with the lab")
        python = make_environment(work / "lab", None if full else lab_requirements(wheel))
        install(python, f"{wheel}[lab]", full)
        run(str(Path(python).with_name("incvec")), "demo", "--out", "demo", cwd=work)
        if not (work / "demo" / "demo.png").exists():
            sys.exit("`incvec demo` ended without its figure demo.png")

        dist = ROOT / "dist"
        dist.mkdir(exist_ok=True)
        for file in (work / "dist").iterdir():
            (dist / file.name).write_bytes(file.read_bytes())
            print(f"checked: {dist.name}/{file.name}")


def run(*command: str, cwd: Path = ROOT, quiet: bool = False) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(command, check=True, cwd=cwd, env=environment, stdout=subprocess.DEVNULL if quiet else None)


def build(folder: Path) -> Path:
    """Build both distributions; returns the wheel."""
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT), quiet=True)
    files = sorted(folder.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    return next(file for file in files if file.suffix == ".whl")


def compare_files(wheel: Path) -> None:
    """Every file of the package is in the wheel, and no other."""
    source = ROOT / "src"
    expected = {
        str(file.relative_to(source))
        for file in (source / "incvec").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("incvec/")}
    if packed != expected:
        sys.exit(f"missing in the wheel: {sorted(expected - packed)}; not in src/incvec: {sorted(packed - expected)}")
    print(f"{wheel.name}: {len(packed)} files")


def lab_requirements(wheel: Path) -> list[str]:
    """The names of the packages that `incvec[lab]` requires."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA")))
        return [
            requirement.name
            for requirement in map(Requirement, message.requires or ())
            if requirement.marker is None or requirement.marker.evaluate({"extra": "lab"})
        ]


def make_environment(folder: Path, linked: Iterable[str] | None) -> str:
    """Create a virtual environment; returns its interpreter. Packages in `linked` are made importable by links."""
    venv.create(folder)
    if linked is not None:
        links = folder / "linked"
        links.mkdir()
        for entry in top_level_files(linked):
            (links / entry.name).symlink_to(entry)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "linked.pth").write_text(f"{links}\n")
    return str(folder / "bin" / "python")


def top_level_files(names: Iterable[str]) -> set[Path]:
    """Modules and metadata of installed packages and of everything that they require."""
    entries: set[Path] = set()
    queue = [(name, "") for name in names]
    seen = set()
    while queue:
        name, extra = queue.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                entries.add(Path(str(distribution.locate_file(file.parts[0]))))
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                queue += [(requirement.name, each) for each in ("", *requirement.extras)]
    return entries


def install(python: str, wheel: str, full: bool) -> None:
    """Install the wheel; without `full`, all its requirements have to be there."""
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", *([] if full else ["--no-index"]), wheel)
    run(*pip, "check")


if __name__ == "__main__":
    main()
