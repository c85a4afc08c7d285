"""Prompts for text encoders: templates, and class names as text.

A training caption is one sentence. The zero-shot classifier is the mean over the templates of a data set, as in CLIP's
evaluation (Radford et al., ICML 2021, https://arxiv.org/abs/2103.00020). `{}` stands for the class name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from incvec.errors import ConfigError, nearest

_CIFAR = (
    "a photo of {article} {{}}.",
    "a blurry photo of {article} {{}}.",
    "a black and white photo of {article} {{}}.",
    "a low contrast photo of {article} {{}}.",
    "a high contrast photo of {article} {{}}.",
    "a bad photo of {article} {{}}.",
    "a good photo of {article} {{}}.",
    "a photo of {article} small {{}}.",
    "a photo of {article} big {{}}.",
)

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "photo": ("a photo of a {}",),
    "caption": ("a photo of {}",),
    "good": ("a good photo of a {}.",),
    "cifar100": tuple(template.format(article=article) for article in ("a", "the") for template in _CIFAR),
    "aircraft": ("a photo of a {}, a type of aircraft.", "a photo of the {}, a type of aircraft."),
}

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def templates(name: str) -> tuple[str, ...]:
    if name not in TEMPLATES:
        known = ", ".join(TEMPLATES)
        raise ConfigError(f"unknown prompt templates {name!r}.{nearest(name, TEMPLATES)} Known templates: {known}.")
    return TEMPLATES[name]


def spoken(class_name: str) -> str:
    """A class name as text: spaces for underscores, and a single digit as a word."""
    if len(class_name) == 1 and class_name.isdecimal() and class_name.isascii():
        return _NUMBERS[int(class_name)]
    return " ".join(class_name.replace("_", " ").split())


def sentences(template: str, class_names: Sequence[str]) -> list[str]:
    """One sentence per class."""
    return [template.format(spoken(name)) for name in class_names]
