"""Lines between snapshots: starts, ends, barriers, fits, and errors that say what to run first."""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.offsetbox import AnchoredOffsetbox
from matplotlib.text import Text

from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import ConfigError, DataError
from incvec.presets import resolve
from incvec.study import style
from incvec.study.geometry import barrier, snapshot_model
from incvec.study.geometry.figures import draw_path, draw_tradeoff, looks, named
from incvec.study.geometry.lines import Setting, fit, walk
from incvec.study.geometry.snapshots import command, last_task, run_config
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import Finished


def test_barriers_by_hand() -> None:
    assert barrier([80.0, 50.0, 60.0]) == 20.0  # halfway the chord is at 70
    assert barrier([80.0, 75.0, 60.0]) == 0.0  # above the chord all the way
    assert barrier([1.0, 3.0, 2.0], falls=False) == 1.5
    assert barrier([1.0, 1.0, 2.0], falls=False) == 0.0
    assert barrier([5.0, 4.0]) == 0.0


def test_fits_by_hand() -> None:
    assert fit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == {"slope": 2.0, "intercept": 1.0, "r2": 1.0}
    found = fit([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 2.0])
    assert found["slope"] == pytest.approx(0.6)
    assert found["intercept"] == pytest.approx(0.1)
    assert found["r2"] == pytest.approx(0.9)
    assert fit([4.0, 4.0], [1.0, 2.0])["slope"] is None


def test_lines_of_three_runs(finished: Finished, few: Dataset, tmp_path: Path) -> None:
    found = walk([finished.plain, finished.ivt], finished.oracle, few, 0, None, Setting(points=5))
    assert [curve["name"] for curve in found["curves"]] == ["PODNet", "PODNet + IVT", "PODNet oracle"]
    assert (found["start"], found["task_to"]) == ("oracle", 2)
    starts = {tuple(curve["accuracy"]["tasks"][0][:1]) for curve in found["curves"]}
    assert len(starts) == 1  # one start for all
    for curve, name in zip(found["curves"], ("plain", "ivt", "oracle"), strict=True):
        last = finished.records[name]["classifiers"]["cnn"]["accuracy"][2]
        assert [values[-1] for values in curve["accuracy"]["tasks"]] == last
        assert curve["accuracy"]["old"] == curve["accuracy"]["tasks"][0]
        assert curve["barrier"]["accuracy"]["old"] == barrier(curve["accuracy"]["old"])
        a = snapshot_model(finished.oracle, 0, few, grow_to=2).model
        b = snapshot_model(getattr(finished, name), 2, few).model
        square = sum(
            float((p - q).detach().double().square().sum()) for p, q in zip(a.parameters(), b.parameters(), strict=True)
        )
        assert curve["length"] == pytest.approx(math.sqrt(square))
        assert curve["length_of_shared"] < curve["length"]
        assert curve["distance"] == pytest.approx([x * curve["length"] for x in (0, 0.25, 0.5, 0.75, 1)])
    for axis in ("distance", "share"):
        assert all(f.stat().st_size > 1000 for f in draw_path({**found, "axis": axis}, tmp_path / axis))
    assert all(f.stat().st_size > 1000 for f in draw_tradeoff({"panels": [found, found]}, tmp_path / "tradeoff"))


def test_some_images_of_each_task_stand_for_all_of_them(few: Dataset, tmp_path: Path) -> None:
    """A base task twice as large weighs twice as much, though as many of its images are looked at."""
    given = quick("finetune", base_classes=4, tasks=2)
    record = finish(make_run(few, tmp_path / "run", given))
    sizes = record["test_counts"]
    assert sizes[0] > 1.5 * sizes[1]
    curve = walk([tmp_path / "run"], None, few, 1, 2, Setting(points=2, images=4))["curves"][0]
    assert curve["counts"] == [4, 4, 4]
    for what in ("accuracy", "loss"):
        first, second, _ = curve[what]["tasks"]
        wanted = [(sizes[0] * a + sizes[1] * b) / (sizes[0] + sizes[1]) for a, b in zip(first, second, strict=True)]
        assert curve[what]["old"] == pytest.approx(wanted)


def test_a_line_starts_at_the_oracles_model_or_at_its_own(finished: Finished, few: Dataset) -> None:
    lengths = {}
    for start in ("oracle", "own"):
        setting = Setting(points=2, start=start)  # type: ignore[arg-type]
        curve = walk([finished.plain], finished.oracle, few, 1, 2, setting)["curves"][0]
        lengths[start] = curve["length"]
        begin = finished.oracle if start == "oracle" else finished.plain
        assert curve["start_run"] == begin.name
        own = snapshot_model(begin, 1, few, grow_to=2)
        with torch.no_grad():
            rows = own.parts.test.rows_of(0, 4)
            batch = own.parts.test.fetch(rows)
            right = own.model(batch.images).logits.argmax(1) == batch.labels
        assert curve["accuracy"]["old"][0] == pytest.approx(100 * float(right.double().mean()))
    assert lengths["oracle"] != lengths["own"]


