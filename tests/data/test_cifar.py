"""CIFAR-100: only the published bytes are unpickled."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from incvec.data import check, cifar, load_dataset
from incvec.errors import DataError

REAL = os.environ.get("INCVEC_DATA")


class Bomb:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def tiny_files() -> dict[str, bytes]:
    """The official layout with two images of two classes each; protocol 3 has bytes, as the original."""
    pixels = np.arange(4 * 3072, dtype=np.uint64).astype(np.uint8).reshape(4, 3072)
    contents = {
        "train": {"data": pixels, "fine_labels": [1, 0, 1, 0], "coarse_labels": [0] * 4},
        "test": {"data": pixels[:2], "fine_labels": [0, 1], "coarse_labels": [0] * 2},
        "meta": {"fine_label_names": ["apple", "bear"], "coarse_label_names": ["thing"]},
    }
    return {name: pickle.dumps(content, protocol=3) for name, content in contents.items()}


def publish(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    published = {n: cifar.Published(len(b), hashlib.md5(b).hexdigest()) for n, b in files.items()}
    monkeypatch.setattr(cifar, "FILES", published)


def write(root: Path, files: dict[str, bytes]) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_official_layout_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tiny_files()
    publish(monkeypatch, files)
    folder = write(tmp_path, files)
    data = load_dataset("cifar100", tmp_path)
    assert data.train_images.shape == (4, 3, 32, 32)
    assert data.train_labels.tolist() == [1, 0, 1, 0]
    assert data.test_labels.tolist() == [0, 1]
    assert data.class_names == ("apple", "bear")
    # red plane first, then green: pixel (row 1, column 2) of the green plane is byte 1024 + 34
    assert data.train_images[0, 1, 1, 2] == (1024 + 34) % 256
    assert data.pad == 4
    assert data.flip
    assert data.normalizations["default"] == ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
    assert data.normalizations["lucir"] == ((0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023))
    inside = load_dataset("cifar100", folder)
    assert torch.equal(inside.train_images, data.train_images)
    report = check(tmp_path)
    assert any("4 training and 2 test images" in line for line in report)


def test_the_fingerprint_depends_on_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = []
    for name, labels in (("a", [0, 1]), ("b", [1, 0])):
        files = tiny_files()
        files["test"] = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "fine_labels": labels}, protocol=3)
        publish(monkeypatch, files)
        (tmp_path / name).mkdir()
        write(tmp_path / name, files)
        prints.append(cifar.load(tmp_path / name).fingerprint)
    assert prints[0] != prints[1]


@pytest.mark.parametrize("name", ["train", "test", "meta"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "altered"])
def test_damaged_files_are_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    files = tiny_files()
    publish(monkeypatch, files)
    folder = write(tmp_path, files)
    content = files[name]
    if damage == "missing":
        (folder / name).unlink()
    elif damage == "truncated":
        (folder / name).write_bytes(content[:-7])
    elif damage == "longer":
        (folder / name).write_bytes(content + b"x")
    else:
        (folder / name).write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    word = "altered" if damage == "longer" else damage
    for load in (lambda: cifar.load(tmp_path), lambda: check(tmp_path)):
        with pytest.raises(DataError, match=word) as caught:
            load()
        assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_altered_bytes_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    files = tiny_files()
    marker = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(marker), protocol=3)
    assert pickle.loads(bomb) is None  # the bomb works
    assert marker.exists()
    marker.unlink()
    bomb = bomb.ljust(len(files[name]), b"\0") if len(bomb) < len(files[name]) else bomb
    files_then = dict(files)
    publish(monkeypatch, files)
    files_then[name] = bomb
    write(tmp_path, files_then)
    with pytest.raises(DataError, match="altered"):
        cifar.load(tmp_path)
    assert not marker.exists()


def test_a_published_file_may_only_contain_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tiny_files()
    marker = tmp_path / "ran"
    files["meta"] = pickle.dumps(Bomb(marker), protocol=3)
    publish(monkeypatch, files)
    write(tmp_path, files)
    with pytest.raises(pickle.UnpicklingError):
        cifar.load(tmp_path)
    assert not marker.exists()


def test_downloads_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", lambda *a, **k: calls.append((a, k)))
    with pytest.raises(DataError, match="missing"):
        load_dataset("cifar100", tmp_path)
    assert calls == []
    with pytest.raises(DataError, match="missing"):
        load_dataset("cifar100", tmp_path, download=True)
    ((url, where), options) = calls[0]
    assert url == "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
    assert where == str(tmp_path)
    assert options["md5"] == "eb9058c3a382ffc7106e4002c42a8d85"


def test_download_skips_intact_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tiny_files()
    publish(monkeypatch, files)
    write(tmp_path, files)
    monkeypatch.setattr(
        "torchvision.datasets.utils.download_and_extract_archive", lambda *a, **k: pytest.fail("downloaded")
    )
    assert len(load_dataset("cifar100", tmp_path, download=True).train_images) == 4


def test_a_failed_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", fail)
    with pytest.raises(DataError, match="no route to host"):
        load_dataset("cifar100", tmp_path, download=True)


def test_checksums_are_torchvisions() -> None:
    from torchvision.datasets import CIFAR100

    assert cifar.FILES["train"].md5 == CIFAR100.train_list[0][1]
    assert cifar.FILES["test"].md5 == CIFAR100.test_list[0][1]
    assert cifar.FILES["meta"].md5 == CIFAR100.meta["md5"]
    assert CIFAR100.url == cifar.URL
    assert CIFAR100.tgz_md5 == cifar.ARCHIVE_MD5


@pytest.mark.skipif(REAL is None, reason="INCVEC_DATA names no folder with cifar-100-python")
def test_the_real_files() -> None:
    from torchvision.datasets import CIFAR100

    data = load_dataset("cifar100", REAL)
    assert data.train_images.shape == (50000, 3, 32, 32)
    assert data.test_images.shape == (10000, 3, 32, 32)
    assert torch.bincount(data.train_labels).tolist() == [500] * 100
    assert torch.bincount(data.test_labels).tolist() == [100] * 100
    assert data.class_names[:2] == ("apple", "aquarium_fish")
    theirs = CIFAR100(REAL, train=False)
    assert np.array_equal(data.test_images.permute(0, 2, 3, 1).numpy(), theirs.data)
    assert data.test_labels.tolist() == theirs.targets
    assert list(data.class_names) == theirs.classes
    mean = data.train_images.double().mean((0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor(data.normalizations["default"][0]).double(), atol=5e-4)
    assert any("50000 training and 10000 test" in line for line in check(REAL))
