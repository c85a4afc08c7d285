"""The tables of docs/successor.md are those of its runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import fmean

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


def test_classifiers_of_the_records() -> None:
    page = (ROOT / "docs" / "successor.md").read_text()
    for name, title in (("podnet", "PODNet"), ("podnet+ivt", "PODNet + IVT"), ("podnet-oracle", "oracle")):
        records = [json.loads((RESULTS / "cifar100" / f"{name}-5-s{seed}.json").read_text()) for seed in range(3)]
        trained, nearest = (
            fmean(sum(record["correct"][kind][-1]) / 100 for record in records) for kind in ("cnn", "nme")
        )
        assert f"| {title} | {trained:.2f} | {nearest:.2f} | {trained - nearest:.2f} |" in page
