"""CLIP (Radford et al., ICML 2021, https://arxiv.org/abs/2103.00020) through Hugging Face transformers.

`weights` is a model on the hub (openai/clip-vit-base-patch16), a folder written by transformers, or a file with a state
dict in OpenAI's or open_clip's naming (`.safetensors`, or `.pt`/`.bin` of plain tensors) with the tokenizer's files
beside it (tokenizer.json, or vocab.json and merges.txt). A leading `~` is the home folder. A value that is neither a
local folder nor a local file, and has the form of a hub name (`owner/model`), is loaded from the hub.

OpenAI's own download is a TorchScript archive, which can execute code and is refused. Convert it once, in an
environment where you trust it:

    state = torch.jit.load("ViT-B-16.pt", map_location="cpu").state_dict()
    safetensors.torch.save_file({name: t.float().contiguous() for name, t in state.items()}, "ViT-B-16.safetensors")

A state dict does not contain its activation: the tag `openai` and tags that end in `quickgelu` select
x sigmoid(1.702 x), all others the exact GELU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from incvec.contracts import Input
from incvec.errors import ConfigError, DataError
from incvec.nets.dual import Dual
from incvec.nets.packages import require

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
FILES = (".safetensors", ".pt", ".pth", ".bin")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
FIRST_LAYERS = ("mlp.fc1",)
HEAD_WIDTH = 64  # of an attention head, in all published CLIP models


class Tower(nn.Module):
    """The pooled output of a tower, `argument` the name of its input: the class token of an image after the last norm,
    or the end-of-text token of a sentence. Attention over words is causal, so padding after them has no effect."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model, self.argument = model, argument

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.model(**{self.argument: x}).pooler_output
        return pooled


def from_transformers(clip: Any, tokenize: Any) -> Dual:
    """A `transformers.CLIPModel` as a dual encoder; the parameters stay the same objects."""
    config = clip.config
    return Dual(
        Tower(clip.vision_model, "pixel_values"),
        Tower(clip.text_model, "input_ids"),
        clip.visual_projection,
        clip.text_projection,
        clip.logit_scale,
        tokenize,
        (config.vision_config.hidden_size, config.projection_dim),
        FIRST_LAYERS,
    )


# From a name, a folder or a file ----------------------------------------------------------------------------


def resolve_weights(weights: str) -> str:
    """The path with `~` expanded, or a hub name unchanged."""
    path = os.path.expanduser(weights)
    if not Path(path).exists() and (Path(path).suffix in FILES or not HUB_NAME.fullmatch(path)):
        expanded = "" if path == weights else f" ({path})"
        raise ConfigError(
            f"CLIP weights {weights!r}{expanded}: no such folder or file. Expected a folder written by "
            "transformers' save_pretrained, or a state dict's file with the tokenizer's files beside it. Correct the "
            "path, or give the name of a model on the hub, such as openai/clip-vit-base-patch16."
        )
    return path


def is_file(weights: str) -> bool:
    return Path(weights).suffix in FILES and not Path(weights).is_dir()


def offline_hint(weights: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"CLIP weights {weights!r} could not be read: {error}. Give a folder written by transformers' save_pretrained, "
        "a state dict's file, or the name of a model on the hub, such as openai/clip-vit-base-patch16."
    )


@cache
def _read(weights: str, tag: str) -> tuple[Any, dict[str, Tensor] | None]:
    """The configuration and, for a file, its tensors under transformers' names."""
    if is_file(weights):
        state = convert(read_state(Path(weights)))
        return config_of(state, quick="openai" in tag or tag.endswith("quickgelu")), state
    transformers = require("transformers")
    if Path(weights).is_dir() and not (Path(weights) / "config.json").is_file():
        raise offline_hint(weights, FileNotFoundError("the folder has no config.json"))
    try:
        return transformers.CLIPConfig.from_pretrained(weights), None
    except (OSError, ValueError) as error:
        raise offline_hint(weights, error) from error


def clip_input(weights: str, tag: str) -> Input:
    return Input(_read(resolve_weights(weights), tag)[0].vision_config.image_size, MEAN, STD)


def load_clip(weights: str, tag: str) -> Dual:
    """CLIP in float32, with its tokenizer."""
    transformers = require("transformers")
    weights = resolve_weights(weights)
    config, state = _read(weights, tag)
    try:
        with torch.random.fork_rng(devices=[]):
            if state is None:
                clip = transformers.CLIPModel.from_pretrained(weights, dtype=torch.float32)
            else:
                clip = transformers.CLIPModel(config)
                clip.load_state_dict(state)
        folder = Path(weights).parent if is_file(weights) else weights
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise offline_hint(weights, error) from error
    return from_transformers(clip.float(), Tokenizer(tokenizer, config.text_config.max_position_embeddings))


