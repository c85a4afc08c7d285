"""Tables of pages about the proxy are those of its runs, and its sweeps are those that the pages describe."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import incvec
from incvec import ClassStatistics
from incvec.cli.sweep import plan
from incvec.methods import find_method
from incvec.registry import ADDONS, load_plugin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DOCS = ROOT / "docs"
PAGE = DOCS / "successor.md"
TABLES = {
    **dict.fromkeys(["gap", "classifiers", "held out", "proxy", "confirmation", "both classifiers"], PAGE),
    **dict.fromkeys(["ablation", "cost", "ten increments"], PAGE),
    "attempts": DOCS / "log" / "attempts.md",
    **dict.fromkeys(["Fisher", "scales", "layers"], DOCS / "log" / "fisher.md"),
    "audit": DOCS / "log" / "comparisons.md",
}


@pytest.fixture(scope="module")
def proxy() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "successor_proxy.py"))


@pytest.fixture(scope="module")
def classifier() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "successor_classifier.py"))


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_the_page_are_those_of_the_records(name: str, proxy: dict[str, Any]) -> None:
    tables = proxy["tables"](RESULTS)
    assert set(tables) == set(TABLES)
    assert tables[name].count("\n") > 3
    assert f"\n\n{tables[name]}\n\n" in TABLES[name].read_text(), (
        f"{TABLES[name].name} is stale: python tools/successor_proxy.py tables results"
    )


def test_numbers_of_the_summary(proxy: dict[str, Any]) -> None:
    """The first table of the page repeats cells of the others."""
    page = PAGE.read_text()
    tables = proxy["tables"](RESULTS)
    cases = [("proxy", host, text) for host, text in (("podnet", "memory=7"), ("mrfa", "memory=7"), ("pass", ""))]
    for table, host, text in [*cases, ("confirmation", "podnet", "memory=7")]:
        rows = {tuple(row[:2]): row for row in (line.split(" | ") for line in tables[table].split("\n"))}
        carry, plain = (rows[f"| {host}{addons}", settings] for addons, settings in ((" + carry", text), ("", "")))
        share = carry[10] or "no oracle"
        title = f"proxy on a CPU, {({'podnet': 'PODNet', 'mrfa': 'MRFA', 'pass': 'PASS'})[host]},.*"
        if table == "confirmation":
            title = "the same on 50 other classes, after all choices"
        fm = " to ".join(f"{float(row[5]):.1f}" for row in (plain, carry))
        assert re.search(rf"\| {title} \| {re.escape(carry[8])} \| {share} \| {fm} \|", page)


def test_numbers_of_the_summary_with_ten_increments(proxy: dict[str, Any]) -> None:
    page = PAGE.read_text()
    rows = {
        row[0]: row for row in (line.split(" | ") for line in proxy["tables"](RESULTS)["ten increments"].split("\n"))
    }
    for host in ("podnet", "pass"):
        plain, *others = (rows[f"| {host}{addons}"] for addons in ("", " + carry", " + ivt + carry"))
        for row in others:
            fm = f"{float(plain[5]):.1f} to {float(row[5]):.1f}"
            assert f"| {row[8]} | no oracle | {fm} |" in page


def test_after_80_classes() -> None:
    found = [
        json.loads((RESULTS / "successor" / "held-out" / f"{name}-5-s0.json").read_text())["metrics"]["a"][3]
        for name in ("podnet", "podnet+ivt", "podnet+carry", "podnet+ivt+carry")
    ]
    podnet, ivt, carry, both = (f"{value:.2f}" for value in found)
    text = f"PODNet has {podnet}, with IVT {ivt}, with `carry` {carry}, with both {both},"
    assert text in PAGE.read_text().replace("\n", " ")


def test_a_gain_is_paired_by_seed(proxy: dict[str, Any]) -> None:
    """Two seeds: gains 1 and 3, half and three quarters of their gaps; ten correct images more in one class of two."""

    def row(seed: int, last: float, addons: list[str], oracle: bool = False) -> dict[str, Any]:
        counts = {"cnn": [10, 20] if not addons else [20, 20]}
        config = {"podnet": {"memory": 10, "lr": 0.1}, "carry": {"drift": "map"}, "seed": seed}
        return {
            "method": "podnet",
            "addons": addons,
            "oracle": oracle,
            "tasks": 1,
            "config": config,
            "correct": counts,
        } | {
            "metrics": {"AA": last, "LA": last, "FM": 0.0},
            "accuracy": [[1.0], [last, last]],
            "environment": {"commit": "0123456789-dirty"},
        }

    runs = [row(0, 10.0, []), row(1, 20.0, []), row(0, 12.0, [], True), row(1, 24.0, [], True)]
    line = proxy["runs_table"]([row(0, 11.0, ["carry"]), row(1, 23.0, ["carry"])], runs).split("\n")[-1]
    assert line.endswith("| 0, 1 | 17.00 | 17.00 | 0.00 | 17.00 | 17.00 | +2.00 ± 1.00 | 5.00 | 62 ± 12 % | 0123456* |")


SWEEPS = {
    "proxy": ["successor-proxy"],
    "confirmation": ["successor-proxy"],
    "ten-increments": ["proxy-10", "proxy-audit", str(ROOT / "tools" / "ivt_ablation.yaml")],
}


@pytest.fixture
def ablations() -> Iterator[None]:
    """The add-ons of tools/ivt_ablation.py."""
    load_plugin(ROOT / "tools" / "ivt_ablation.py")
    yield
    for name in [name for name in ADDONS if name.startswith("ivt-")]:
        del ADDONS[name]
    for name in [name for name in sys.modules if name.startswith("incvec_plugin_ivt_ablation")]:
        del sys.modules[name]


def test_ablations_replace_the_fisher(ablations: None, tmp_path: Path) -> None:
    """Mean S at the teleports of tasks 2 and 3: t / (2t - 1) with F = 1; 2/3 if F_t = Fbar_{t-1}."""
    options: dict[str, Any] = {"interval": 2, "last": "teleport", "head": "keep"}
    scales = {}
    for kind in ("ivt-uniform", "ivt-constant", "ivt-normalized", "ivt-shuffled"):
        record = incvec.run(
            method="finetune", addons=[kind], dataset="digits", out=tmp_path / kind, device="cpu", stop_after=3,
            finetune={"net": "tiny", "epochs": 2, "base_epochs": 1}, **{kind: options},
        )  # fmt: skip
        scales[kind] = [task[kind]["teleports"]["scale"][-1] for task in record["statistics"][1:]]
    assert scales["ivt-uniform"] == pytest.approx([2 / 3, 3 / 5], abs=2e-3)
    assert scales["ivt-constant"] == pytest.approx([2 / 3, 2 / 3], abs=2e-3)
    assert scales["ivt-normalized"] == pytest.approx([2 / 3, 2 / 3], abs=0.1)
    assert scales["ivt-shuffled"] != scales["ivt-normalized"]


def test_shuffled_fisher_has_the_same_values(ablations: None) -> None:
    fisher = torch.rand(4, 3)
    module = next(module for name, module in sys.modules.items() if name.startswith("incvec_plugin_ivt_ablation"))
    shuffled = module.ShuffledIVT.replaced(None, fisher, None, torch.Generator().manual_seed(0))
    assert shuffled.shape == fisher.shape
    assert not torch.equal(shuffled, fisher)
    assert torch.equal(shuffled.flatten().sort().values, fisher.flatten().sort().values)


@pytest.mark.parametrize(("name", "least"), [("proxy", 20), ("confirmation", 15), ("ten-increments", 70)])
def test_runs_of_the_page_are_those_of_the_sweep(name: str, least: int, proxy: dict[str, Any], ablations: None) -> None:
    """Settings that did not exist when a run was made are not compared."""
    planned = [config for sweep in SWEEPS[name] for _, config in plan(sweep, [])]
    rows = proxy["read"](RESULTS / "successor" / f"{name}.json")
    assert len(rows) >= least
    for row in rows:
        assert "dirty" not in row["environment"]["commit"]
        assert any(
            (c.method, list(c.addons), c.oracle, c.tasks, c.seed)
            == (row["method"], row["addons"], row["oracle"], row["tasks"], row["config"]["seed"])
            and all(
                row["config"][name].items() <= json.loads(json.dumps(c.sections[name])).items()
                for name in (row["method"], *row["addons"])
            )
            for c in planned
        ), proxy["name_of"](row)


@pytest.mark.parametrize("name", ["successor-selection", "successor", "successor-proxy"])
def test_sweeps_compare_at_equal_memory(name: str) -> None:
    configs = [config for _, config in plan(name, [])]
    assert {config.method for config in configs if "carry" in config.addons} == {"podnet", "mrfa", "pass"}
    plain, carried, side, width = (10, 7, 16, 32) if name == "successor-proxy" else (20, 17, 32, 64)
    for config in configs:
        selects = name == "successor-selection"
        if name != "successor-proxy":
            assert (config.held_out, config.order_seed == 7) == ((10, True) if selects else (None, False))
        if find_method(config.method).exemplars and not config.oracle:
            assert config.sections[config.method]["memory"] == (carried if "carry" in config.addons else plain)
    per_class = 4 * (width + width * (width + 1) // 2)  # mean and symmetric covariance of the features, in float32
    assert carried * 3 * side**2 + per_class <= plain * 3 * side**2


def affine_change(each: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features of six classes before and after an affine change with noise, the same for all classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(6).repeat_interleave(each)
    shape = torch.randn(8, 8, generator=generator) / 2
    before = torch.randn(6, 8, generator=generator)[labels] * 2 + torch.randn(6 * each, 8, generator=generator) @ shape
    change = torch.eye(8) + 0.15 * torch.randn(8, 8, generator=generator)
    return before, before @ change + 0.3 + 0.3 * torch.randn(6 * each, 8, generator=generator), labels


def test_variants_of_the_ablation(classifier: dict[str, Any]) -> None:
    """Three old classes, of which one image in thirty is at hand."""
    before, after, labels = affine_change()
    old = labels < 3
    at_hand = ~old | (torch.arange(len(labels)) % 30 == 0)
    true = ClassStatistics()
    true.add(after[old], labels[old])
    means, covariances = {}, {}
    for name in ("ClassStatistics", "NotMoved", "MeansOnly", "Translation", "Nearby", "NoSpread", "Network"):
        found = classifier[name]()
        found.add(before[old], labels[old])
        start = classifier["covariances_of"](found)
        found.move(before[at_hand], after[at_hand], labels[at_hand])
        means[name] = float((found.means - true.means).norm())
        own = classifier["covariances_of"](found)
        covariances[name] = float((own - classifier["covariances_of"](true)).norm())
        kept = torch.allclose(own, start, atol=1e-4)
        assert kept == (name in ("NotMoved", "MeansOnly", "Translation", "Nearby")), name
    best = means["ClassStatistics"]
    assert [means["MeansOnly"], means["NoSpread"]] == pytest.approx([best, best], rel=1e-4)
    assert max(best, means["Network"]) < 0.5 * min(means[name] for name in ("NotMoved", "Translation", "Nearby"))
    assert covariances["ClassStatistics"] < covariances["NoSpread"] < covariances["MeansOnly"]
