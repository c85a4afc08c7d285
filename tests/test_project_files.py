"""Project files agree with the code: versions, renamed settings, make targets, entry point groups."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import incvec
from incvec import registry
from incvec.config import RENAMED_SETTINGS

ROOT = Path(__file__).parents[1]


def test_citation_has_the_current_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == incvec.__version__


def test_changelog_lists_every_renamed_setting() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for old, new in RENAMED_SETTINGS.items():
        assert f"`{old}`" in text
        assert f"`{new}`" in text


def test_workflow_calls_existing_make_targets() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    targets = workflow["jobs"]["make"]["strategy"]["matrix"]["target"]
    assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_makefile_describes_every_target_at_its_top() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[0].split()
    assert re.findall(r"^# make ([\w-]+) ", makefile, re.MULTILINE) == phony


def test_make_says_how_long_the_tests_take() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "test-all"):
        assert re.search(rf"^{target}: .*\n\t@echo \"make {target}: about \d+ minutes with", makefile, re.MULTILINE)


def test_entry_point_groups_are_documented() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for each in (registry.METHODS, registry.ADDONS, registry.DATASETS, registry.PRESETS):
        assert f"`{each.group}`" in text
