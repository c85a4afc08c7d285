"""The README's results come from the records and the figures' data."""

from __future__ import annotations

import json
from pathlib import Path

from incvec.study.summary import render
from tests.study.samples import path_data, sample, write


def row_of(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_without_records(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        text = render(folder)
        assert text.count("not run<br>") == 8 * 3
        assert "GPU time: not run" in text
        assert "Figure: not made yet" in text


def test_table_has_ours_and_the_papers_numbers(tmp_path: Path) -> None:
    records = {str(s): sample(seed=s) for s in range(2)} | {"ivt": sample("podnet", "ivt", tasks=25)}
    records["other"] = sample("podnet", "ivt", ivt={"interval": 5})
    records["digits"] = {**sample(seed=5), "dataset": "digits"}
    records["craft"] = {**sample(seed=6), "dataset": "aircraft"}  # counts for the time only
    text = render(write(tmp_path, records))
    means = [sum(records[str(s)]["metrics"][name] for s in range(2)) / 2 for name in ("AA", "LA", "FM")]
    ours = " · ".join(f"{mean:.2f}" for mean in means)
    assert row_of(text, "PODNet")[1] == f"{ours} (2 seeds)<br>*64.00 · 54.47 · 17.72*"
    assert row_of(text, "PODNet + IVT")[1].startswith("not run")  # another interval is not the paper's setting
    assert row_of(text, "PODNet + IVT")[3].startswith(f"{records['ivt']['metrics']['AA']:.2f} · ")
    assert "the 5 runs" in text
    assert "25 min 07 s on a card" in text


def test_figure_is_the_path_with_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "figures"
    folder.mkdir(parents=True)
    (folder / "podnet-path.json").write_text(json.dumps(path_data()))
    assert "not made yet" in render(tmp_path / "results")  # data without a picture
    (folder / "podnet-path.png").write_bytes(b"a picture")
    text = render(tmp_path / "results")
    assert "](results/figures/podnet-path.png)" in text
    assert "begins at 80.0 %: PODNet " in text
    lowest = min(80 - 15 * x / 50 - 36 * x / 50 * (1 - x / 50) for x in range(51))
    assert f"PODNet + IVT {lowest:.1f} at its lowest and 65.0 at the end (barrier 9.0)" in text
    assert "re-estimated" not in text
    again = path_data()
    again["batchnorm"] = "recalibrate"
    for curve in again["curves"]:
        curve["barrier"]["accuracy"]["old"] = 0.25
    (folder / "a-recalibrated-path.json").write_text(json.dumps(again))
    (folder / "a-recalibrated-path.png").write_bytes(b"another picture")
    text = render(tmp_path / "results")
    assert "](results/figures/podnet-path.png)" in text
    left = ", ".join("0.2" for _ in again["curves"])
    assert text.endswith(f"re-estimated at every point, the barriers are {left}.")
    sources: dict[str, object] = {"sources": [{"seed": 0}, {"seed": 1}]}
    (folder / "podnet-path-mean.json").write_text(json.dumps({**path_data(), **sources}))
    (folder / "podnet-path-mean.png").write_bytes(b"a picture of the mean")
    text = render(tmp_path / "results")  # the mean comes first, and has no recalibrated mean beside it
    assert "](results/figures/podnet-path-mean.png)" in text
    assert "begins at 80.0 % (mean of 2 seeds): PODNet " in text
    assert "re-estimated" not in text
    (folder / "z-recalibrated-mean.json").write_text(json.dumps({**again, **sources}))
    assert f"the barriers are {left}." in render(tmp_path / "results")
    for file in folder.glob("*-mean.*"):
        file.unlink()
    (folder / "a-recalibrated-path.json").write_text(json.dumps({**again, "task_to": again["task_to"] - 1}))
    assert "re-estimated" not in render(tmp_path / "results")  # another path
