"""The lab's looks by a record's title (`podnet`, `podnet + ivt`, `podnet oracle`), and what a page needs beside:
the same colors for a dark ground. Plain methods have empty markers, so that no two runs of a figure differ in
color alone."""

from __future__ import annotations

from collections.abc import Iterable

from incvec.study import style
from incvec.study.style import Look

DARK_GROUND = "#1C2126"
CONTRAST = 4.5  # what WCAG asks of text; our lines then stand out well


def parts(name: str) -> tuple[str, list[str], bool]:
    """Method, add-ons and whether it is an oracle."""
    plain = name.removesuffix(" oracle")
    method, *addons = plain.split(" + ")
    return method, addons, plain != name


def look(name: str) -> Look:
    return style.look(*parts(name))


def label(name: str) -> str:
    """`PODNet + IVT`."""
    return style.label(*parts(name))


def dataset(name: str) -> str:
    return style.dataset(name)


def hollow(name: str) -> bool:
    """Whether its marker is empty: plain methods' are."""
    _, addons, oracle = parts(name)
    return not addons and not oracle


def palette() -> list[str]:
    """Every color there is."""
    listed = [style.ORACLE[0], style.JOINT[0], *(color for color, _ in style.SPARE)]
    listed += [entry[1] for known in (style.METHODS, style.ADDONS) for entry in known.values()]
    return list(dict.fromkeys(listed))


def dark(color: str, ground: str = DARK_GROUND) -> str:
    """The color mixed with as little white as makes it stand out from a dark ground."""
    red, green, blue = channels(color)
    for step in range(21):
        share = step / 20
        mixed = [round(value + share * (255 - value)) for value in (red, green, blue)]
        if contrast(mixed, channels(ground)) >= CONTRAST:
            return "#" + "".join(f"{value:02X}" for value in mixed)
    return "#FFFFFF"


def channels(color: str) -> list[int]:
    return [int(color[place : place + 2], 16) for place in (1, 3, 5)]


def contrast(one: Iterable[int], other: Iterable[int]) -> float:
    """WCAG's ratio of two colors' luminances, from 1 to 21."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: Iterable[int]) -> float:
    linear = [v / 12.92 if (v := value / 255) <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for value in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
