"""The differences between two configurations, and settings under their earlier names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from incvec.addons import ADDONS, find_addon
from incvec.config import (
    MAX_INTEGER,
    Options,
    RunConfig,
    TrainOptions,
    assign,
    differences,
    parse_yaml,
    read_yaml,
    rename_settings,
    validate,
    without_removed_settings,
)
from incvec.errors import ConfigError
from incvec.methods import METHODS, find_method


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


def test_renamed_settings_are_translated_in_saved_configurations() -> None:
    saved = {"method": "podnet", "podnet": {"optimiser": "sgd", "lr": 0.1}, "eopc": {"centre": 0.75}}
    assert rename_settings(saved) == {
        "method": "podnet", "podnet": {"optimizer": "sgd", "lr": 0.1}, "eopc": {"center": 0.75},
    }  # fmt: skip


def test_removed_settings_are_left_out_of_saved_configurations_if_they_had_their_default() -> None:
    saved = {"flyp": {"lr": 0.1, "targets": "diagonal"}, "rapf": {"shrink": True}, "mine": {"shrink": False}}
    assert without_removed_settings(saved) == {"flyp": {"lr": 0.1}, "rapf": {"shrink": True}, "mine": {"shrink": False}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("-2", -2), ("007", 7), ("2.", 2.0), (".5", 0.5), ("1.5e3", 1500.0), (".inf", math.inf),
        ("2024-13-45", "2024-13-45"), ("2024-01-01", "2024-01-01"), ("0x", "0x"), ("0x10", "0x10"), ("0b", "0b"),
        ("190:20:30", "190:20:30"), ("1_000", "1_000"), ("yes", True), ("~", None), ("[1, a]", [1, "a"]), ("", None),
    ],
)  # fmt: skip
def test_yaml_has_the_numbers_of_json(text: str, value: Any) -> None:
    parsed = parse_yaml(text, "it")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "!!int x", "!!float x", "!!bool x", "!!timestamp x", "!!binary x", "!!python/object/apply:os.system [ls]",
        "!x y", "9" * 5000, "[" * 3000, "{a: " * 1000, "[" * 60 + "]" * 60, "&a [*a]", "[", "*a", "{[a]: 1}", "a: b: c",
        "{a: 1, a: 1}", "{a: {b: 1, b: 2}}",
    ],
)  # fmt: skip
def test_yaml_that_cannot_be_a_setting_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the value of --set 'podnet\.epochs="):
        assign({}, f"podnet.epochs={text}")


def test_aliases_must_not_multiply(tmp_path: Path) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else '1'}]" for i in range(12)]
    (tmp_path / "a.yaml").write_text("\n".join(levels))
    with pytest.raises(ConfigError, match=r"a\.yaml has more than 100000 values, aliases included"):
        read_yaml(tmp_path / "a.yaml")


def test_large_yaml_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- 1\n" * 100_000)
    with pytest.raises(ConfigError, match="has more than 262144 bytes"):
        read_yaml(tmp_path / "a.yaml")


def sections() -> list[type[Options]]:
    kinds = [find_method(name).Options for name in METHODS] + [find_addon(name).Options for name in ADDONS]
    return [*kinds, RunConfig]  # type: ignore[list-item]


def test_every_number_is_finite_and_bounded() -> None:
    """Of every setting there is: a number that is not finite, and one that is too large, are refused."""
    tried = 0
    for kind in sections():
        for name, field in kind.model_fields.items():
            if name == "sections":
                continue
            for value, numbers in ((math.nan, "float"), (math.inf, "float"), (MAX_INTEGER + 1, "int")):
                if numbers in str(field.annotation):
                    tried += 1
                    with pytest.raises(ConfigError, match=rf"setting {name}(\.\w+)? = .* is not possible"):
                        validate(kind, {"method": "x", name: value} if kind is RunConfig else {name: value})
    assert tried > 500


@pytest.mark.parametrize("value", ["a\0b", "\ud800", "\x1b[31m", "x" * 5000])
def test_texts_are_printable_and_bounded(value: str) -> None:
    with pytest.raises(ConfigError, match=r"setting net = .* is not possible: expected up to 4096 printable"):
        validate(TrainOptions, {"net": value})
