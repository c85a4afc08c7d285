"""`incvec list` and `incvec show`."""

from __future__ import annotations

import csv
import itertools
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from incvec.cli.main import app
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
    assert all(name in text for kind, known in names.items() if kind != "presets" for name in known)
    assert len(text.splitlines()) <= 24  # one screen
    assert "https://arxiv.org/abs/2004.13513" in invoke("list", "methods").stdout


def test_list_fits_a_narrow_terminal() -> None:
    text = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["list"]).stdout
    assert max(map(len, text.splitlines())) < 80
    *_, hint = text.splitlines()
    for command in re.findall("`incvec (.+?)`", hint):
        assert invoke(*command.split()).exit_code == 0, command


def test_list_describes_one_component() -> None:
    text = invoke("list", "methods", "podnet").stdout
    assert "podnet.epochs=160" in text
    assert "epochs of an incremental task" in text
    assert "podnet.nca=coded" in text
    assert "coded | paper" in text
    assert "ivt.interval=10" in invoke("list", "addons", "ivt").stdout
    assert "test_every=5" in invoke("list", "datasets", "folder").stdout
    assert "runs:" in invoke("list", "sweeps", "digits").stdout
    assert "8 x 8" in invoke("list", "datasets", "digits").stdout
    options = json.loads(invoke("list", "methods", "podnet", "--json").stdout)["options"]
    assert {"name": "proxies", "default": 10, "choices": [], "description": "proxies per class"} in options
    assert "Did you mean 'podnet'?" in message(invoke("list", "methods", "podnett"))


def test_list_prints_the_values_of_presets() -> None:
    lines = invoke("list", "presets", "podnet-digits").stdout.splitlines()
    assert lines[0] == "podnet-digits:"
    assert {"  net: small", "  epochs: 20", "  lambda_flat: 0.3"} <= set(lines)
    every = invoke("list", "presets", "ivt").stdout
    assert "ivt+podnet:\n  last: teleport\n  head: teleport\n" in every
    assert "ivt+pass:\n  batchnorm: layer\n" in every
    assert "podnet-cifar100: the defaults of the options" in invoke("list", "presets", "podnet").stdout


def test_list_of_one_kind() -> None:
    assert list(json.loads(invoke("list", "addons", "--json").stdout)) == ["addons"]
    assert invoke("list", "method").exit_code == 2
    lines = invoke("list", "presets").stdout.splitlines()
    below = {line.split()[0]: after.strip() for line, after in itertools.pairwise(lines) if line.strip()}
    assert below["ewc-cifar100-pycil"] == "--variant pycil"
    assert "--variant" not in below["ewc-digits"] + below["ivt-digits-pretrained"]


def write_record(folder: Path, la: float, *addons: str, oracle: bool = False, seed: int = 0) -> None:
    folder.mkdir(parents=True)
    record = {
        "method": "podnet", "addons": addons, "dataset": "digits", "tasks": 3, "oracle": oracle, "seed": seed,
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


def test_show_has_mean_deviation_and_paired_gain_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gain is paired by seed: its deviation is that of the differences, not of the accuracies."""
    for seed, (plain, ivt, oracle) in enumerate([(50.0, 53.0, 60.0), (60.0, 65.0, 70.0), (70.0, 74.0, 80.0)]):
        write_record(tmp_path / "runs" / f"z{seed}", plain, seed=seed)
        write_record(tmp_path / "runs" / f"y{seed}", ivt, "ivt", seed=seed)
        write_record(tmp_path / "runs" / f"x{seed}", oracle, oracle=True, seed=seed)
    monkeypatch.chdir(tmp_path)
    lines = [line.strip() for line in invoke("show").stdout.splitlines()]  # the folder runs
    assert lines[0] == "digits, 3 tasks"
    rows = [" ".join(line.split()) for line in lines if line.startswith("podnet")]
    assert rows == [
        "podnet 3 80.0 ± 0.0 60.0 ± 10.0 30.0 ± 10.0 – –",
        "podnet + ivt 3 80.0 ± 0.0 64.0 ± 10.5 26.0 ± 10.5 +4.0 ± 1.0 40 %",
        "podnet oracle 3 80.0 ± 0.0 70.0 ± 10.0 20.0 ± 10.0 – –",
    ]
    assert "| podnet + ivt | 3 |" in invoke("show", "--markdown").stdout
    assert invoke("show", "--each").stdout.count("podnet + ivt") == 3
    with_csv = list(csv.DictReader(invoke("show", "--csv", "--sort", "LA").stdout.splitlines()))
    assert [float(row["LA"]) for row in with_csv] == [80, 74, 70, 70, 65, 60, 60, 53, 50]
    assert {row["seed"]: float(row["gain_LA"]) for row in with_csv if row["gain_LA"]} == {"0": 3, "1": 5, "2": 4}
    assert [row["FM"] for row in json.loads(invoke("show", "--json", "--sort", "FM").stdout)][:2] == [10.0, 16.0]
    assert invoke("show", "--csv", "--json").exit_code == 1


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
