"""One table, rendered as Markdown, HTML, LaTeX or text for a terminal.

    Table(["run", Column("AA"), Column("LA")], [["podnet", number(64.0), number(54.5)]], title="CIFAR-100").markdown()

A string is a column of text; a `Column` is one of numbers by default.
"""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from incvec.file_names import safe_name

MISSING = "–"
LONG_TABLE = 60  # rows; a longer one opens on a click
LONG_CODE = 40  # characters; longer code may break across lines
COMMIT = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")
LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "·": r"$\cdot$",
    "↑": r"$\uparrow$", "↓": r"$\downarrow$", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    label: str  # may contain a line break, for a terminal
    numeric: bool = True

    @property
    def heading(self) -> str:
        return self.label.replace("\n", " ")


@dataclass(frozen=True)
class Cell:
    text: str = ""
    value: float | None = None  # sort key of a number
    code: bool = False


@dataclass(frozen=True)
class Row:
    """`dim`: less important (an oracle, a row without runs); the HTML page can hide it, a terminal dims it."""

    cells: tuple[Cell, ...]
    dim: bool = False


class Table:
    """Columns, rows, a title above and a note below; `slug` is its HTML id, LaTeX label and file name."""

    def __init__(
        self,
        columns: Sequence[Column | str],
        rows: Iterable[Row | Sequence[Cell | str]],
        title: str = "",
        note: str = "",
        slug: str = "",
    ) -> None:
        self.columns = [Column(each, numeric=False) if isinstance(each, str) else each for each in columns]
        self.rows = [row if isinstance(row, Row) else make_row(*row) for row in rows]
        self.title = title
        self.note = note
        self.slug = safe_name(slug) if slug else ""

    def without_empty_columns(self) -> Table:
        used = [place for place in range(len(self.columns)) if any(row.cells[place].text for row in self.rows)]
        rows = [Row(tuple(row.cells[place] for place in used), row.dim) for row in self.rows]
        return Table([self.columns[place] for place in used], rows, self.title, self.note, self.slug)

    def texts(self) -> list[list[str]]:
        return [[cell.text for cell in row.cells] for row in self.rows]

    def markdown(self, align: bool = True) -> str:
        """Without title and note; numbers to the right if `align`."""
        lines = ["| " + " | ".join(column.heading for column in self.columns) + " |"]
        lines.append("|" + "|".join("---:" if align and column.numeric else "---" for column in self.columns) + "|")
        for row in self.rows:
            texts = [" ".join(cell.text.splitlines()).replace("|", "\\|") for cell in row.cells]
            shown = [f"`{text}`" if cell.code else text for cell, text in zip(row.cells, texts, strict=True)]
            lines.append("| " + " | ".join(shown) + " |")
        return "\n".join(lines)

    def latex(self) -> str:
        """A table environment; requires booktabs, and array if a column breaks."""
        caption = escape_latex(f"{self.title}. {self.note}")
        lines = [r"\begin{table}[t]", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{self.slug}}}"]
        kinds = "".join(self._latex_kind(place) for place in range(len(self.columns)))
        lines += [rf"\begin{{tabular}}{{@{{}}{kinds}@{{}}}}", r"\toprule"]
        lines += [" & ".join(escape_latex(column.heading) for column in self.columns) + r" \\", r"\midrule"]
        rows = [" & ".join(map(latex_cell, row.cells)) + r" \\" for row in self.rows]
        lines += ["{}" + row if row[0] in "[*" else row for row in rows]  # not an option of the line break before it
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"

    def html(self, section: str = "") -> str:
        """Sortable by its headings; the title is left out if it is the section's own."""
        lines = [f'<div class="table" id="{html.escape(self.slug)}">']
        lines += [f"<h3>{html.escape(self.title)}</h3>"] if self.title != section else []
        lines += [f'<p class="note">{html.escape(self.note)}</p>'] if self.note else []
        if any(row.dim for row in self.rows) and not all(row.dim for row in self.rows):
            lines.append('<label class="filter"><input type="checkbox"> also show rows without runs</label>')
        lines.append('<div class="tools"></div>')
        long = len(self.rows) > LONG_TABLE
        lines += [f"<details><summary>all {len(self.rows)} rows</summary>"] if long else []
        lines.append('<div class="scroll" tabindex="0"><table><thead>')
        kinds = ["number" if column.numeric else "" for column in self.columns]
        heads = [
            f'<th class="{kind}" scope="col"><button type="button">{html.escape(column.heading)}</button></th>'
            for kind, column in zip(kinds, self.columns, strict=True)
        ]
        lines.append("<tr>" + "".join(heads) + "</tr></thead><tbody>")
        for row in self.rows:
            cells = [html_cell(cell, kind) for cell, kind in zip(row.cells, kinds, strict=True)]
            lines.append(('<tr class="not-run">' if row.dim else "<tr>") + "".join(cells) + "</tr>")
        return "".join([*lines, "</tbody></table></div>", "</details>" if long else "", "</div>"])

    def rich(self) -> RichTable:
        """For a terminal: the first column folds if the terminal is narrow, numbers never do."""
        table = RichTable(
            title=Text(self.title) if self.title else None,
            title_justify="left",
            caption=Text(self.note) if self.note else None,
            caption_justify="left",
            header_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for place, column in enumerate(self.columns):
            side: Literal["left", "right"] = "right" if column.numeric else "left"
            table.add_column(Text(column.label), justify=side, no_wrap=place > 0, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell.text) for cell in row.cells), style="dim" if row.dim else None)
        return table

    def _latex_kind(self, place: int) -> str:
        if any(row.cells[place].code and len(row.cells[place].text) > LONG_CODE for row in self.rows):
            return r">{\raggedright\arraybackslash}p{6cm}"
        return "r" if self.columns[place].numeric else "l"


