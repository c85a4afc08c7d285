"""The Markdown files of the repository, and the code blocks, commands and tables in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    document: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file name in the block's first line, if it has one."""
        match = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return match.group(1) if match else None


@dataclass(frozen=True)
class Command:
    """A command line and where it is shown."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place} {' '.join(self.words)}"


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def without_blocks(document: Path) -> str:
    return FENCE.sub("", document.read_text())


def blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        text = document.read_text()
        for match in FENCE.finditer(text):
            yield Block(name_of(document), text.count("\n", 0, match.start()) + 2, match.group(1), match.group(2))


def split(line: str) -> tuple[str, ...]:
    """The words of a shell command, without environment variables in front and `&` at the end."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return tuple(words[:-1] if words[-1:] == ["&"] else words)


def commands() -> list[Command]:
    """Every command of a bash block, and every `incvec ...` within a sentence; each one once."""
    unique: dict[tuple[str, ...], Command] = {}
    for block in blocks():
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := split(line):
                    unique.setdefault(words, Command(f"{block.document}:{block.line}", words))
    for document in DOCUMENTS:
        for text in re.findall(r"`(incvec [^`]+)`", without_blocks(document)):
            words = split(" ".join(text.split()))
            unique.setdefault(words, Command(name_of(document), words))
    return list(unique.values())


def anchors(document: Path) -> set[str]:
    """The headings as link targets, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(document: Path, column: str) -> list[dict[str, str]]:
    """The rows of the first table of a document that has this column, by heading."""
    lines = iter(document.read_text().splitlines())
    for line in lines:
        headings = cells(line)
        if column in headings:
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(headings, cells(row), strict=True)))
            return rows
    raise AssertionError(f"{name_of(document)} has no table with a column {column!r}")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")] if line.startswith("|") else []
