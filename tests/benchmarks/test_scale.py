"""The benchmarks of large data: their small versions run, and the documented costs follow from their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import FOLDER


def test_scale_reports_every_row_and_ratio(program: Callable[[str], Any], tmp_path: Path) -> None:
    scale = program("scale")
    file = tmp_path / "scale.json"
    rows = scale.main(["--small", "--workers", "0", "--seconds", "0.05", "--json", str(file)])
    cases = {(row["side"], row["what"]) for row in rows}
    ways = {"plain loop", "plain loop, its loader alone", "plain loop, its step alone", "pack"}
    assert cases == {(s, w) for s in (32, 16) for w in ways | {"ours, resident", "ours, streamed"}}
    assert all(row["images_per_second"] > 0 for row in rows)
    content = json.loads(file.read_text())
    assert content["rows"] == rows
    assert content["ratios"].keys() >= {"streamed over resident, 32", "streamed over plain loop, 32"}


PACKING = {"cores": 4, "size": 256, "bytes_an_image": 1_000_000, "images_per_second": {"pack": 500.0}}


def test_costs_are_computed_from_the_rates(program: Callable[[str], Any], tmp_path: Path) -> None:
    cost = program("imagenet_cost")
    # 50 classes x 500 images, then 10 classes each and 20 exemplars of each earlier class.
    rows = sum(10 * 500 + 20 * old for old in (50, 60, 70, 80, 90))
    assert cost.images_trained("podnet", "tiny-imagenet-100") == (90 * 25_000, 90 * rows)
    assert cost.images_trained("pass", "tiny-imagenet-100", "short") == (15 * 25_000, 15 * 25_000)
    assert cost.store_bytes("imagenet") == pytest.approx(1_331_167 * 3 * 256**2)
    file = tmp_path / "scale.json"
    row = {"what": "ours, streamed", "method": "finetune", "stage": "base", "side": 224, "images_per_second": 5000.0}
    others = {"ours, resident": 9000.0, "plain loop": 1000.0, "plain loop, its step alone": 3000.0}
    rows = [row, *({**row, "what": what, "images_per_second": rate} for what, rate in others.items())]
    rows += [{**line, "method": "podnet", "images_per_second": 1.0} for line in rows[:2]]  # measured on request
    place = {"device_type": "cuda", "device": "NVIDIA H200"}
    file.write_text(json.dumps({"rows": rows, "environment": place, "cores": 16}))
    lines = cost.tables(cost.read_rates([file]), PACKING)
    assert "packing, 4 cores" in lines[0]
    packing = {line.split(" | ")[0]: line.split(" | ")[3] for line in lines[2:5]}
    # 133,856 and 1,331,167 images at 500 per second; not measured at 64 x 64
    assert packing == {"| tiny-imagenet-100": "", "| imagenet-subset": "4 min", "| imagenet": "44 min"}
    assert "reads 0.5 and writes 0.1 GB/s" in "\n".join(lines)  # 500 x 1 MB, 500 x 3 x 256 x 256 bytes
    quick = cost.tables(cost.Rates({}), PACKING | {"images_per_second": {"pack": 5500.0}})
    assert "| 24 s |" in quick[3]
    (line,) = [line for line in lines if line.startswith("| imagenet | pass |")]
    base, later = 100 * 500 * 1281.167, 100 * 500 * 1281.167
    hours = (4 * base + 5.3 * later) / 5000 / 3600
    assert f"| {hours:.1f} h | {hours / 7.2:.1f} h |" in line
    base, later = cost.work("podnet", "imagenet-subset")
    minutes = (base + later) / 5000 / 60 / 7.2
    (line,) = [line for line in lines if line.startswith("| imagenet-subset | podnet |")]
    assert line.endswith(f"| {minutes:.0f} min |")
    assert "5,000 images/s at 224 pixels, on one NVIDIA H200; 8 GPUs" in lines[-3]
    assert "(bfloat16, captured) is\n9.0 times as fast resident and 5.0 times streamed, which is\n56% of" in lines[-1]
    assert cost.read_rates([tmp_path / "none.json"]) == cost.Rates({})

    other = tmp_path / "scale-64.json"  # each size in a file of its own
    content = {"rows": [{**row, "side": 64} for row in rows], "environment": place, "cores": 16}
    other.write_text(json.dumps(content))
    rates = cost.read_rates([file, tmp_path / "none.json", other])
    assert rates.by_side == {224: 5000.0, 64: 5000.0}
    assert [text[:12] for text in rates.beside] == ["At 64 pixels", "At 224 pixel"]
    with pytest.raises(ValueError, match="has rates at 224 pixels, and so has a file before it"):
        cost.read_rates([file, file])
    other.write_text(json.dumps({**content, "environment": {**place, "device": "NVIDIA A100"}}))
    with pytest.raises(ValueError, match="NVIDIA H200 and NVIDIA A100 make no one table"):
        cost.read_rates([file, other])


@pytest.mark.parametrize("environment", [{"device_type": "cpu", "device": "x86_64"}, None])
def test_rates_of_a_cpu_give_no_hours(
    program: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str] | None,
) -> None:
    cost = program("imagenet_cost")
    file, page = tmp_path / "scale.json", tmp_path / "scale.md"
    row = {"what": "ours, streamed", "method": "finetune", "stage": "base", "side": 224, "images_per_second": 5.0}
    file.write_text(json.dumps({"rows": [row]} | ({} if environment is None else {"environment": environment})))
    document = (FOLDER.parent / "docs" / "scale.md").read_text()
    page.write_text(document)
    with pytest.raises(SystemExit):
        cost.main(["--rates", str(file), "--write", str(page)])
    assert f"was measured on {'cpu' if environment else 'an unknown device'}: expected" in capsys.readouterr().err
    assert page.read_text() == document


def test_documented_costs_are_current(program: Callable[[str], Any]) -> None:
    cost = program("imagenet_cost")
    document = (FOLDER.parent / "docs" / "scale.md").read_text()
    results = FOLDER.parent / "results" / "benchmarks"
    measured = json.loads((results / "packing.json").read_text())
    assert cost.written(document, cost.read_rates(sorted(results.glob("scale*.json"))), measured) == document, (
        "stale: run python benchmarks/imagenet_cost.py --write docs/scale.md"
    )
    other = {**measured, "pack_over_decode": {"decode, pillow": 0.42}}
    assert "42% of the rate" in cost.written(document, cost.Rates({}), other)


def test_hours_are_not_overwritten_without_rates(
    program: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = program("imagenet_cost")
    page, none = tmp_path / "scale.md", str(tmp_path / "none.json")
    document = (FOLDER.parent / "docs" / "scale.md").read_text()
    page.write_text(cost.between(document, cost.MARKS, cost.tables(cost.Rates({64: 20_000.0}, "a GPU"), PACKING)))
    before = page.read_text()
    with pytest.raises(SystemExit):
        cost.main(["--rates", none, "--write", str(page)])
    assert "none.json has no rates" in capsys.readouterr().err
    assert page.read_text() == before
    page.write_text(cost.between(document, cost.MARKS, cost.tables(cost.Rates({}), PACKING)))  # nothing was measured
    cost.main(["--rates", none, "--write", str(page)])
    with pytest.raises(SystemExit):
        cost.main(["--packing", none, "--write", str(page)])
    assert "none.json is missing" in capsys.readouterr().err


def test_packing_reports_every_round(
    program: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = program("packing")
    made: list[Path] = []

    def pack(layout: object, store: Path, size: int, workers: int) -> None:
        if made:
            raise OSError("the disk is full")
        made.append(store)
        store.mkdir()

    monkeypatch.setattr(packing, "decode_all", lambda *_: None)
    monkeypatch.setattr(packing, "pack", pack)
    out = tmp_path / "results" / "packing.json"  # a new folder
    with pytest.raises(OSError, match="full"):
        packing.main(["--images", "200", "--out", str(out)])
    content = json.loads(out.read_text())
    assert content["rounds"] == 1
    assert content["images_per_second"].keys() == set(packing.VARIANTS)
    assert program("imagenet_cost").packing(content)[-1].endswith("decoding alone.")
