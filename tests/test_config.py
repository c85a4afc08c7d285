"""The differences between two configurations, and settings under their earlier names."""

from __future__ import annotations

import pytest

from incvec.config import TrainOptions, differences, upgrade_settings, validate
from incvec.errors import ConfigError


def test_differences_start_with_method_and_addons_and_summarize_sections() -> None:
    saved = {"addons": ["ivt"], "dataset": "digits", "ivt": {"interval": 5}, "method": "podnet", "podnet": {"lr": 0.1}}
    given = {"addons": [], "dataset": "cifar100", "finetune": {"lr": 0.2}, "method": "finetune"}
    assert differences(given, saved) == [
        "method: 'podnet' -> 'finetune'",
        "addons: ['ivt'] -> []",
        "dataset: 'digits' -> 'cifar100'",
        "finetune: section added",
        "ivt: section removed",
        "podnet: section removed",
    ]


def test_differences_within_a_section_are_listed() -> None:
    saved = {"held_out": 4, "podnet": {"epochs": 1, "lr": 0.1}}
    given = {"podnet": {"epochs": 2, "lr": 0.1}}
    assert differences(given, saved) == ["held_out: 4 -> 'absent'", "podnet.epochs: 1 -> 2"]


def test_renamed_setting_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"the setting podnet\.normalisation is now called podnet\.normalization\."):
        validate(TrainOptions, {"normalisation": "default"}, where="podnet")


def test_renamed_settings_are_translated_in_saved_configurations() -> None:
    saved = {"method": "podnet", "podnet": {"optimiser": "sgd", "lr": 0.1}, "eopc": {"centre": 0.75}}
    assert upgrade_settings(saved) == {
        "method": "podnet", "podnet": {"optimizer": "sgd", "lr": 0.1}, "eopc": {"center": 0.75},
    }  # fmt: skip
