"""What is chosen once, at the first `learn`: backbone, method, add-ons, and what is kept of the photos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from incvec.classifier.folder import Description, Preprocessing
from incvec.classifier.network import stored_side
from incvec.data.dataset import IMAGENET_NORMALIZATION
from incvec.errors import ConfigError, shorten
from incvec.methods import METHODS, find_method
from incvec.nets.pretrained import expected_input, is_external
from incvec.presets import resolve
from incvec.presets.given import addon_names

MEMORY = 20  # photos per class that methods which train on them remember
CHECK = 5
MIN_SIDE = 4
SIDE = 64  # of images for backbones trained from scratch

# Training settings for pre-trained backbones, as far as a method has them. From scratch: the presets of `folder`.
FINE_TUNING: dict[str, Any] = {
    "epochs": 10,
    "batch_size": 32,
    "optimizer": "sgd",
    "lr": 0.01,
    "weight_decay": 1e-4,
    "schedule": "cosine",
    "milestones": [],
    "crop_area": 0.3,
    "brightness": 0.1,
    "normalization": "default",
}
# What else a method needs with such a backbone: its own defaults are for training from scratch, over many more steps.
# The rates and loss weights of LUCIR and PODNet and the features of LDA were chosen on training photos
# (docs/classifier-evidence.md).
FINE_TUNING_METHODS: dict[str, dict[str, Any]] = {
    "lucir": {"initial_scale": 16.0, "lr": 0.02, "lambda_base": 1.0},
    "podnet": {
        "initial_scale": 8.0,
        "lr": 0.02,
        "lambda_flat": 0.3,
        "lambda_spatial": 1.0,
        "balance_epochs": 10,
    },
    "pass": {"temperature": 1.0, "lambda_distil": 0.3, "lambda_prototypes": 2.0},
    "lda": {"features": "stages"},
}
FINE_TUNING_IVT: dict[str, Any] = {"interval": 3, "last": "skip", "head": "keep", "batchnorm": "keep"}


@dataclass(frozen=True)
class Settings:
    backbone: str
    preprocessing: Preprocessing
    method: str
    addons: tuple[str, ...]
    sections: Mapping[str, Mapping[str, Any]]
    memory: int  # photos remembered per class; 0 for methods that do not train on them
    check: int  # photos per class held out to measure accuracy
    keeps_photos: bool  # whether any photo may be kept
    seed: int
    pretrained: bool

    @classmethod
    def of(cls, description: Description) -> Settings:
        d = description
        return cls(
            d.backbone, d.preprocessing, d.method, d.addons, d.sections, d.memory, d.check, d.keeps_photos, d.seed,
            pretrained=True,
        )  # fmt: skip


def choose(
    backbone: str,
    method: str,
    addons: Sequence[str],
    sections: Mapping[str, Mapping[str, Any]] | None,
    memory: int | None,
    check: int,
    side: int | None,
    seed: int,
    pretrained: bool,
) -> Settings:
    """Settings from what a user gives. `memory` 0: no photo is kept; None: `MEMORY`, for methods that use them."""
    for name, count in (("memory", memory), ("check", check)):
        if count is not None and count < 0:
            raise ConfigError(f"{name} is {count}: expected 0 or more photos per class.")
    if side is not None and side < MIN_SIDE:
        raise ConfigError(f"side is {side}: expected {MIN_SIDE} pixels or more, or none for that of the backbone.")
    if is_external(backbone):
        expected = expected_input(backbone)
        size, mean, std = side or expected.size, expected.mean, expected.std
    else:
        size, (mean, std) = side or SIDE, IMAGENET_NORMALIZATION
    remembered = MEMORY if memory is None else memory
    return Settings(
        backbone=backbone,
        preprocessing=Preprocessing(side=size, stored=stored_side(size), mean=mean, std=std),
        method=method,
        addons=addon_names(addons),
        sections=sections or {},
        memory=remembered if find_method(method).exemplars else 0,
        check=check,
        keeps_photos=memory != 0,
        seed=seed,
        pretrained=pretrained,
    )


def resolve_sections(settings: Settings) -> dict[str, dict[str, Any]]:
    """The complete settings of the method and its add-ons."""
    kind = find_method(settings.method)
    if kind.pretrained or kind.joint:
        usable = [name for name in METHODS if not find_method(name).pretrained and not find_method(name).joint]
        reason = "needs a dual encoder of images and texts" if kind.pretrained else "trains all classes at once"
        raise ConfigError(f"the method {settings.method!r} {reason}; a classifier takes one of: {', '.join(usable)}.")
    if kind.exemplars and settings.memory == 0:
        kinds = {name: find_method(name) for name in METHODS}
        without = [name for name, k in kinds.items() if not (k.pretrained or k.joint or k.exemplars)]
        raise ConfigError(
            f"the method {settings.method!r} trains on remembered photos, but memory is 0. Give memory, or a method "
            f"that needs none: {', '.join(without)}."
        )
    used = (settings.method, *settings.addons)
    for name, section in settings.sections.items():
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"setting {name} = {shorten(section)} is not possible: expected settings of {' or '.join(used)}, such "
                f"as {settings.method}.KEY=VALUE."
            )
        if name not in used:
            raise ConfigError(f"settings of {name!r} were given, but the classifier uses {' + '.join(used)}.")
    fields = kind.Options.model_fields  # type: ignore[attr-defined]
    start: dict[str, Any] = {"net": settings.backbone}
    if settings.pretrained:
        start |= {name: value for name, value in FINE_TUNING.items() if name in fields}
        start |= FINE_TUNING_METHODS.get(settings.method, {})
        if "adapt_epochs" in fields:
            start["adapt_epochs"] = 0
    if settings.memory and "memory" in fields:
        start["memory"] = settings.memory
    given: dict[str, Any] = {"method": settings.method, "addons": list(settings.addons), "dataset": "folder"}
    given[settings.method] = start | dict(settings.sections.get(settings.method, {}))
    for addon in settings.addons:
        defaults = FINE_TUNING_IVT if settings.pretrained and addon == "ivt" else {}
        given[addon] = defaults | dict(settings.sections.get(addon, {}))
    config = resolve(given)
    return {name: dict(section) for name, section in config.sections.items()}
