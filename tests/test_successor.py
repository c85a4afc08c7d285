"""The tables of docs/successor.md are those of its runs, and its sweeps are those that it describes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import fmean

import pytest

from incvec.cli.sweep import plan
from incvec.methods import find_method

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def test_tables_of_the_page_are_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "successor_proxy.py"))
    content = tool["read"](RESULTS / "successor" / "proxy.json")
    page = (ROOT / "docs" / "successor.md").read_text()
    assert len(content["runs"]) > 20
    for made in (tool["table"](content), tool["classifier_table"](content)):
        assert made in page, (
            "docs/successor.md is stale: python tools/successor_proxy.py table results/successor/proxy.json"
        )


def test_held_out_runs_of_the_page_are_those_of_the_records() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "successor_proxy.py"))
    page = (ROOT / "docs" / "successor.md").read_text()
    assert tool["classifier_table"](tool["read"](RESULTS / "successor" / "classifiers.json")) in page
    after_80, last_task = [], 5
    for name in ("podnet", "podnet+ivt", "podnet+carry", "podnet+ivt+carry"):
        record = json.loads((RESULTS / "successor" / "held-out" / f"{name}-5-s0.json").read_text())
        metrics, last = record["metrics"], record["accuracy"][last_task]
        cells = [metrics["AA"], metrics["LA"], metrics["FM"]]
        row = " | ".join([name.replace("+", " + "), *(f"{value:.2f}" for value in cells)])
        assert f"| {row} | {last[0]:.1f} | {fmean(last[1:]):.1f} |" in page
        after_80.append(f"{metrics['a'][3]:.2f}")
    podnet, ivt, carry, both = after_80
    assert f"PODNet has {podnet}, with IVT {ivt}, with `carry` {carry}, with both\n{both}," in page


def test_classifiers_of_the_records() -> None:
    page = (ROOT / "docs" / "successor.md").read_text()
    for name, title in (("podnet", "PODNet"), ("podnet+ivt", "PODNet + IVT"), ("podnet-oracle", "oracle")):
        records = [json.loads((RESULTS / "cifar100" / f"{name}-5-s{seed}.json").read_text()) for seed in range(3)]
        trained, nearest = (
            fmean(sum(record["correct"][kind][-1]) / 100 for record in records) for kind in ("cnn", "nme")
        )
        assert f"| {title} | {trained:.2f} | {nearest:.2f} | {trained - nearest:.2f} |" in page


@pytest.mark.parametrize("name", ["successor-selection", "successor"])
def test_sweeps_compare_at_equal_memory(name: str) -> None:
    configs = [config for _, config in plan(name, [])]
    assert {config.method for config in configs if "carry" in config.addons} == {"podnet", "mrfa", "pass"}
    for config in configs:
        selects = name == "successor-selection"
        assert (config.held_out, config.order_seed == 7) == ((10, True) if selects else (None, False))
        if find_method(config.method).exemplars and not config.oracle:
            assert config.sections[config.method]["memory"] == (17 if "carry" in config.addons else 20)
    per_class = 4 * (64 + 64 * 65 // 2)  # mean and symmetric covariance of 64 features, in float32
    assert 17 * 3 * 32 * 32 + per_class <= 20 * 3 * 32 * 32
