"""The layout of a record's file, and which losses are in it."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from incvec.data import Dataset
from incvec.engine.record import thin_losses
from incvec.engine.run import finish
from incvec.records import format_json
from tests.conftest import make_run, quick

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner))


@given(values)
def test_layout_loses_nothing(value: object) -> None:
    assert json.loads(format_json(value)) == value


def test_lists_of_numbers_are_on_one_line(few: Dataset, tmp_path: Path) -> None:
    run = make_run(few, tmp_path, quick("finetune"))
    record = finish(run)
    text = run.record_path.read_text()
    assert json.loads(text) == json.loads(json.dumps(record))
    assert f'"class_order": {json.dumps(record["class_order"], separators=(",", ":"))}' in text


def test_long_stages_have_every_fifth_epoch() -> None:
    row = {"task": 1, "stage": "main", "terms": {"ce": [float(epoch) for epoch in range(1, 24)]}, "seconds": 1.0}
    thin = thin_losses(row)
    assert thin["epochs"] == [1, 5, 10, 15, 20, 23]
    assert thin["terms"] == {"ce": [1.0, 5.0, 10.0, 15.0, 20.0, 23.0]}
    assert thin_losses(thin) == thin
    short = row | {"terms": {"ce": [1.0] * 20}}
    assert thin_losses(short) == short
    assert thin_losses(row | {"terms": {}})["terms"] == {}
