"""MkDocs hook: links from a page to files of the repository outside docs/ work on the site, too.

A page links to `../results/figures/path.png` or `../src/incvec/contracts.py`, as GitHub needs it. The hook copies such
a file to `repository/...` of the site and rewrites the link. A Markdown file becomes a page.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def outside(source: Path, docs: Path, target: str) -> Path | None:
    """The file that a relative link points to, if it exists and is not in docs/."""
    path = (source.parent / target).resolve()
    return path if path.is_file() and not path.is_relative_to(docs) else None


def address(file: Path, docs: Path) -> str:
    """Where the site has a file of the repository."""
    if file.is_relative_to(docs):
        return file.relative_to(docs).as_posix()
    return f"repository/{file.relative_to(docs.parent).as_posix()}"


def on_files(files: Files, config: Any) -> Files:
    docs = Path(config.docs_dir).resolve()
    sources = [Path(page.abs_src_path) for page in files.documentation_pages()]
    added: set[Path] = set()
    while sources:
        source = sources.pop()
        for _, target, _ in LINK.findall(source.read_text()):
            file = outside(source, docs, target)
            if file is not None and file not in added:
                added.add(file)
                files.append(File.generated(config, address(file, docs), abs_src_path=str(file)))
                if file.suffix == ".md":
                    sources.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    docs = Path(config.docs_dir).resolve()
    source = Path(page.file.abs_src_path).resolve()

    def relative(match: re.Match[str]) -> str:
        file = (source.parent / match[2]).resolve()
        if not file.is_file() or (source.is_relative_to(docs) and file.is_relative_to(docs)):
            return match[0]
        start = posixpath.dirname(page.file.src_uri) or os.curdir
        return f"{match[1]}{posixpath.relpath(address(file, docs), start)}{match[3]}"

    return LINK.sub(relative, markdown)
