"""How the blocks of a sweep file expand to runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from incvec.engine.sweep import MAX_RUNS, expand_block, expand_blocks, read_runs
from incvec.errors import ConfigError


def test_block_expands_to_all_combinations() -> None:
    block = {"method": "podnet", "addons": [[], ["ivt"]], "seed": [0, 1], "podnet": {"memory": [5, 20], "lr": 0.1}}
    found = expand_block(block)
    assert len(found) == 8
    assert {"method": "podnet", "addons": ["ivt"], "seed": 1, "podnet": {"memory": 5, "lr": 0.1}} in found
    assert expand_block({"method": "podnet", "podnet": {"milestones": [3, 4]}}) == [
        {"method": "podnet", "podnet": {"milestones": [3, 4]}}
    ]


def test_block_without_runs_is_refused(tmp_path: Path) -> None:
    assert expand_block({"method": "podnet", "addons": []}) == [{"method": "podnet", "addons": []}]
    assert expand_block({"method": "podnet", "podnet": {"milestones": [[], [3]]}}) == [
        {"method": "podnet", "podnet": {"milestones": []}},
        {"method": "podnet", "podnet": {"milestones": [3]}},
    ]
    file = tmp_path / "mine.yaml"
    for text, name in (("seed: []", "seed"), ("podnet: {lr: []}", "podnet.lr"), ("class_order: []", "class_order")):
        file.write_text(f"runs: [{{method: finetune}}, {{method: podnet, {text}}}]")
        with pytest.raises(ConfigError, match=rf"mine.yaml, block 2 of `runs`.*{name} is an empty list"):
            read_runs(file)


def test_order_of_runs_is_that_of_the_keys() -> None:
    block = {"podnet": {"memory": [5, 6]}, "method": ["podnet", "icarl"], "seed": [0, 1]}
    assert [(run["method"], run.get("podnet"), run["seed"]) for run in expand_block(block)] == [
        ("podnet", {"memory": 5}, 0),
        ("podnet", {"memory": 5}, 1),
        ("icarl", None, 0),
        ("icarl", None, 1),
        ("podnet", {"memory": 6}, 0),
        ("podnet", {"memory": 6}, 1),
    ]


def test_runs_are_counted_before_they_are_built() -> None:
    """Building 10^12 runs would take months. Sections count for the runs that have them only."""
    methods = ("podnet", "icarl", "pass", "fcs", "ssre")
    sections = {name: {"epochs": list(range(1, 101))} for name in methods}
    assert len(expand_block({"method": list(methods), **sections})) == 500
    thousand = list(range(1000))
    four = dict.fromkeys(("seed", "tasks", "base_classes", "stop_after"), thousand)
    for block in (four, {"podnet": dict.fromkeys(("epochs", "base_epochs", "memory", "batch_size"), thousand)}):
        with pytest.raises(ConfigError, match=f"block 1 of `runs`: {10**12} runs, expected at most {MAX_RUNS}"):
            expand_blocks([{"method": "podnet", **block}], "mine.yaml")
    halves = [{"method": method, "seed": list(range(MAX_RUNS // 2 + 1))} for method in ("podnet", "icarl")]
    with pytest.raises(ConfigError, match=f"block 2 of `runs`: {MAX_RUNS + 2} runs"):
        expand_blocks(halves, "mine.yaml")
