"""Wording that must not come back: British spellings, and turns of phrase that readers had to decode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
PATTERNS = {
    "British spelling": r"\b\w*(optimis(?!t)|normalis|initialis|synchronis|summaris|tokenis|colour|behaviour)\w*",
    "Algorithm 1 verbatim": r"\bto the letter\b",
    "estimated from, recorded": r"\b(is|are|was) told (by|in|of)\b|\brecord tells\b",
    "probe, evaluate": r"\blooked at\b",
    "is teleported, is interpolated": r"\b(goes|go|taken) back to the anchor\b|\bmoves along with\b",
    "per": r"\b(one|two|once|many|images|rows|steps|numbers) an? (step|epoch|class|task|file|layer|second|batch)\b",
}
ALLOWED = (
    "src/incvec/config.py",  # settings that were renamed
    "src/incvec/atomic_files.py",  # files of earlier formats
    "src/incvec/ivt/state.py",
    "CHANGELOG.md",
)


@pytest.mark.parametrize("instead", PATTERNS)
def test_wording(instead: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match.group(0)}"
        for file in FILES
        if str(file.relative_to(ROOT)) not in ALLOWED
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (match := re.search(PATTERNS[instead], line, re.IGNORECASE))
    ]
    assert not found, f"write {instead}: {found}"
