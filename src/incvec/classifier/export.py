"""Export of the deployed network: ONNX, a torch.export program, or a state dict; labels and preprocessing inside.

Networks take `images`, RGB pixels from 0 to 1 as float32 [B, 3, side, side] for any B, and return `probabilities`
[B, classes]. The normalization is part of the network. A file is written only after it was run, in the format's own
runtime, and agreed with the classifier: the same class, and probabilities within 1e-3.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incvec.atomic_files import write_bytes
from incvec.classifier.folder import Description
from incvec.classifier.network import Network
from incvec.errors import ConfigError, TrainingError

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "state-dict": ".safetensors"}
TOLERANCE = 1e-3
RUNNERS_UP = 1e-3  # two classes closer than this may change places


def metadata(description: Description) -> dict[str, str]:
    """What a user of the file needs, as JSON strings."""
    p = description.preprocessing
    return {
        "incvec.classes": json.dumps(list(description.classes), ensure_ascii=False),
        "incvec.preprocessing": json.dumps(
            {
                "side": p.side,
                "resize_short_side": p.stored,
                "resize": p.resize,
                "input": f"float32 [B, {len(p.mean)}, side, side], {'RGB' if len(p.mean) == 3 else 'gray'}, 0 to 1; "
                "the network normalizes",
                "mean": list(p.mean),
                "std": list(p.std),
            }
        ),
        "incvec.backbone": description.backbone,
    }


def export_network(network: Network, description: Description, kind: str, path: Path, pixels: Tensor) -> float:
    """Write the file and return the largest difference of a probability on the given pixels [N, 3, side, side]."""
    if kind not in SUFFIXES:
        raise ConfigError(f"the format {kind!r} is not known; expected one of {', '.join(SUFFIXES)}.")
    network = network.cpu()
    with torch.inference_mode():
        expected = torch.cat([network(part) for part in pixels.split(32)])
    if kind == "state-dict":
        write_bytes(path, state_dict(network, description), ConfigError)
        return 0.0
    content, run = (to_onnx if kind == "onnx" else to_torch)(network, description)
    # Batches of several sizes, one of them 1: the file has to take any.
    given = torch.cat([torch.as_tensor(run(part)) for part in (pixels[:1], *pixels[1:].split(7))])
    difference = float((given - expected).abs().max())
    top = expected.topk(min(2, expected.shape[1]), dim=1).values
    clear = top[:, 0] - top[:, -1] > RUNNERS_UP
    changed = int(((given.argmax(1) != expected.argmax(1)) & clear).sum())
    if difference > TOLERANCE or changed:
        raise TrainingError(
            f"the exported network differs from the classifier: {changed} of {len(pixels)} photos have another class, "
            f"probabilities differ by up to {difference:.2g}. Nothing was written. Try another format of "
            f"{', '.join(SUFFIXES)}."
        )
    write_bytes(path, content, ConfigError)
    return difference


def example(description: Description) -> Tensor:
    side, channels = description.preprocessing.side, len(description.preprocessing.mean)
    return torch.rand(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def _require(*names: str) -> list[Any]:
    from importlib import import_module

    try:
        return [import_module(name) for name in names]
    except ImportError as error:
        raise ConfigError(f"this export needs {error.name}: pip install 'incvec[classifier]'") from error


def to_onnx(network: Network, description: Description) -> tuple[bytes, Callable[[Tensor], np.ndarray[Any, Any]]]:
    onnx, _, runtime = _require("onnx", "onnxscript", "onnxruntime")
    program = torch.onnx.export(
        network,
        (example(description),),
        dynamo=True,
        input_names=["images"],
        output_names=["probabilities"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    model = program.model_proto
    for key, value in metadata(description).items():
        model.metadata_props.append(onnx.StringStringEntryProto(key=key, value=value))
    content = model.SerializeToString()
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(pixels: Tensor) -> np.ndarray[Any, Any]:
        result: np.ndarray[Any, Any] = session.run(["probabilities"], {"images": pixels.numpy()})[0]
        return result

    return content, run


def to_torch(network: Network, description: Description) -> tuple[bytes, Callable[[Tensor], np.ndarray[Any, Any]]]:
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        program = torch.export.export(network, (example(description),), dynamic_shapes=shapes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=metadata(description))
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()

    def run(pixels: Tensor) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            result: np.ndarray[Any, Any] = loaded(pixels).numpy()
        return result

    return buffer.getvalue(), run


def state_dict(network: Network, description: Description) -> bytes:
    """The weights of backbone and head under their names, as safetensors."""
    from safetensors.torch import save

    tensors = {name: tensor.contiguous().clone() for name, tensor in network.method.model.state_dict().items()}
    return save(tensors, metadata=metadata(description))
