"""Colors, markers and labels of methods, add-ons, oracles and data sets: the same in every figure, table and page.

A run is identified by its title (`incvec.records.title`): `podnet`, `podnet + ivt`, `podnet oracle`. A plain method has
a style of its own, with a hollow marker in charts. A method with add-ons has the style of its last add-on. Every oracle
is a green star. Colors are from the schemes of Okabe and Ito and of Tol, which color-blind readers can tell apart.
Methods that share a color differ in their markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GRAY = "#7F7F7F"
TITLE_COLOR = "#222222"
NOTE_COLOR = "#555555"
GRID = "#E5E5E5"
COLORMAP = "viridis"  # ordered quantities in figures: tasks, losses
HEATMAP = "cividis"  # accuracy matrices
DARK_BACKGROUND = "#1C2126"
CONTRAST = 4.5  # the minimum that WCAG requires of text
DOTTED, DASHED = (1.0, 1.5), (5.0, 2.0)


class RunStyle(NamedTuple):
    label: str
    color: str
    marker: str
    dashes: tuple[float, ...] = ()
    hollow: bool = False

    @property
    def size(self) -> int:
        """Marker size: a star of the same size looks smaller."""
        return 11 if self.marker == "*" else 7


ORACLE = RunStyle("oracle", "#009E73", "*", DASHED)
METHODS = {
    "finetune": RunStyle("finetune", GRAY, "^", DOTTED),
    "replay": RunStyle("replay", GRAY, "v"),
    "joint": RunStyle("joint", "#882255", "P", DOTTED),
    "lwf": RunStyle("LwF", "#999933", "<"),
    "ewc": RunStyle("EWC", "#999933", ">"),
    "icarl": RunStyle("iCaRL", "#E69F00", "v"),
    "bic": RunStyle("BiC", "#DDCC77", "p"),
    "lucir": RunStyle("LUCIR", "#CC79A7", "D"),
    "mnemonics": RunStyle("Mnemonics", "#DDCC77", "h"),
    "podnet": RunStyle("PODNet", "#D55E00", "s"),
    "geodl": RunStyle("GeoDL", "#44AA99", "X"),
    "mrfa": RunStyle("MRFA", "#56B4E9", "d"),
    "pass": RunStyle("PASS", "#AA4499", "^"),
    "ssre": RunStyle("SSRE", "#332288", "<"),
    "fcs": RunStyle("FCS", "#CC6677", ">"),
    "flyp": RunStyle("FLYP", "#D55E00", "D"),
    "slca": RunStyle("SLCA", "#CC79A7", "s"),
    "rapf": RunStyle("RAPF", "#E69F00", "^"),
    "spu": RunStyle("SPU", "#56B4E9", "v"),
    "zeroshot": RunStyle("zero-shot", GRAY, "d"),
}
ADDONS = {
    "ivt": RunStyle("IVT", "#0072B2", "o"),
    "eopc": RunStyle("EOPC", "#56B4E9", "X"),
    "cofima": RunStyle("CoFiMA", "#AA4499", "p"),
    "magmax": RunStyle("MagMax", "#E69F00", "h"),
    "imm": RunStyle("IMM", "#999933", "d"),
    "fisher-merge": RunStyle("Fisher merge", "#332288", "8"),
}
SPARE = (("#000000", "8"), ("#117733", "H"), ("#661100", "1"))  # for names that are not listed
DATASETS = {
    "aircraft": "Aircraft",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet",
    "imagenet-subset": "ImageNet-Subset",
    "tiny-imagenet-100": "Tiny-ImageNet-100",
}


def run_style(title: str) -> RunStyle:
    """The style of a run, by its title."""
    method, addons, oracle = parse_title(title)
    style = ORACLE if oracle else _entry(ADDONS, addons[-1]) if addons else _entry(METHODS, method)
    return style._replace(label=label(title), hollow=not addons and not oracle)


def label(title: str) -> str:
    """`podnet + ivt` -> `PODNet + IVT`."""
    method, addons, oracle = parse_title(title)
    names = [_entry(METHODS, method).label, *(_entry(ADDONS, name).label for name in addons)]
    return " + ".join(names) + (" oracle" if oracle else "")


def dataset(name: str) -> str:
    """`cifar100` -> `CIFAR-100`."""
    return DATASETS.get(name, name)


def parse_title(title: str) -> tuple[str, list[str], bool]:
    """Method, add-ons, and whether it is an oracle."""
    plain = title.removesuffix(" oracle")
    method, *addons = plain.split(" + ")
    return method, addons, plain != title


def _entry(known: dict[str, RunStyle], name: str) -> RunStyle:
    return known.get(name) or RunStyle(name, *SPARE[sum(name.encode()) % len(SPARE)])


def palette() -> list[str]:
    """Every color that a run can have."""
    styles = (ORACLE, *METHODS.values(), *ADDONS.values())
    return list(dict.fromkeys([*(style.color for style in styles), *(color for color, _ in SPARE)]))


def dark(color: str, background: str = DARK_BACKGROUND) -> str:
    """The color mixed with just enough white to have `CONTRAST` on a dark background."""
    for step in range(21):
        mixed = [round(value + step / 20 * (255 - value)) for value in channels(color)]
        if contrast(mixed, channels(background)) >= CONTRAST:
            return "#" + "".join(f"{value:02X}" for value in mixed)
    return "#FFFFFF"


def channels(color: str) -> list[int]:
    """`#FF8000` -> [255, 128, 0]."""
    return list(bytes.fromhex(color[1:]))


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """WCAG's ratio of the luminances of two colors, from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: Sequence[int]) -> float:
    linear = [v / 12.92 if (v := value / 255) <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for value in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
