"""Digits, the registry, and what a data set must be."""

import subprocess
import sys

import pytest
import torch

from incvec.data import datasets
from incvec.data.dataset import Dataset
from incvec.errors import ConfigError, DataError, IncvecError, nearest


def test_digits_are_the_embedded_ones():
    from sklearn.datasets import load_digits

    data = datasets.load_dataset("digits")
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
    (mean,), (std,) = data.normalization()
    pixels = data.train_images.double() / 255
    assert abs(pixels.mean().item() - mean) < 1e-4
    assert abs(pixels.std().item() - std) < 1e-4
    assert data.fingerprint == datasets.load_dataset("digits").fingerprint


def test_registry_names_summaries_and_sources():
    ours = {"cifar100", "digits", "folder", "imagenet", "imagenet-subset", "packed", "tiny-imagenet-100"}
    assert ours <= set(datasets.DATASETS)
    for summary, source in datasets.DATASETS.values():
        assert summary
        assert "https://" in source


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'cifar100'"):
        datasets.load_dataset("cifar10O")
    with pytest.raises(ConfigError, match="Did you mean 'default'"):
        datasets.load_dataset("digits").normalization("defualt")
    with pytest.raises(ConfigError, match="image_size is for the data sets folder, packed, imagenet-subset"):
        datasets.load_dataset("digits", size=32)
    with pytest.raises(ConfigError, match="test_every is for the data set 'folder'"):
        datasets.load_dataset("digits", test_every=3)
    with pytest.raises(ConfigError, match="never downloaded"):
        datasets.load_dataset("digits", download=True)


@pytest.mark.parametrize("name", ["aircraft", "cifar100", "folder", "imagenet-subset", "packed"])
def test_without_a_data_root_it_is_told_how_to_give_one(name):
    with pytest.raises(DataError, match=r"needs a data root: .* --data-root DIR or the variable INCVEC_DATA"):
        datasets.load_dataset(name)


def test_nearest():
    assert nearest("PODnet", ["finetune", "podnet"]) == " Did you mean 'podnet'?"
    assert nearest("xyz", ["finetune", "podnet"]) == ""
    assert nearest("lucirr", ["LUCIR"]) == " Did you mean 'LUCIR'?"
    assert issubclass(DataError, IncvecError)


def make(**changes):
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
        ({"train_labels": torch.tensor([0, 1, 0])}, "one for each image"),
        ({"train_labels": torch.tensor([0, 1, 0, 2])}, "0 to 2"),
        ({"train_labels": torch.tensor([0, 0, 0, 0])}, "class 'b' has no train image"),
        ({"test_labels": torch.tensor([1, 1])}, "class 'a' has no test image"),
        ({"test_images": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, "same shape"),
        ({"normalizations": {}}, "default"),
    ],
)
def test_inconsistent_data_sets_are_refused(changes, message):
    assert make().image_shape == (3, 2, 2)
    with pytest.raises(DataError, match=message):
        make(**changes)


def test_importing_the_room_brings_in_no_heavy_optional_package():
    code = "import sys, incvec.data; print(sorted({'sklearn', 'torchvision'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_held_out_images_are_neither_trained_on_nor_test_images() -> None:
    whole, part = datasets.load_dataset("digits"), datasets.load_dataset("digits", held_out=4)
    assert len(part.train_labels) + len(part.test_labels) == len(whole.train_labels)
    assert part.fingerprint != whole.fingerprint
    for label in range(10):
        images = whole.train_images[whole.train_labels == label]
        rows = range(len(images))
        kept, aside = ([i for i in rows if (i % 4 == 3) is which] for which in (False, True))
        assert torch.equal(part.train_images[part.train_labels == label], images[kept])
        assert torch.equal(part.test_images[part.test_labels == label], images[aside])
