"""Code blocks of docs/plugin-recipes.md, which begin with the name of the file that they are."""

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "plugin-recipes.md"


def source(title: str) -> str:
    start = f"```py\n# {title}\n"
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(start) == 1, f"no single recipe {title!r} in {PAGE.name}"
    return text.split(start)[1].split("\n```")[0] + "\n"


def recipe(title: str) -> dict[str, Any]:
    """The names that the recipe defines."""
    names: dict[str, Any] = {}
    exec(compile(source(title), title, "exec"), names)
    return names
