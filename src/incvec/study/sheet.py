"""A table once, in three forms: Markdown, LaTeX with booktabs, and HTML whose columns sort."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from incvec.study.compare import Comparison

LONG = 40  # letters of code that may break
COMMIT = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")


@dataclass(frozen=True)
class Column:
    label: str
    group: str = ""  # a heading above neighbors that share it
    number: bool = True


@dataclass(frozen=True)
class Cell:
    text: str = ""
    value: float | None = None  # what it sorts by, where it is a number
    code: bool = False


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    quiet: bool = False  # nothing of ours in it: the page can hide it


@dataclass(frozen=True)
class Sheet:
    slug: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""


def word(text: object) -> Cell:
    return Cell(str(text))


def number(value: float | None, form: str = ".2f", missing: str = "–") -> Cell:
    return Cell(missing) if value is None else Cell(format(value, form).replace("-", "−"), value)


def spread(comparison: Comparison, form: str = ".2f", error: bool = False, missing: str = "–") -> Cell:
    """`65.30 ± 0.41`: the mean with its standard deviation, or with the standard error."""
    if comparison.mean is None:
        return Cell(missing)
    around = comparison.error if error else comparison.deviation
    text = format(comparison.mean, form).replace("-", "−")
    return Cell(text + ("" if around is None else f" ± {around:.2f}"), comparison.mean)


def markdown(sheet: Sheet) -> str:
    """For a document; a group's heading goes before each of its columns."""
    names = [f"{c.group} {c.label}".strip() for c in sheet.columns]
    lines = ["| " + " | ".join(names) + " |"]
    lines.append("|" + "|".join("---:" if c.number else "---" for c in sheet.columns) + "|")
    for row in sheet.rows:
        texts = [cell.text.replace("|", "\\|") for cell in row.cells]
        shown = [f"`{text}`" if cell.code else text for cell, text in zip(row.cells, texts, strict=True)]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "–": "--", "·": r"$\cdot$",
    "↑": r"$\uparrow$", "↓": r"$\downarrow$", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def escaped(text: str) -> str:
    """Text as LaTeX sets it."""
    return "".join(LATEX.get(letter, letter) for letter in text)


def latex_cell(cell: Cell) -> str:
    """A signed number and its spread in one formula, so that signs and gaps come out right; commits cut short, so
    that a table fits the page."""
    text = COMMIT.sub(r"\1", cell.text)
    if cell.code:
        return rf"\texttt{{{escaped(text)}}}"
    if found := re.fullmatch(r"([+−]?[\d.]+)(?: ± ([\d.]+))?", text):
        value = found[1].replace("−", "-")
        if found[2]:
            return rf"${value}_{{\pm {found[2]}}}$"
        return f"${value}$" if value[0] in "+-" else value
    return escaped(text)


def latex(sheet: Sheet) -> str:
    """A table to paste; it needs booktabs, and array where a column breaks."""
    spans = headings(sheet.columns)
    lines = [r"\begin{table}[t]", r"\centering", rf"\caption{{{escaped(sheet.title)}. {escaped(sheet.note)}}}"]
    lines += [rf"\label{{tab:{sheet.slug}}}"]
    kinds = "".join(latex_kind(sheet, place) for place in range(len(sheet.columns)))
    lines += [rf"\begin{{tabular}}{{@{{}}{kinds}@{{}}}}", r"\toprule"]
    if any(text for text, _ in spans):
        shown, rules, place = [], [], 1
        for text, width in spans:
            shown.append(rf"\multicolumn{{{width}}}{{c}}{{{escaped(text)}}}" if text else " & " * (width - 1))
            rules += [rf"\cmidrule(lr){{{place}-{place + width - 1}}}"] if text else []
            place += width
        lines += [" & ".join(shown) + r" \\", " ".join(rules)]
    lines += [" & ".join(escaped(c.label) for c in sheet.columns) + r" \\", r"\midrule"]
    lines += [" & ".join(latex_cell(cell) for cell in row.cells) + r" \\" for row in sheet.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def latex_kind(sheet: Sheet, place: int) -> str:
    """Numbers to the right, words to the left, commands in a column that breaks."""
    if any(row.cells[place].code and len(row.cells[place].text) > LONG for row in sheet.rows):
        return r">{\raggedright\arraybackslash}p{6cm}"
    return "r" if sheet.columns[place].number else "l"


def headings(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Neighboring columns of one group, and how many they are."""
    spans: list[tuple[str, int]] = []
    for column in columns:
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1] + 1)
        else:
            spans.append((column.group, 1))
    return spans


def markup(sheet: Sheet, above: str = "") -> str:
    """For the page: headings are buttons that sort, cells carry the number they sort by. `above` is the section's
    title, which is not said twice."""
    lines = [f'<div class="table" id="{html.escape(sheet.slug)}">']
    lines += [f"<h3>{html.escape(sheet.title)}</h3>"] if sheet.title != above else []
    if sheet.note:
        lines.append(f'<p class="note">{html.escape(sheet.note)}</p>')
    if any(row.quiet for row in sheet.rows) and not all(row.quiet for row in sheet.rows):
        lines.append('<label class="quiet"><input type="checkbox"> also show rows that were not run</label>')
    lines.append('<div class="scroll" tabindex="0"><table><thead>')
    if any(column.group for column in sheet.columns):
        cells = [f'<th colspan="{width}">{html.escape(text)}</th>' for text, width in headings(sheet.columns)]
        lines.append('<tr class="groups">' + "".join(cells) + "</tr>")
    lines.append("<tr>")
    for place, column in enumerate(sheet.columns):
        label = html.escape(column.label)
        edge = starts_group(sheet.columns, place)
        kind = " ".join(name for name, wanted in (("number", column.number), ("edge", edge)) if wanted)
        lines.append(f'<th class="{kind}" scope="col"><button type="button">{label}</button></th>')
    lines.append("</tr></thead><tbody>")
    for row in sheet.rows:
        lines.append('<tr class="not-run">' if row.quiet else "<tr>")
        for place, (column, cell) in enumerate(zip(sheet.columns, row.cells, strict=True)):
            text = html.escape(cell.text)
            edge = starts_group(sheet.columns, place)
            kind = " ".join(name for name, wanted in (("number", column.number), ("edge", edge)) if wanted)
            value = "" if cell.value is None else f' data-value="{cell.value!r}"'
            lines.append(f'<td class="{kind}"{value}>{code(text) if cell.code else text}</td>')
        lines.append("</tr>")
    return "".join([*lines, "</tbody></table></div></div>"])


def code(text: str) -> str:
    """A long one, such as a command, may break between its words (not within `--seed`)."""
    if len(text) <= LONG:
        return f"<code>{text}</code>"
    words = [f"<span>{word}</span>" if len(word) <= LONG else word for word in text.split(" ")]
    return f'<code class="long">{" ".join(words)}</code>'


def starts_group(columns: Sequence[Column], place: int) -> bool:
    return bool(columns[place].group) and (place == 0 or columns[place - 1].group != columns[place].group)
