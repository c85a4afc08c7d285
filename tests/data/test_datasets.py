"""Digits, the registry, options, and the requirements on a data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field

from incvec.data import DATASETS, DatasetEntry, DatasetOptions, load_dataset
from incvec.data.class_lists import CLASS_LISTS
from incvec.data.dataset import Dataset
from incvec.data.packed import EXPECTED
from incvec.errors import ConfigError, DataError, IncvecError, nearest


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data = load_dataset("digits")
    original = load_digits()
    assert data.image_shape == (1, 8, 8)
    assert data.n_classes == 10
    assert len(data.train_images) + len(data.test_images) == 1797
    assert data.train_images.dtype == torch.uint8
    assert (data.pad, data.flip) == (1, False)
    train, test = [], []
    seen = [0] * 10
    for i, label in enumerate(original.target):
        seen[label] += 1
        (test if seen[label] % 5 == 0 else train).append(i)
    assert data.train_labels.tolist() == original.target[train].tolist()
    assert data.test_labels.tolist() == original.target[test].tolist()
    for mine, theirs in ((data.train_images, original.images[train]), (data.test_images, original.images[test])):
        assert (mine[:, 0].double() / 255 * 16 - torch.from_numpy(theirs)).abs().max() <= 0.5 * 16 / 255 + 1e-9
    assert data.train_images.max() == 255
    assert data.train_images.min() == 0
    (mean,), (std,) = data.normalizations["default"]
    pixels = data.train_images.double() / 255
    assert abs(pixels.mean().item() - mean) < 1e-4
    assert abs(pixels.std().item() - std) < 1e-4
    assert data.fingerprint == load_dataset("digits").fingerprint


def test_every_entry_has_a_summary_and_a_source() -> None:
    ours = {"cifar100", "digits", "folder", "imagenet", "imagenet-subset", "packed", "tiny-imagenet-100"}
    assert ours <= set(DATASETS)
    for entry in DATASETS.values():
        assert entry.summary
        assert "https://" in entry.source


def test_numbers_of_classes_that_are_known_without_data() -> None:
    assert DATASETS["digits"].classes == load_dataset("digits").n_classes
    for name, expected in EXPECTED.items():
        assert DATASETS[name].classes == expected.classes
        assert expected.class_list is None or len(CLASS_LISTS[expected.class_list].classes) == expected.classes


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cifar100'"):
        load_dataset("cifar10O")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"image_size": 32}, "'digits' has no option 'image_size'. It is an option of folder, imagenet"),
        ("digits", {"test_every": 3}, "no option 'test_every'. It is an option of folder. Its options: held_out"),
        ("cifar100", {"placement": "streamed"}, "no option 'placement'. It is an option of imagenet-subset"),
        (
            "imagenet",
            {"class_list": "cmc"},
            "'imagenet' has no option 'class_list'. It is an option of imagenet-subset",
        ),
        ("packed", {"test_every": 3}, "'packed' has no option 'test_every'"),
        ("folder", {"image_sizes": 8}, "no option 'image_sizes'. Did you mean 'image_size'"),
        ("packed", {"placement": "disk"}, "packed.placement = 'disk' is not possible"),
        ("digits", {"held_out": 1}, "digits.held_out = 1 is not possible"),
        ("digits", {"download": True}, "'digits' is never downloaded; only 'cifar100' can be"),
    ],
)
def test_options_are_refused_before_data_is_read(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset(name, "/nowhere", **options)


@pytest.fixture
def registered() -> Iterator[str]:
    from incvec.registry import register_dataset

    class ToyOptions(DatasetOptions):
        classes: int = Field(2, ge=2)

    def load(root: object, options: ToyOptions) -> Dataset:
        return make(class_names=("a", "b"), about={"root": root, "classes": options.classes})

    register_dataset("toy", DatasetEntry("a data set of another package", "https://example.org", load, ToyOptions))
    yield "toy"
    del DATASETS["toy"]


def test_other_packages_register_data_sets(registered: str) -> None:
    assert load_dataset(registered, "there", classes=3).about == {"root": "there", "classes": 3}
    with pytest.raises(ConfigError, match=r"toy.classes = 1 is not possible"):
        load_dataset(registered, classes=1)
    from incvec.presets import resolve

    assert resolve({"method": "finetune", "dataset": registered, "held_out": 3}).data_options() == {"held_out": 3}
    with pytest.raises(ConfigError, match="'toy' has no option 'image_size'"):
        resolve({"method": "finetune", "dataset": registered, "image_size": 32})


@pytest.mark.parametrize("name", ["aircraft", "cifar100", "folder", "imagenet-subset", "packed"])
def test_a_missing_data_root_is_explained(name: str) -> None:
    with pytest.raises(DataError, match=r"needs a data root: .* --data-root DIR or the variable INCVEC_DATA"):
        load_dataset(name)


@pytest.mark.parametrize("name", DATASETS)
def test_a_file_as_data_root_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "data.tar"
    file.touch()
    with pytest.raises(DataError, match=rf"data\.tar is a file: expected the folder with the files of '{name}'"):
        load_dataset(name, file)


def test_nearest() -> None:
    assert nearest("PODnet", ["finetune", "podnet"]) == " Did you mean 'podnet'?"
    assert nearest("xyz", ["finetune", "podnet"]) == ""
    assert nearest("lucirr", ["LUCIR"]) == " Did you mean 'LUCIR'?"
    assert nearest("resnet32", ["resnet18", "resnet32-lucir"]) == " Did you mean 'resnet32-lucir'?"
    assert nearest("", ["lucir"]) == nearest("lu", ["lucir-and-more"]) == ""
    assert issubclass(DataError, IncvecError)


def make(**changes: Any) -> Dataset:
    parts = {
        "name": "toy",
        "train_images": torch.zeros(4, 3, 2, 2, dtype=torch.uint8),
        "train_labels": torch.tensor([0, 1, 0, 1]),
        "test_images": torch.zeros(2, 3, 2, 2, dtype=torch.uint8),
        "test_labels": torch.tensor([0, 1]),
        "class_names": ("a", "b"),
        "pad": 1,
        "flip": True,
        "fingerprint": "x",
        "normalizations": {"default": ((0.5,) * 3, (0.5,) * 3)},
    }
    return Dataset(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": torch.zeros(4, 3, 2, 2)}, "uint8"),
        ({"train_labels": torch.tensor([0, 1, 0])}, "one per image"),
        ({"train_labels": torch.tensor([0, 1, 0, 2])}, "0 to 2"),
        ({"train_labels": torch.tensor([0, 0, 0, 0])}, "class 'b' has no train image"),
        ({"test_labels": torch.tensor([1, 1])}, "class 'a' has no test image"),
        ({"test_images": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, "same shape"),
        ({"normalizations": {}}, "default"),
    ],
)
def test_inconsistent_data_sets_are_refused(changes: dict[str, Any], message: str) -> None:
    assert make().image_shape == (3, 2, 2)
    with pytest.raises(DataError, match=message):
        make(**changes)


def test_held_out_images_replace_the_test_images() -> None:
    whole, part = load_dataset("digits"), load_dataset("digits", held_out=4)
    assert len(part.train_labels) + len(part.test_labels) == len(whole.train_labels)
    assert part.fingerprint != whole.fingerprint
    for label in range(10):
        images = whole.train_images[whole.train_labels == label]
        rows = range(len(images))
        trained, held_out = ([i for i in rows if (i % 4 == 3) is which] for which in (False, True))
        assert torch.equal(part.train_images[part.train_labels == label], images[trained])
        assert torch.equal(part.test_images[part.test_labels == label], images[held_out])
