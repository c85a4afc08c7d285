"""Prompt templates and class names as text."""

from __future__ import annotations

import pytest

from incvec.data.prompts import TEMPLATES, sentences, spoken, templates
from incvec.errors import ConfigError


def test_sentences() -> None:
    assert len(TEMPLATES["cifar100"]) == len(set(TEMPLATES["cifar100"])) == 18
    assert TEMPLATES["cifar100"][0] == "a photo of a {}."
    assert TEMPLATES["cifar100"][-1] == "a photo of the big {}."
    assert sentences(TEMPLATES["aircraft"][1], ["707-320"]) == ["a photo of the 707-320, a type of aircraft."]
    assert [spoken(name) for name in ("aquarium_fish", "7", "747-400", "Yak-42", "12")] == [
        "aquarium fish", "seven", "747-400", "Yak-42", "12",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"'cifar10'.*cifar100"):
        templates("cifar10")
