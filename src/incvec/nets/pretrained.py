"""Backbones of other packages by name: `lite0`, `timm/NAME`, `torchvision/NAME`. Structure and weights are separate.

`build_external` makes the network with random weights; `load_weights` returns pre-trained ones, from a file, from the
package or from its hub. So a saved model is rebuilt without a hub. BatchNorm layers lose their batch counters, which
nothing reads (see `nets.resnet.Norm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from incvec.contracts import Input
from incvec.errors import ConfigError, DataError, nearest
from incvec.nets.efficientnet import EfficientNetLite0, lite0_weights
from incvec.nets.packages import INPUT as LITE0_INPUT
from incvec.nets.packages import require
from incvec.nets.resnet import Backbone, Features

DEFAULT = "lite0"
PACKAGES = ("timm", "torchvision")
IMAGENET_INPUT = Input(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
COUNTER = "num_batches_tracked"
PREFIXES = ("module.", "model.", "backbone.")  # that training scripts put before the names of a network


def is_external(name: str) -> bool:
    return name == DEFAULT or name.partition("/")[0] in PACKAGES


class External(Backbone):
    """A network of timm or torchvision without its classifier. `maps` has the last feature map only."""

    def __init__(self, net: nn.Module, width: int) -> None:
        nn.Module.__init__(self)
        self.net, self.width = net, width
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.num_batches_tracked = None

    def forward(self, x: Tensor) -> Features:
        net: Any = self.net
        if hasattr(net, "forward_head"):  # timm
            maps = net.forward_features(x)
            return Features((maps,), net.forward_head(maps, pre_logits=True))
        features = net(x).flatten(1)
        return Features((features[:, :, None, None],), features)


def check_external(name: str) -> None:
    """Raise ConfigError for a name that the package does not have."""
    if name == DEFAULT:
        return
    package, _, model = name.partition("/")
    known = _timm().list_models() if package == "timm" else _torchvision().list_models()
    if model not in known and not (package == "timm" and _timm().is_model(model)):
        raise ConfigError(f"{package} has no model {model!r}.{nearest(model, known)}")


def build_external(name: str, channels: int, generator: torch.Generator) -> Backbone:
    """The named network with random weights, drawn with a seed from `generator`."""
    check_external(name)
    if channels != 3:
        raise ConfigError(f"the backbone {name} takes images of 3 channels, not {channels}.")
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return _create(name, False)


def _create(name: str, pretrained: bool) -> Backbone:
    package, _, model = name.partition("/")
    if name == DEFAULT:
        return EfficientNetLite0()
    if package == "timm":
        net = _timm().create_model(model, pretrained=pretrained, num_classes=0)
        return External(net, net.head_hidden_size)
    net = _torchvision().get_model(model, weights="DEFAULT" if pretrained else None)
    return External(net, _remove_classifier(net))


def _remove_classifier(net: nn.Module) -> int:
    """Replace the last linear layer by the identity; returns its number of inputs."""
    layers = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ConfigError(f"{type(net).__name__} has no linear classifier, so it cannot be used as a backbone.")
    name, layer = layers[-1]
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, nn.Identity())
    return layer.in_features


def expected_input(name: str) -> Input:
    """The images that the named network was trained on."""
    if name == DEFAULT:
        return LITE0_INPUT
    package, _, model = name.partition("/")
    if package != "timm":
        return IMAGENET_INPUT
    found = _timm().get_pretrained_cfg(model)
    if found is None:
        return IMAGENET_INPUT
    return Input(found.input_size[-1], tuple(found.mean), tuple(found.std))


# Weights ----------------------------------------------------------------------------------------------------


def load_weights(name: str, file: Path | None = None) -> dict[str, Tensor]:
    """Pre-trained weights of the named network, under the names of its state dict."""
    if file is not None:
        return weights_from_file(name, file)
    if name == DEFAULT:
        return lite0_weights()
    try:
        return {key: tensor.clone() for key, tensor in _create(name, True).state_dict().items()}
    except Exception as error:
        raise ConfigError(
            f"the weights of {name} could not be loaded from its hub: {error}. Give a file with --weights, use "
            f"--backbone {DEFAULT}, whose weights are installed by pip, or train from scratch with --weights none."
        ) from error


def weights_from_file(name: str, file: Path) -> dict[str, Tensor]:
    """The backbone's tensors in a checkpoint: safetensors, or a state dict saved by torch. No code of it is run."""
    return backbone_part(name, file, read_state(file))


def backbone_part(name: str, file: Path, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.device("meta"):
        own = _create(name, False).state_dict()
    found = match_names(own, saved)
    missing = [key for key in own if key not in found]
    if missing:
        raise DataError(
            f"{file} does not contain the weights of {name}: {len(missing)} of {len(own)} tensors are missing or have "
            f"another shape, such as {missing[0]!r}. Give the --backbone that the file was trained with."
        )
    return found


def split_checkpoint(
    name: str, file: Path, saved: Mapping[str, Tensor], width: int
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """The backbone's tensors of a checkpoint, and the weight and bias of its classifier.

    The classifier is the one matrix that is not part of the backbone and takes its `width` features.
    """
    backbone = backbone_part(name, file, saved)
    used = {id(tensor) for tensor in backbone.values()}
    found = [key for key, t in saved.items() if id(t) not in used and t.ndim == 2 and t.shape[1] == width]
    if len(found) != 1:
        which = f"{len(found)}: {', '.join(found[:3])}" if found else "none"
        raise DataError(
            f"{file}: expected one linear classifier [classes, {width}] besides the backbone {name}, found {which}. "
            "For a backbone without its classifier use `incvec learn PHOTOS --weights FILE`."
        )
    bias = saved.get(found[0].removesuffix("weight") + "bias")
    return backbone, saved[found[0]].float(), None if bias is None else bias.float()


def read_state(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise DataError(f"there is no file of weights {file}.")
    try:
        if file.suffix == ".safetensors":
            return dict(require("safetensors.torch").load_file(file))
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition(". ")[0]  # torch adds advice to run the code in the file
        if file.stat().st_size == 0:
            reason = "the file is empty"
        raise DataError(
            f"{file} cannot be read as weights: {reason}. Expected safetensors, or a state dict: "
            "torch.save(model.state_dict(), FILE). Whole models are not read, since they could run code."
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
            saved = saved[key]
    if not isinstance(saved, Mapping) or not all(isinstance(tensor, Tensor) for tensor in saved.values()):
        raise DataError(f"{file} has no state dict: expected names and tensors, found {type(saved).__name__}.")
    return dict(saved)


def match_names(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those saved tensors that fit, by name. The wrapper's and usual prefixes of either side are ignored."""

    def bare(key: str) -> str:
        while key.startswith(PREFIXES):
            key = key.partition(".")[2]
        return key.removeprefix("net.")

    by_name = {bare(key): tensor for key, tensor in saved.items() if not key.endswith(COUNTER)}
    fitting = {key: by_name[bare(key)] for key in own if bare(key) in by_name}
    return {key: tensor for key, tensor in fitting.items() if tensor.shape == own[key].shape}


@torch.no_grad()
def copy_state(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into a module that has exactly these.

    Unlike `load_state_dict`, it does not add counters to BatchNorm layers that have none.
    """
    own = module.state_dict()
    wrong = list(own.keys() ^ tensors.keys())
    wrong += [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if wrong:
        raise DataError(f"{len(wrong)} tensors are missing, unexpected or of another shape, such as {min(wrong)!r}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _timm() -> Any:
    return require("timm")


def _torchvision() -> Any:
    return require("torchvision.models")
