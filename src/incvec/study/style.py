"""Colors, markers and labels of methods, add-ons, oracles and data sets: the same in every figure, table and page.

A run is identified by its title (`incvec.records.title`): `podnet`, `podnet + ivt`, `podnet oracle`. A plain method has
a style of its own, with a hollow marker in charts. A method with add-ons has the style of its last add-on. Every oracle
is a green star. Colors are from the schemes of Okabe and Ito and of Tol, which color-blind readers can tell apart.
Methods that share a color differ in their markers. `distinct` gives the runs of one chart different colors.
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
LIGHT_BACKGROUND, DARK_BACKGROUND = "#F7F8FA", "#1C2126"
CONTRAST = 4.5  # the minimum that WCAG requires of text
GRAPHIC_CONTRAST = 3.0  # and of lines and marks
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
    "lda": RunStyle("LDA", "#999933", "X"),
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
    "carry": RunStyle("carry", "#6A3D9A", "P"),
    "eopc": RunStyle("EOPC", "#EE3377", "X"),
    "cofima": RunStyle("CoFiMA", "#AA4499", "p"),
    "magmax": RunStyle("MagMax", "#E69F00", "h"),
    "imm": RunStyle("IMM", "#999933", "d"),
    "fisher-merge": RunStyle("Fisher merge", "#332288", "8"),
}
SPARE = (("#000000", "8"), ("#117733", "H"), ("#661100", "p"))  # for names that are not listed
# Colors for further runs of one chart, told apart on a light and on a dark background.
DISTINCT = (
    "#0072B2", "#D55E00", "#009E73", "#EE3377", "#BBBB00", "#661100", "#AA4499", "#E69F00", "#332288", "#CC6677",
    "#7F7F7F", "#44AA99",
)  # fmt: skip
MARKERS = "osD^vX<p>dPh*8H"
MAX_LABEL = 60  # characters of a name in titles and labels
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


def distinct(titles: Sequence[str]) -> list[RunStyle]:
    """The styles of runs in one chart: each its own if it is still free, else another color and marker."""
    own = [run_style(title) for title in titles]
    colors = [color for color in DISTINCT if color not in {style.color for style in own}]
    markers = [marker for marker in MARKERS if marker not in {style.marker for style in own}]
    styles: list[RunStyle] = []
    for number, style in enumerate(own):
        taken = style.color in {other.color for other in styles}
        color = colors.pop(0) if taken and colors else DISTINCT[number % len(DISTINCT)]
        marker = markers.pop(0) if taken and markers else MARKERS[number % len(MARKERS)]
        styles.append(style._replace(color=color, marker=marker) if taken else style)
    return styles


def label(title: str) -> str:
    """`podnet + ivt` -> `PODNet + IVT`."""
    method, addons, oracle = parse_title(title)
    names = [_entry(METHODS, method).label, *(_entry(ADDONS, name).label for name in addons)]
    return " + ".join(map(shorten, names)) + (" oracle" if oracle else "")


def dataset(name: str) -> str:
    """`cifar100` -> `CIFAR-100`."""
    return DATASETS.get(name) or shorten(name)


def shorten(text: str) -> str:
    """On one line, without characters that cannot be printed, of bounded length."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"


def parse_title(title: str) -> tuple[str, list[str], bool]:
    """Method, add-ons, and whether it is an oracle."""
    plain = title.removesuffix(" oracle")
    method, *addons = plain.split(" + ")
    return method, addons, plain != title


def _entry(known: dict[str, RunStyle], name: str) -> RunStyle:
    return known.get(name) or RunStyle(name, *SPARE[sum(name.encode(errors="replace")) % len(SPARE)])


def palette() -> list[str]:
    """Every color that a run can have."""
    styles = (ORACLE, *METHODS.values(), *ADDONS.values())
    return list(dict.fromkeys([*(style.color for style in styles), *(color for color, _ in SPARE), *DISTINCT]))


def light(color: str) -> str:
    """The color mixed with just enough black to have `GRAPHIC_CONTRAST` on a light background."""
    return readable(color, 0, LIGHT_BACKGROUND, GRAPHIC_CONTRAST)


def dark(color: str) -> str:
    """The color mixed with just enough white to have `CONTRAST` on a dark background."""
    return readable(color, 255, DARK_BACKGROUND, CONTRAST)


def readable(color: str, towards: int, background: str, ratio: float) -> str:
    """The color mixed with black (0) or white (255) until its contrast is at least `ratio`."""
    for step in range(21):
        mixed = [round(value + step / 20 * (towards - value)) for value in channels(color)]
        if contrast(mixed, channels(background)) >= ratio:
            break
    return "#" + "".join(f"{value:02X}" for value in mixed)


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