def make_row(*cells: Cell | str, dim: bool = False) -> Row:
    return Row(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in cells), dim)


def number(value: float | None, form: str = ".2f", missing: str = MISSING) -> Cell:
    return Cell(missing) if value is None else Cell(format(value, form), value)


def mean(
    values: Sequence[float], form: str = ".2f", error: bool = False, count: bool = False, missing: str = MISSING
) -> Cell:
    """`65.30 ± 0.41`: the mean over seeds with its standard deviation, or with the standard error of the mean; `count`
    appends the number of seeds, `65.30 ± 0.41 (3)`. With the form `+.2f`, the mean has a sign."""
    if not values:
        return Cell(missing)
    average = statistics.mean(values)
    text = format(average, form)
    if len(values) > 1:
        deviation = statistics.stdev(values) / (len(values) ** 0.5 if error else 1)
        text += f" ± {deviation:{form.removeprefix('+')}}" + f" ({len(values)})" * count
    return Cell(text, average)


def percent(share: float | None) -> Cell:
    """`14 %` for 0.14."""
    return Cell(MISSING) if share is None else Cell(f"{100 * share:.0f} %", share)


def code(text: str, missing: str = MISSING) -> Cell:
    return Cell(text or missing, code=bool(text))


def duration(seconds: float) -> str:
    """`8 s`, `3 min 05 s`, `2 h 04 min`, rounded to the unit shown."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def html_cell(cell: Cell, kind: str) -> str:
    text = html.escape(cell.text if cell.value is None else cell.text.replace("-", "−"))
    if cell.code and len(text) > LONG_CODE:  # may break between its words, but not within `--seed`
        words = [f"<span>{word}</span>" if len(word) <= LONG_CODE else word for word in text.split(" ")]
        text = f'<code class="long">{" ".join(words)}</code>'
    elif cell.code:
        text = f"<code>{text}</code>"
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f'<td class="{kind}"{value}>{text}</td>'


def escape_latex(text: str) -> str:
    """Every special character as text, so that a name cannot contain a command."""
    return "".join(LATEX.get(letter, letter) if letter.isprintable() else " " for letter in text)


def latex_cell(cell: Cell) -> str:
    """A signed number and its spread as one formula; commit hashes shortened, so that a table fits the page."""
    text = COMMIT.sub(r"\1", cell.text)
    if cell.code:
        return rf"\texttt{{{escape_latex(text)}}}"
    if match := re.fullmatch(r"([+-]?[\d.]+)(?: ± ([\d.]+))?( \(\d+\))?", text):
        value, deviation, count = match[1], match[2], match[3] or ""
        if deviation:
            return rf"${value}_{{\pm {deviation}}}${count}"
        return f"${value}${count}" if value[0] in "+-" else value + count
    return escape_latex(text)