def test_seeds_are_not_mixed_silently(finished: Finished, few: Dataset, tmp_path: Path) -> None:
    other = tmp_path / "other"
    finish(make_run(few, other, quick("podnet", seed=4, podnet={"epochs": 1})))
    told = r"differ in their seeds \(3 and 4\).*--start own.*Run first:\n  incvec run --method podnet .*--seed 3"
    with pytest.raises(DataError, match=told):
        walk([finished.plain, other], finished.oracle, few, 0, 2, Setting(points=2))
    found = walk([finished.plain, other], finished.oracle, few, 0, 2, Setting(points=2, start="own"))
    assert [curve["name"] for curve in found["curves"]] == ["PODNet, seed 3", "PODNet, seed 4", "PODNet oracle, seed 3"]
    drawn = looks(found["curves"])
    assert [look.label for look in drawn] == [curve["name"] for curve in found["curves"]]
    assert len({(look.color, look.marker) for look in drawn}) == 3
    again = shutil.copytree(finished.plain, tmp_path / "again")
    found = walk([finished.plain, again], None, few, 0, 2, Setting(points=2))
    assert [curve["name"] for curve in found["curves"]] == ["PODNet (plain)", "PODNet (again)"]


def test_without_an_oracle_lines_start_at_their_own(finished: Finished, few: Dataset) -> None:
    assert walk([finished.ivt], None, few, 0, 1, Setting(points=2))["start"] == "own"


def test_the_last_task_is_the_highest(finished: Finished, tmp_path: Path) -> None:
    gap = shutil.copytree(finished.plain, tmp_path / "gap")
    (gap / "snapshots" / "task-01.safetensors").unlink()
    assert last_task(gap) == 2


def test_errors_name_the_command_to_run_first(finished: Finished, few: Dataset, tmp_path: Path) -> None:
    setting = Setting(points=2)
    with pytest.raises(DataError, match=r"never trained. Run first:\n  incvec run --method podnet .*--oracle .*--out"):
        walk([finished.plain], tmp_path / "none", few, 0, 2, setting)
    with pytest.raises(DataError, match=r"not an oracle.*\n  incvec run .*--oracle"):
        walk([finished.plain], finished.ivt, few, 0, 2, setting)
    with pytest.raises(DataError, match=r"no snapshot .*task-00.*\n  incvec run"):
        walk([tmp_path / "none"], None, few, 0, 2, setting)
    with pytest.raises(ConfigError, match=r"no task 8 in .*: it has 3"):
        walk([finished.plain], None, few, 0, 7, setting)
    half = shutil.copytree(finished.plain, tmp_path / "half")
    (half / "snapshots" / "task-02.safetensors").unlink()
    with pytest.raises(DataError, match=r"no snapshot .*task-02.*has 2 snapshot.*\n  incvec run --method podnet"):
        walk([half], None, few, 0, 2, setting)
    with pytest.raises(ConfigError, match="no line from task 3 to task 3"):
        walk([finished.plain], None, few, 2, 2, setting)
    with pytest.raises(ConfigError, match="no run"):
        walk([], None, few, 0, 1, setting)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (quick("finetune"), "method"),
        (quick("podnet", seed=3, podnet={"net": "small", "epochs": 1}), "network"),
        (quick("podnet", seed=3, order_seed=5, podnet={"epochs": 1}), "class order"),
        (quick("podnet", seed=3, base_classes=4, tasks=1, podnet={"epochs": 1}), "number of base classes"),
    ],
    ids=["method", "network", "order", "base"],
)
def test_runs_that_cannot_be_compared(
    given: dict[str, object], what: str, finished: Finished, few: Dataset, tmp_path: Path
) -> None:
    finish(make_run(few, tmp_path, given))
    with pytest.raises(DataError, match=rf"differ in their {what}.*Run first:\n  incvec run --method podnet"):
        walk([finished.plain, tmp_path], None, few, 0, 1, Setting(points=2))


def test_the_command_of_a_run_makes_that_run(finished: Finished) -> None:
    """Every setting that is not the preset's own is told."""
    words = command(run_config(finished.ivt), "out").split()
    assert words[:6] == ["incvec", "run", "--method", "podnet", "--addon", "ivt"]
    assert {"podnet.epochs=6", "base_classes=2", "ivt.interval=1"} <= set(words)
    assert any("net=" in word and "tiny" in word for word in words)
    assert words[-2:] == ["--out", "out"]
    subset = resolve({"method": "podnet", "dataset": "imagenet-subset", "class_list": "cmc", "held_out": 5})
    assert {'class_list="cmc"', "held_out=5"} == {word for word in shlex.split(command(subset)) if "_" in word}
    assert "--data-root DATA" in command(subset)
    assert "--data-root" not in words  # the digits are embedded


def test_words_of_the_figures(
    finished: Finished, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Barriers have their run's marker and stay clear of the title; a minus is put into numbers, not into names."""
    figures: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, stem: figures.append(figure))
    found = walk([finished.plain, finished.ivt], finished.oracle, few, 0, None, Setting(points=3))
    found["curves"][1] |= {"name": "a-b", "fit": {"slope": -2.0, "intercept": 0.0, "r2": 1.0}}
    draw_tradeoff({"panels": [found]}, tmp_path)
    texts = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert texts[1] == "a-b: linear fit, slope −2.00, r² 1.00"
    for count in (1, 2):
        draw_path({**found, "curves": found["curves"] * count}, tmp_path)
        figures[-1].draw_without_rendering()
        axes = figures[-1].axes[1]
        row = next(child for child in axes.get_children() if isinstance(child, AnchoredOffsetbox))
        words = [text.get_text() for text in row.findobj(Text)]
        assert [word[0] for word in words[1:4]] == ["■", "●", "★"]
        assert all(word[1] == " " and float(word[2:]) >= 0 for word in words[1:])
        assert axes.get_title(loc="left").endswith("\n") == (count == 2)  # six have a line of their own


def test_names_of_tasks() -> None:
    assert named(range(1)) == "task 1"
    assert named(range(1, 6)) == "tasks 2 to 6"
