"""Settings that the classifier chooses for a backbone, and the run that they configure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from incvec import Classifier
from incvec.classifier.learning import make_draft
from incvec.classifier.settings import FINE_TUNING, FINE_TUNING_METHODS, choose, resolve_sections
from incvec.classifier.training import make_config
from incvec.methods import find_method
from tests.classifier.folders import TINY, write_classes


def sections(method: str, pretrained: bool = True, **given: Any) -> dict[str, Any]:
    chosen = choose("tiny", method, (), {method: given} if given else None, None, 5, None, 0, pretrained)
    return resolve_sections(chosen)[method]


@pytest.mark.parametrize("method", sorted(FINE_TUNING_METHODS))
def test_pretrained_backbones_have_settings_of_their_own(method: str) -> None:
    own, scratch = sections(method), sections(method, pretrained=False)
    expected = {name: value for name, value in FINE_TUNING.items() if name in own} | FINE_TUNING_METHODS[method]
    assert {name: own[name] for name in expected} == {k: [] if v == [] else v for k, v in expected.items()}
    for name, value in FINE_TUNING_METHODS[method].items():
        assert scratch[name] != value
        given = scratch[name] if isinstance(value, str) else type(value)(3)
        assert sections(method, **{name: given})[name] == given  # what the user gives counts


@pytest.mark.parametrize(("method", "precision"), [("replay", "auto"), ("lda", "fp32")])
def test_nothing_is_compiled_and_frozen_features_are_exact(method: str, precision: str) -> None:
    chosen = choose("tiny", method, (), None, None, 5, None, 0, True)
    draft = make_draft(chosen, None, ("a", "b"), (2,), resolve_sections(chosen))
    config = make_config(chosen, draft, "cpu")
    assert (config.engine, config.precision) == ("eager", precision)
    assert find_method(method).trains == (precision == "auto")


@pytest.mark.parametrize("method", ["lucir", "podnet"])
def test_initial_scale(method: str, tmp_path: Path) -> None:
    write_classes(tmp_path / "photos", range(2), 6)
    given: dict[str, Any] = {"initial_scale": 9.0, "lr": 1e-9, "epochs": 1}
    classifier = Classifier.fit(
        tmp_path / "photos", tmp_path / "m", **{**TINY, "method": method, "settings": {method: given}}
    )
    tensors, _ = classifier.folder.read_weights(classifier.description)
    assert tensors["method/model.head.scale"].item() == pytest.approx(9.0, rel=1e-6)
