"""One table in four formats."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from incvec.study.tables import Cell, Column, Table, code, duration, make_row, mean, number


@pytest.fixture
def table() -> Table:
    columns = ["run", Column("AA ↑ ours"), Column("AA ↑ diff"), "set", Column("last\none")]
    cells = ["A & B_1", mean([1.0, 2.0]), number(-0.5, "+.2f"), code("x=#1|2"), number(None)]
    return Table(columns, [cells, make_row("[b]<i>", *cells[1:], dim=True)], "50 % off", "Note", "s")


def test_markdown(table: Table) -> None:
    assert table.markdown().splitlines() == [
        "| run | AA ↑ ours | AA ↑ diff | set | last one |",
        "|---|---:|---:|---|---:|",
        r"| A & B_1 | 1.50 ± 0.71 | -0.50 | `x=#1\|2` | – |",
        r"| [b]<i> | 1.50 ± 0.71 | -0.50 | `x=#1\|2` | – |",
    ]


def test_latex(table: Table) -> None:
    assert table.latex().splitlines() == [
        r"\begin{table}[t]",
        r"\centering",
        r"\caption{50 \% off. Note}",
        r"\label{tab:s}",
        r"\begin{tabular}{@{}lrrlr@{}}",
        r"\toprule",
        r"run & AA $\uparrow$ ours & AA $\uparrow$ diff & set & last one \\",
        r"\midrule",
        r"A \& B\_1 & $1.50_{\pm 0.71}$ & $-0.50$ & \texttt{x=\#1|2} & -- \\",
        r"{}[b]\textless{}i\textgreater{} & $1.50_{\pm 0.71}$ & $-0.50$ & \texttt{x=\#1|2} & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_html(table: Table) -> None:
    text = table.html()
    assert text.startswith('<div class="table" id="s"><h3>50 % off</h3><p class="note">Note</p><label')
    assert "<h3>" not in table.html(section="50 % off")
    assert '<td class="number" data-value="1.5">1.50 ± 0.71</td>' in text
    assert '<tr class="not-run"><td class="">[b]&lt;i&gt;</td>' in text
    assert re.findall(r"<code>.*?</code>", text) == ["<code>x=#1|2</code>"] * 2


def test_long_code_breaks_between_words() -> None:
    words = "incvec run --method podnet --seed 0 --set " + "x" * 50
    text = Table(["command"], [[code(words)]]).html()
    assert "<span>--seed</span> <span>0</span>" in text
    assert f" {'x' * 50}</code>" in text
    assert "p{6cm}" in Table(["command"], [[code(words)]]).latex()


def test_terminal(table: Table) -> None:
    text = io.StringIO()
    Console(file=text, width=60).print(table.rich())
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    assert lines[0] == "50 % off"
    assert lines[-1] == "Note"
    assert any("[b]<i>" in line and line.endswith("–") for line in lines)
    assert {"last", "one"} == {line.split()[-1] for line in lines[1:3]}


def test_commit_hashes_are_short_in_latex_only() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    table = Table(["commit"], [[commit + ", abc123"], ["1234567890123456"]])
    assert "0123456789, abc123 " in table.latex()
    assert "1234567890123456" in table.latex()
    assert commit in table.markdown()
    assert commit in table.html()


def test_missing_numbers() -> None:
    assert number(None) == mean([]) == Cell("–")
    assert mean([], missing="not run") == Cell("not run")
    assert mean([1.0, 3.0], "+.1f", error=True) == Cell("+2.0 ± 1.0", 2.0)
    assert code("") == Cell("–")


def test_names_cannot_contain_latex_commands() -> None:
    table = Table(["run", Column("LA")], [["\\input{/etc/passwd} $x$ & 5% #1 _ ~^ \0", number(1.0)], ["[2pt] a", ""]])
    first, second = table.latex().split("\\midrule\n")[1].splitlines()[:2]
    assert first.startswith("\\textbackslash{}input\\{/etc/passwd\\} \\$x\\$ \\& 5\\% \\#1 \\_ ")
    assert second.startswith("{}[2pt] a & ")  # not the option of the line break before it
    assert "\\n" not in table.markdown()


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.7, 185)] == ["0 s", "1 min 00 s", "3 min 05 s"]
    assert [duration(seconds) for seconds in (3599, 3599.7, 7465)] == ["59 min 59 s", "1 h 00 min", "2 h 04 min"]
    assert [duration(seconds) for seconds in (7475, 10795)] == ["2 h 05 min", "3 h 00 min"]
