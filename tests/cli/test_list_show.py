"""`incvec list` and `incvec show`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tests.cli.conftest import invoke, message


def test_list_as_json_has_every_kind() -> None:
    result = invoke("list", "--json")
    assert result.exit_code == 0
    catalog = json.loads(result.stdout)
    assert list(catalog) == ["methods", "addons", "datasets", "presets", "nets", "sweeps"]
    for kind, entries in catalog.items():
        assert all(entry["name"] and entry["summary"] for entry in entries)
        assert kind in ("nets", "sweeps") or all(entry["paper"] for entry in entries)
    names = {kind: [entry["name"] for entry in entries] for kind, entries in catalog.items()}
    assert {"finetune", "podnet"} <= set(names["methods"])
    assert "ivt" in names["addons"]
    assert {"cifar100", "digits", "folder"} <= set(names["datasets"])
    assert {"podnet-cifar100", "ivt-digits"} <= set(names["presets"])
    assert {"resnet32-rebuffi", "tiny", "clip"} <= set(names["nets"])
    assert {"digits", "cifar100-podnet"} <= set(names["sweeps"])
    text = invoke("list").stdout
    assert all(name in text for kind in names.values() for name in kind)
    assert "https://arxiv.org/abs/2004.13513" in text


def test_list_of_one_kind() -> None:
    assert list(json.loads(invoke("list", "addons", "--json").stdout)) == ["addons"]
    assert invoke("list", "method").exit_code == 2
    lines = invoke("list", "presets").stdout.splitlines()
    below = {line.split()[0]: after.strip() for line, after in itertools.pairwise(lines) if line.strip()}
    assert below["ewc-cifar100-pycil"] == "--variant pycil"
    assert "--variant" not in below["ewc-digits"] + below["ivt-digits-pretrained"]


def write_record(folder: Path, la: float, *addons: str, oracle: bool = False) -> None:
    folder.mkdir(parents=True)
    record = {
        "method": "podnet", "addons": addons, "dataset": "digits", "tasks": 3, "oracle": oracle, "seed": 0,
        "accuracy": [[90.0], [la, la]], "test_counts": [20, 10], "metrics": {"AA": 80.0, "LA": la, "FM": 90 - la},
        "config": {"addons": addons, "oracle": oracle, **{name: {} for name in addons}}, "seconds": 7.0,
    }  # fmt: skip
    (folder / "record.json").write_text(json.dumps(record))


def test_show_computes_the_gap_closed_among_the_records(tmp_path: Path) -> None:
    write_record(tmp_path / "a", 60.0)
    write_record(tmp_path / "b", 65.0, "ivt")
    write_record(tmp_path / "c", 80.0, oracle=True)
    result = invoke("show", tmp_path)
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "podnet + ivt" in line)
    assert row.split() == ["podnet", "+", "ivt", "digits", "3", "0", "80.00", "65.00", "25.00", "25", "%", "7.0"]

    result = invoke("show", tmp_path / "b" / "record.json", tmp_path / "a", "--markdown")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| run | data set |")
    assert "| podnet + ivt | digits | 3 | 0 | 80.00 | 65.00 | 25.00 | – | 7.0 |" in lines

    rows = json.loads(invoke("show", tmp_path, "--json").stdout)
    expected = {"podnet": None, "podnet + ivt": 0.25, "podnet oracle": None}
    assert {row["run"]: row["gap_closed"] for row in rows} == expected
    assert invoke("show", tmp_path, "--json", "--markdown").exit_code == 1


def test_show_refuses_broken_records_and_skips_them_beside_others(tmp_path: Path) -> None:
    write_record(tmp_path / "good", 60.0)
    broken = tmp_path / "bad" / "record.json"
    broken.parent.mkdir()
    broken.write_text((tmp_path / "good" / "record.json").read_text()[:100])
    result = invoke("show", tmp_path)
    assert result.exit_code == 0
    assert "60.00" in result.stdout
    assert "record.json is not a record" in message(result)
    for given in (broken, tmp_path / "bad"):
        result = invoke("show", given)
        assert result.exit_code == 1
        assert "record.json is not a record" in message(result)
    broken.write_text('{"method": "podnet"}')
    assert "it lacks addons, dataset" in message(invoke("show", broken))
    assert "does not exist" in message(invoke("show", tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    assert invoke("show", tmp_path / "empty").exit_code == 1
