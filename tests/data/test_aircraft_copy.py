"""Copies of FGVC-Aircraft with some of its variants: from encoded images in one file, and from a whole copy."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from incvec.cli.main import app
from incvec.data import aircraft, load_dataset
from incvec.errors import DataError

NAMES = ["707-320", "F-16A/B", "MD-80"]


def shard(path: Path) -> list[bytes]:
    """Twelve plain images, four a variant, of which the last is a test image."""
    files = []
    for i in range(12):
        buffer = io.BytesIO()
        Image.new("RGB", (40, 30), (20 * i, 100, 50)).save(buffer, "WEBP", lossless=True)
        files.append(buffer.getvalue())
    np.savez(
        path,
        webp=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        label=np.arange(12) % 3,
        is_test=np.arange(12) >= 9,
        class_names=np.array(NAMES),
    )
    return files


def test_from_encoded_images(tmp_path: Path) -> None:
    files = shard(tmp_path / "shard.npz")
    shown = CliRunner().invoke(app, ["data", "aircraft", str(tmp_path / "shard.npz"), str(tmp_path / "root")])
    assert shown.exit_code == 0, shown.output
    assert "3 variants, 9 trainval and 3 test images" in shown.output.replace("\n", " ")
    data = load_dataset("aircraft", tmp_path / "root")
    assert data.class_names == tuple(NAMES)
    assert data.train_labels.tolist() == [0, 1, 2] * 3
    assert data.train_images.shape == (9, 3, 224, 224)
    assert data.train_images[4, :, 0, 0].tolist() == [80, 100, 50]
    assert data.test_images[2, :, 5, 5].tolist() == [220, 100, 50]
    assert data.about == {"variants": 3}
    written = tmp_path / "root/fgvc-aircraft-2013b/data/images/0000004.webp"
    assert written.read_bytes() == files[4]
    with pytest.raises(DataError, match="is there already"):
        aircraft.copy(tmp_path / "shard.npz", tmp_path / "root")


def test_some_variants_of_a_whole_copy(tmp_path: Path) -> None:
    shard(tmp_path / "shard.npz")
    aircraft.copy(tmp_path / "shard.npz", tmp_path / "whole")
    aircraft.copy(tmp_path / "whole", tmp_path / "two", ["MD-80", "707-320"])
    whole, two = (load_dataset("aircraft", tmp_path / name) for name in ("whole", "two"))
    assert two.class_names == ("707-320", "MD-80")  # the official order
    assert torch.equal(two.train_images, whole.train_images[whole.train_labels != 1])
    assert two.test_labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="no variant 'Concorde'"):
        aircraft.copy(tmp_path / "whole", tmp_path / "none", ["Concorde"])


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", label=np.zeros(2))
    with pytest.raises(DataError, match=r"lacks is_test, class_names, offsets; it has \['label'\]"):
        aircraft.copy(tmp_path / "bare.npz", tmp_path / "root")
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(DataError, match="cannot be read as arrays"):
        aircraft.copy(tmp_path / "text.npz", tmp_path / "root")
