"""FGVC-Aircraft in torchvision's layout, and copies with some of its variants."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import FGVCAircraft
from typer.testing import CliRunner

from incvec.cli.main import app
from incvec.data import aircraft, check, load_dataset
from incvec.errors import DataError

NAMES = ["707-320", "F-16A/B", "MD-80"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three variants in torchvision's layout, with four trainval and two test images each."""
    data = tmp_path / "fgvc-aircraft-2013b" / "data"
    (data / "images").mkdir(parents=True)
    variants = ["737-200", "A330 200", "Yak-42"]
    (data / "variants.txt").write_text("".join(f"{name}\n" for name in variants))
    number = 1000000
    for split, each in (("trainval", 4), ("test", 2)):
        lines = []
        for label, variant in enumerate(variants):
            for shade in range(each):
                number += 1
                lines.append(f"{number} {variant}\n")
                color = (80 * label, 20 * shade, 100)
                Image.new("RGB", (30 + shade, 20), color).save(data / "images" / f"{number}.jpg")
        (data / f"images_variant_{split}.txt").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def npz(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """Twelve images of one color, four per variant; the last of each is a test image."""
    files = []
    for i in range(12):
        buffer = io.BytesIO()
        Image.new("RGB", (40, 30), (20 * i, 100, 50)).save(buffer, "WEBP", lossless=True)
        files.append(buffer.getvalue())
    np.savez(
        tmp_path / "shard.npz",
        webp=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        label=np.arange(12) % 3,
        is_test=np.arange(12) >= 9,
        class_names=np.array(NAMES),
    )
    return tmp_path / "shard.npz", files


def test_images_and_labels_are_torchvisions(root: Path) -> None:
    data = load_dataset("aircraft", root)
    assert data.class_names == ("737-200", "A330 200", "Yak-42")
    for split, images, labels in (
        ("trainval", data.train_images, data.train_labels),
        ("test", data.test_images, data.test_labels),
    ):
        theirs = FGVCAircraft(str(root), split=split, annotation_level="variant")
        assert [theirs[i][1] for i in range(len(theirs))] == labels.tolist()
        assert images.shape == (len(theirs), 3, 224, 224)
        center = torch.tensor([theirs[i][0].getpixel((15, 10)) for i in range(len(theirs))])
        assert (images[:, :, 112, 112].int() - center).abs().max() <= 3
    assert data.fingerprint == load_dataset("aircraft", root / "fgvc-aircraft-2013b").fingerprint
    assert check(root)[1] == "12 training and 6 test images, 3 variants"


def test_missing_and_inconsistent_files_are_refused(root: Path, tmp_path: Path) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    with pytest.raises(DataError, match=r"has no fgvc-aircraft-2013b/data/variants.txt. Unpack https"):
        load_dataset("aircraft", tmp_path / "nowhere")
    (data / "variants.txt").write_text("737-200\nYak-42\n")
    with pytest.raises(DataError, match=r"'A330 200', which is not in variants.txt"):
        load_dataset("aircraft", root)
    (data / "images_variant_test.txt").unlink()
    (data / "variants.txt").write_text("737-200\nA330 200\nYak-42\n")
    with pytest.raises(DataError, match=r"images_variant_test.txt is missing"):
        load_dataset("aircraft", root)


def test_copy_from_encoded_images(npz: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    source, files = npz
    result = CliRunner().invoke(app, ["data", "aircraft", str(source), str(tmp_path / "root")])
    assert result.exit_code == 0, result.output
    assert "3 variants, 9 trainval and 3 test images" in result.output.replace("\n", " ")
    data = load_dataset("aircraft", tmp_path / "root")
    assert data.class_names == tuple(NAMES)
    assert data.train_labels.tolist() == [0, 1, 2] * 3
    assert data.train_images[4, :, 0, 0].tolist() == [80, 100, 50]
    assert data.test_images[2, :, 5, 5].tolist() == [220, 100, 50]
    assert data.about == {"variants": 3}
    assert (tmp_path / "root/fgvc-aircraft-2013b/data/images/0000004.webp").read_bytes() == files[4]
    (line,) = aircraft.copy(source, tmp_path / "root")  # again, as after an interruption at the very end
    assert line.endswith("which were there already")
    with pytest.raises(DataError, match="already has other images"):
        aircraft.copy(source, tmp_path / "root", ["MD-80"])


def test_copy_some_variants(npz: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    aircraft.copy(npz[0], tmp_path / "whole")
    aircraft.copy(tmp_path / "whole", tmp_path / "two", ["MD-80", "707-320"])
    whole, two = (load_dataset("aircraft", tmp_path / name) for name in ("whole", "two"))
    assert two.class_names == ("707-320", "MD-80")  # the official order
    assert torch.equal(two.train_images, whole.train_images[whole.train_labels != 1])
    assert two.test_labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="no variant 'Concorde'"):
        aircraft.copy(tmp_path / "whole", tmp_path / "none", ["Concorde"])


def test_copy_refuses_other_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", label=np.zeros(2))
    with pytest.raises(DataError, match=r"lacks is_test, class_names, offsets; it has \['label'\]"):
        aircraft.copy(tmp_path / "bare.npz", tmp_path / "root")
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(DataError, match="cannot be read as arrays"):
        aircraft.copy(tmp_path / "text.npz", tmp_path / "root")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("variants.txt", b"\xff\xfe", "cannot be read as text"),
        ("images_variant_trainval.txt", b"", "has no image of"),
        ("images_variant_test.txt", b"../../x 707-320\n", "is not the name of a file"),
        ("images_variant_test.txt", b"a\0b 707-320\n", "is not the name of a file"),
    ],
)
def test_odd_tables_are_refused(name: str, content: bytes, expected: str, root: Path, tmp_path: Path) -> None:
    folder = root / aircraft.FOLDER / "data"
    if name == "images_variant_test.txt":
        content = content.replace(b"707-320", (folder / "variants.txt").read_bytes().splitlines()[0])
    (folder / name).write_bytes(content)
    for use in (
        lambda: load_dataset("aircraft", root),
        lambda: check(root),
        lambda: aircraft.copy(root, tmp_path / "c"),
    ):
        with pytest.raises(DataError, match=rf"{name}.*{expected}"):
            use()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("label", lambda array: array[:-1]), ("label", lambda array: array + 1000), ("label", lambda array: array - 5),
        ("label", lambda array: array.astype(float)), ("label", lambda array: np.asarray(3)),
        ("is_test", lambda array: array[:-1]), ("is_test", lambda array: array.astype(str)),
        ("offsets", lambda array: array[:-1]), ("offsets", lambda array: array + 1000),
        ("offsets", lambda array: array[::-1]), ("offsets", lambda array: array.astype(np.int64) - 5),
    ],
)  # fmt: skip
def test_odd_arrays_are_refused(
    name: str, change: Callable[[Any], Any], npz: tuple[Path, list[bytes]], tmp_path: Path
) -> None:
    with np.load(npz[0]) as file:
        arrays = {key: file[key] for key in file.files}
    np.savez(tmp_path / "odd.npz", **{**arrays, name: change(arrays[name])})
    with pytest.raises(DataError, match=r"odd\.npz: "):
        aircraft.copy(tmp_path / "odd.npz", tmp_path / "copy")
