"""What is told of two configurations that differ."""

from __future__ import annotations

from incvec.config import differences


def test_method_and_addons_are_told_first_and_sections_of_one_side_are_only_named() -> None:
    saved = {"addons": ["ivt"], "dataset": "digits", "ivt": {"interval": 5}, "method": "podnet", "podnet": {"lr": 0.1}}
    given = {"addons": [], "dataset": "cifar100", "finetune": {"lr": 0.2}, "method": "finetune"}
    assert differences(given, saved) == [
        "method: 'podnet' -> 'finetune'",
        "addons: ['ivt'] -> []",
        "dataset: 'digits' -> 'cifar100'",
        "finetune: a new section",
        "ivt: a section that is gone",
        "podnet: a section that is gone",
    ]


def test_settings_of_a_common_section_are_told_one_by_one() -> None:
    saved = {"held_out": 4, "podnet": {"epochs": 1, "lr": 0.1}}
    given = {"podnet": {"epochs": 2, "lr": 0.1}}
    assert differences(given, saved) == ["held_out: 4 -> 'absent'", "podnet.epochs: 1 -> 2"]
