"""How the blocks of a sweep file expand to runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from incvec.engine.sweep import expand, read_runs
from incvec.errors import ConfigError


def test_block_expands_to_all_combinations() -> None:
    block = {"method": "podnet", "addons": [[], ["ivt"]], "seed": [0, 1], "podnet": {"memory": [5, 20], "lr": 0.1}}
    found = list(expand(block))
    assert len(found) == 8
    assert {"method": "podnet", "addons": ["ivt"], "seed": 1, "podnet": {"memory": 5, "lr": 0.1}} in found
    assert list(expand({"method": "podnet", "podnet": {"milestones": [3, 4]}})) == [
        {"method": "podnet", "podnet": {"milestones": [3, 4]}}
    ]


def test_block_without_runs_is_refused(tmp_path: Path) -> None:
    assert list(expand({"method": "podnet", "addons": []})) == [{"method": "podnet", "addons": []}]
    assert list(expand({"podnet": {"milestones": [[], [3]]}})) == [
        {"podnet": {"milestones": []}},
        {"podnet": {"milestones": [3]}},
    ]
    file = tmp_path / "mine.yaml"
    for text, name in (("seed: []", "seed"), ("podnet: {lr: []}", "podnet.lr"), ("class_order: []", "class_order")):
        file.write_text(f"runs: [{{method: finetune}}, {{method: podnet, {text}}}]")
        with pytest.raises(ConfigError, match=rf"mine.yaml, block 2 of `runs`.*{name} is an empty list"):
            read_runs(file)
