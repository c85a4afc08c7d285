"""Training a model of two towers by FLYP, through the engine: images a second and peak memory, without and with IVT.

    python benchmarks/dual_speed.py --json results/benchmarks/dual-speed.json      # on a CUDA device
    python benchmarks/dual_speed.py --models lite0-minilm                          # the small pair alone
    python benchmarks/dual_speed.py --small                                        # a CPU will do

`vit-b16` is CLIP ViT-B/16 with random weights, made from its configuration (`random_weights` in its rows): speed and
memory depend on neither the weights nor the images. Images are of 32 pixels, as CIFAR's, brought to the model's size
inside the step.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from measuring import Report, Row, one_thread, pick_device, without_ticks
from torch import Tensor

from incvec.contracts import Input
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.run import Run
from incvec.nets.clip import MEAN, STD, from_transformers
from incvec.presets import resolve

WORDS = 49408  # CLIP's vocabulary; its last two are the start and the end of a text


def tokenize(texts: Sequence[str]) -> Tensor:
    """As many numbers as a short caption has, one word different in each sentence."""
    rows = [[WORDS - 2, 320, 1125, 539, 1000 + sum(map(ord, text)) % 1000, WORDS - 1] for text in texts]
    return torch.tensor(rows)


def random_clip(small: bool) -> Any:
    """CLIP ViT-B/16, or two thin layers of it, by transformers."""
    import transformers

    vision: dict[str, Any] = {"patch_size": 16}
    text: dict[str, Any] = {"bos_token_id": WORDS - 2, "eos_token_id": WORDS - 1, "pad_token_id": WORDS - 1}
    if small:
        thin = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision, text = {**vision, **thin, "image_size": 32}, {**text, **thin}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=512)
        return transformers.CLIPModel(config)


def random_images(per_class: int, classes: int = 20) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (per_class * classes, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(classes).repeat_interleave(per_class)
    kept = torch.arange(0, len(images), per_class)
    names = tuple(f"class {c}" for c in range(classes))
    norms = {"default": ((0.5,) * 3, (0.25,) * 3)}
    return Dataset("random", images, labels, images[kept], labels[kept], names, 4, True, "random", norms)


def measure(data: Dataset, given: dict[str, Any], device: torch.device) -> Row:
    """The second task's epochs, from the end of its first one to that of its last."""
    marks: list[float] = []
    images = 0
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(resolve(given), data, Path(folder))
        for event in without_ticks(run.events()):
            if isinstance(event, ev.StageStarted) and event.task == 1:
                images = event.steps * run.config.sections["flyp"]["batch_size"]
            if isinstance(event, ev.EpochEnded) and event.task == 1:
                marks.append(time.monotonic())
        notices = list(run.progress.notices)
        parameters = sum(p.numel() for p in run.parts.method.model.parameters())
    seconds = (marks[-1] - marks[0]) / (len(marks) - 1)
    return {
        "engine": run.parts.engine,
        "parameters": parameters,
        "images_per_second": round(images / seconds),
        "step_ms": round(1000 * seconds / max(images // run.config.sections["flyp"]["batch_size"], 1), 2),
        "peak_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if cuda else None,
        "reserved_gb": round(torch.cuda.max_memory_reserved(device) / 1e9, 2) if cuda else None,
        "notices": notices,
    }


def cases(models: Sequence[str], small: bool) -> list[tuple[str, dict[str, Any], list[str], dict[str, Any]]]:
    """Model, options of the method, add-ons, options of IVT."""
    found: list[tuple[str, dict[str, Any], list[str], dict[str, Any]]] = []
    for model in models:
        sizes: list[int | None] = [None] if model == "vit-b16" or small else [224, 160, 128]
        for pixels in sizes:
            own: dict[str, Any] = {"net": "clip", "weights": "random", "tag": "random"}
            if model != "vit-b16":
                own = {"net": model, "weights": None, "tag": None, "pixels": pixels}
            found += [(model, own, [], {}), (model, own, ["ivt"], {})]
        if model == "vit-b16":
            found.append((model, own, ["ivt"], {"memory": "host"}))
    return found


@contextmanager
def random_models(small: bool) -> Iterator[None]:
    """While it lasts, `clip` is one with random weights, which needs no file."""
    methods: Any = import_module("incvec.methods.dual")
    plain = methods.build_dual, methods.input_of

    def build(net: str, *rest: Any) -> Any:
        return from_transformers(random_clip(small), tokenize) if net == "clip" else plain[0](net, *rest)

    def wanted(net: str, *rest: Any) -> Any:
        return Input(32 if small else 224, MEAN, STD) if net == "clip" else plain[1](net, *rest)

    methods.build_dual, methods.input_of = build, wanted
    try:
        yield
    finally:
        methods.build_dual, methods.input_of = plain


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="thin layers and few images")
    parser.add_argument("--models", nargs="*", default=["vit-b16"], choices=["vit-b16", "lite0-minilm"])
    parser.add_argument("--epochs", type=int, default=4, help="two at least: the first one is not counted")
    parser.add_argument("--images", type=int, help="a class; there are ten classes a task")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(arguments)
    if wanted.epochs < 2:
        parser.error(f"--epochs {wanted.epochs}: the first epoch is not counted, so give 2 at least")
    device = pick_device()
    data = random_images(wanted.images or (13 if wanted.small else 320))
    report = Report(wanted.json, "dual_speed.py", arguments)
    with random_models(wanted.small), one_thread(wanted.small):
        for model, own, addons, ivt in cases(wanted.models, wanted.small):
            given: dict[str, Any] = {
                "method": "flyp", "dataset": "cifar100", "tasks": 2, "addons": addons, "snapshots": False,
                "flyp": {**own, "epochs": wanted.epochs, "templates": "photo"},
            }  # fmt: skip
            if addons:
                given["ivt"] = {"interval": 3, **ivt}
            told = {"model": model, "random_weights": own["net"] == "clip", "pixels": own.get("pixels")}
            report.add({**told, "addons": addons, **ivt, **measure(data, given, device)})


if __name__ == "__main__":
    main()
