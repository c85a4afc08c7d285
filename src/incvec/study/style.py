"""How things look in every figure: one color, marker and dash pattern for each method, add-on, and the oracle.

A plain method has its own look; with add-ons it has that of its last add-on; an oracle is a green star, whatever its
method. Figures that show add-ons of several methods give each method a panel of its own. Colors are those of Okabe
and Ito, and of Tol's muted scheme, which color-blind readers can tell apart; where two methods share a color,
their markers differ.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

GRAY = "#7F7F7F"
INK = "#222222"
GRID = "#E5E5E5"
SEQUENTIAL = "viridis"  # for what has an order: tasks, losses


class Look(NamedTuple):
    label: str
    color: str
    marker: str
    dashes: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Of the marker: a star looks smaller than it is."""
        return 11 if self.marker == "*" else 7


ORACLE = ("#009E73", "*", (5.0, 2.0))
JOINT = ("#882255", "P", (1.0, 1.5))

METHODS: dict[str, tuple[str, str, str]] = {
    "finetune": ("finetune", GRAY, "^"),
    "replay": ("replay", GRAY, "v"),
    "joint": ("joint", JOINT[0], JOINT[1]),
    "lwf": ("LwF", "#999933", "<"),
    "ewc": ("EWC", "#999933", ">"),
    "icarl": ("iCaRL", "#E69F00", "v"),
    "bic": ("BiC", "#DDCC77", "p"),
    "lucir": ("LUCIR", "#CC79A7", "D"),
    "mnemonics": ("Mnemonics", "#DDCC77", "h"),
    "podnet": ("PODNet", "#D55E00", "s"),
    "geodl": ("GeoDL", "#44AA99", "X"),
    "mrfa": ("MRFA", "#56B4E9", "d"),
    "pass": ("PASS", "#AA4499", "^"),
    "ssre": ("SSRE", "#332288", "<"),
    "fcs": ("FCS", "#CC6677", ">"),
    "flyp": ("FLYP", "#D55E00", "D"),
    "slca": ("SLCA", "#CC79A7", "s"),
    "rapf": ("RAPF", "#E69F00", "^"),
    "spu": ("SPU", "#56B4E9", "v"),
    "zeroshot": ("zero-shot", GRAY, "d"),
}
ADDONS: dict[str, tuple[str, str, str]] = {
    "ivt": ("IVT", "#0072B2", "o"),
    "eopc": ("EOPC", "#56B4E9", "X"),
    "cofima": ("CoFiMA", "#AA4499", "p"),
    "magmax": ("MagMax", "#E69F00", "h"),
    "imm": ("IMM", "#999933", "d"),
    "fisher-merge": ("Fisher merge", "#332288", "8"),
}
DATASETS = {
    "aircraft": "Aircraft",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet",
    "imagenet-subset": "ImageNet-Subset",
    "tiny-imagenet-100": "Tiny-ImageNet-100",
}
SPARE = (("#000000", "8"), ("#117733", "H"), ("#661100", "1"))  # for names that are not listed


def dataset(name: str) -> str:
    return DATASETS.get(name, name)


def label(method: str, addons: Sequence[str] = (), oracle: bool = False) -> str:
    """`PODNet + IVT`, `PODNet oracle`."""
    names = [_entry(METHODS, method)[0], *(_entry(ADDONS, name)[0] for name in addons)]
    return " + ".join(names) + (" oracle" if oracle else "")


def look(method: str, addons: Sequence[str] = (), oracle: bool = False) -> Look:
    """The look of a run, the same in every figure."""
    told = label(method, addons, oracle)
    if oracle:
        return Look(told, *ORACLE)
    if addons:
        return Look(told, *_entry(ADDONS, addons[-1])[1:])
    if method == "joint":
        return Look(told, *JOINT)
    return Look(told, *_entry(METHODS, method)[1:], dashes=(1.0, 1.5) if method == "finetune" else ())


def _entry(known: dict[str, tuple[str, str, str]], name: str) -> tuple[str, str, str]:
    return known.get(name) or (name, *SPARE[sum(name.encode()) % len(SPARE)])


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure without a display, and its axes as a table (none of them where the caller divides it himself)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False) if rows else None


def tidy(axes: Any, title: str, x: str, y: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def colored_words(axes: Any, words: Sequence[tuple[str, str]]) -> None:
    """Words in a row at the right end of the title's line, each in a color of its own."""
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    parts: list[Any] = [TextArea(text, textprops={"color": color, "fontsize": 9}) for text, color in words]
    row = HPacker(children=parts, align="baseline", pad=0, sep=6)
    anchored = AnchoredOffsetbox(
        "lower right", child=row, frameon=False, pad=0, borderpad=0.35, bbox_to_anchor=(1, 1),
        bbox_transform=axes.transAxes,
    )  # fmt: skip
    axes.add_artist(anchored)


def legend_below(figure: Any, axes: Any, columns: int = 4) -> None:
    """One legend for all panels, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)


def note(figure: Any, text: str) -> None:
    """How it was made, small, above the panels, in as many lines as the width asks for."""
    lines = textwrap.wrap(text, int(15 * figure.get_figwidth()))
    figure.suptitle("\n".join(lines), fontsize=8.5, color="#555555", x=0.01, ha="left")


def save(figure: Any, stem: Path) -> list[Path]:
    """PNG and PDF; without dates inside, so that the same numbers give the same files."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(stem.name + end) for end in (".png", ".pdf")]
    figure.savefig(files[0], metadata={"Software": None}, pil_kwargs={"optimize": True})
    figure.savefig(files[1], metadata={"CreationDate": None})
    return files