class Tokenizer:
    """Sentences to token numbers, padded to the longest sentence."""

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest

    def __call__(self, texts: Sequence[str]) -> Tensor:
        found: Tensor = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.longest, return_tensors="pt"
        )["input_ids"]
        return found


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; nothing in it is executed."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; expected a state dict of CLIP.")
    try:
        if path.suffix == ".safetensors":
            state: dict[str, Tensor] = require("safetensors.torch").load_file(path)
            return state
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as plain tensors: {error}. OpenAI's own download is a TorchScript archive; the "
            "documentation of incvec.nets.clip shows how to convert it."
        ) from error
    return dict(found.get("state_dict", found))


# OpenAI's and open_clip's names -----------------------------------------------------------------------------

_WHOLE = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
}
_NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",  # transformers' spelling
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
_PARTS = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "attn.out_proj": "self_attn.out_proj"}
_PARTS |= {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
_TRANSPOSED = ("visual.proj", "text_projection")  # stored for multiplication from the right
_IDLE = ("input_resolution", "context_length", "vocab_size", "attn_mask", "logit_bias")
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.([a-z_]+)$")


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in OpenAI's or open_clip's naming under transformers' names; one that has them is unchanged."""
    if any(name.startswith("vision_model.") for name in state):
        return {name: tensor for name, tensor in state.items() if not name.endswith("position_ids")}
    found: dict[str, Tensor] = {}
    for given, tensor in state.items():
        name = given.removeprefix("module.").removeprefix("text.")  # data parallel; open_clip's separate text tower
        if name in _IDLE:
            continue
        tensor = tensor.float()
        if name in _WHOLE:
            found[_WHOLE[name]] = tensor.T.contiguous() if name in _TRANSPOSED else tensor
        elif name.rpartition(".")[0] in _NORMS:
            stem, _, kind = name.rpartition(".")
            found[f"{_NORMS[stem]}.{kind}"] = tensor
        elif match := _BLOCK.match(name):
            found |= _block_part(match, tensor)
        else:
            raise DataError(
                f"{given!r} is not a tensor of a CLIP with a vision transformer; expected names like "
                "visual.conv1.weight and transformer.resblocks.0.ln_1.weight (residual networks "
                "as image towers are not supported)."
            )
    return found


def _block_part(match: re.Match[str], tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of one block. Queries, keys and values are one matrix there and three here."""
    tower = "vision_model" if match[1] else "text_model"
    stem = f"{tower}.encoder.layers.{match[2]}"
    if match[3] == "attn" and match[4].startswith("in_proj_"):
        kind = match[4].removeprefix("in_proj_")
        names = (f"{stem}.self_attn.{which}_proj.{kind}" for which in "qkv")
        return {name: part.clone() for name, part in zip(names, tensor.chunk(3), strict=True)}
    if match[3] not in _PARTS:
        raise DataError(f"{match[0]!r} is not a part of a CLIP block; expected one of {', '.join(_PARTS)}.")
    return {f"{stem}.{_PARTS[match[3]]}.{match[4]}": tensor}


def config_of(state: Mapping[str, Tensor], quick: bool, head_width: int = HEAD_WIDTH) -> Any:
    """The configuration, from the shapes of a converted state dict."""
    patch = state["vision_model.embeddings.patch_embedding.weight"]
    places = state["vision_model.embeddings.position_embedding.weight"]
    words = state["text_model.embeddings.token_embedding.weight"]
    activation = "quick_gelu" if quick else "gelu"

    def tower(name: str, width: int) -> dict[str, Any]:
        blocks = {key.split(".")[3] for key in state if key.startswith(f"{name}.encoder.layers.")}
        return {
            "hidden_size": width,
            "intermediate_size": len(state[f"{name}.encoder.layers.0.mlp.fc1.bias"]),
            "num_hidden_layers": len(blocks),
            "num_attention_heads": max(width // head_width, 1),
            "hidden_act": activation,
            "layer_norm_eps": 1e-5,
        }

    joint = len(state["text_projection.weight"])
    side = round((len(places) - 1) ** 0.5) * patch.shape[-1]
    vision = tower("vision_model", len(patch)) | {"image_size": side, "patch_size": patch.shape[-1]}
    vision |= {"projection_dim": joint}
    text = tower("text_model", words.shape[1]) | {
        "vocab_size": len(words),
        "max_position_embeddings": len(state["text_model.embeddings.position_embedding.weight"]),
        "bos_token_id": len(words) - 2,
        "eos_token_id": len(words) - 1,
        "pad_token_id": len(words) - 1,
        "projection_dim": joint,
    }
    return require("transformers").CLIPConfig(text_config=text, vision_config=vision, projection_dim=joint)
