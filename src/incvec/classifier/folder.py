"""The model folder: all that a classifier is, in files that move between machines together.

    planes/
      model.json                classes, preprocessing, architecture, settings, history; names the two files below
      weights-2.safetensors     weights, statistics of the classes, state of the add-ons
      photos-2.zip              remembered photos, as pixels (WebP); missing if there are none
      learning/                 only while `learn` runs, or after it was interrupted: what it resumes from

`model.json` is replaced last, in one atomic step, so a reader sees the model before a `learn` or the one after it. It
contains the description of the version before, whose files are kept for `undo`.
"""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from incvec.atomic_files import FileLock, read_tensors, remove_temporaries, write_bytes, write_tensors
from incvec.errors import Busy, CheckpointError, ConfigError

FORMAT = 1
REMEDY = "Copy the folder again from where it is intact, or use `incvec undo`."
WEBP: dict[str, Any] = {"format": "WEBP", "quality": 90, "method": 4}

Photos = list[list[bytes]]  # by class: encoded squares, the most typical first


class Preprocessing(BaseModel):
    """How an image becomes the network's input: short side to `stored` pixels (bicubic, antialiased), the center square
    of `side` pixels, then (x - mean) / std with x from 0 to 1, RGB."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    side: int
    stored: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: str = "short side to `stored` pixels, bicubic and antialiased; center square of `side` pixels; RGB, 0 to 1"


class Learned(BaseModel):
    """One `learn`: what came in, and how well the classes were recognized on the check photos right after it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: str
    source: str
    classes: tuple[str, ...]
    photos: int
    seconds: float
    check: dict[str, tuple[int, int]] = Field(default_factory=dict)  # class: correct and number of check photos
    more: dict[str, int] = Field(default_factory=dict)  # further photos of classes that were known


class Description(BaseModel):
    """The content of model.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    version: int
    classes: tuple[str, ...]
    task_sizes: tuple[int, ...]  # classes of each `learn`, in order
    preprocessing: Preprocessing
    backbone: str
    method: str
    addons: tuple[str, ...]
    sections: dict[str, dict[str, Any]]  # settings of the method and the add-ons
    memory: int  # photos per class to remember, for methods that train on them
    check: int  # photos per class held out to measure accuracy
    keeps_photos: bool = False  # whether check photos, or any others, may be kept
    has_past: bool = True  # False: trained elsewhere, and IVT has not measured yet what it knows
    seed: int
    temperature: float = 1.0  # divides the scores, so that probabilities are calibrated on the check photos
    history: tuple[Learned, ...]
    remembered: tuple[int, ...]  # photos kept of each class for training
    checked: tuple[int, ...]  # and for measuring accuracy
    weights_file: str
    photos_file: str | None
    previous: dict[str, Any] | None = None  # the description before the last `learn`

    @property
    def files(self) -> set[str]:
        return {name for name in (self.weights_file, self.photos_file) if name}


class ModelFolder:
    """Reads and replaces the model in a folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.lock = FileLock(self.path / ".lock", Busy)

    @property
    def working(self) -> Path:
        """Where an unfinished `learn` is."""
        return self.path / "learning"

    @property
    def description_path(self) -> Path:
        return self.path / "model.json"

    def exists(self) -> bool:
        return self.description_path.is_file()

    def remove_if_empty(self) -> None:
        """Remove a folder that has nothing but the lock, which the caller holds."""
        if list(self.path.iterdir()) == [self.lock.path]:
            self.lock.path.unlink()
            self.path.rmdir()

    def read(self) -> Description:
        try:
            content = json.loads(self.description_path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            hint = " An interrupted `learn` is there: give the same command again." if self.working.is_dir() else ""
            raise ConfigError(
                f"{self.path} is not a model folder: it has no model.json. Make one with `incvec learn PHOTOS --out "
                f"{self.path}`.{hint}"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.description_path} cannot be read ({error}). {REMEDY}") from error
        return parse(content, self.description_path)

    def read_weights(self, description: Description) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return read_tensors(self.path / description.weights_file, REMEDY)

    def read_photos(self, description: Description) -> tuple[Photos, Photos]:
        """The remembered photos of each class, and the check photos."""
        number = len(description.classes)
        if description.photos_file is None:
            return [[] for _ in range(number)], [[] for _ in range(number)]
        path = self.path / description.photos_file
        try:
            with zipfile.ZipFile(path) as file:
                return tuple(  # type: ignore[return-value]
                    [[file.read(photo_name(part, c, i)) for i in range(count)] for c, count in enumerate(counts)]
                    for part, counts in (("kept", description.remembered), ("check", description.checked))
                )
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} cannot be read ({error}). {REMEDY}") from error

    def commit(
        self,
        description: Description,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        kept: Photos,
        check: Photos,
    ) -> None:
        """Write a new version. The caller holds the lock. Until the last step the folder has the version before."""
        write_tensors(self.path / description.weights_file, tensors, meta)
        if description.photos_file is not None:
            write_bytes(self.path / description.photos_file, zip_photos(kept, check))
        self._describe(description)
        self.clean(description)

    def undo(self) -> Description:
        """Go back to the version before the last `learn`. The caller holds the lock."""
        now = self.read()
        if now.previous is None:
            what = "one `learn`" if len(now.history) == 1 else "one step back was taken already"
            raise ConfigError(
                f"{self.path} has no version before this one ({what}): nothing was changed. Only the last `learn` can "
                "be undone."
            )
        before = parse(now.previous, self.description_path)
        self._describe(before)
        self.clean(before)
        return before

    def _describe(self, description: Description) -> None:
        write_bytes(self.description_path, (description.model_dump_json(indent=1) + "\n").encode())

    def clean(self, description: Description) -> None:
        """Remove the unfinished `learn` and the files of versions that can no longer be reached."""
        needed = set(description.files)
        if description.previous is not None:
            needed |= parse(description.previous, self.description_path).files
        for path in (*self.path.glob("weights-*.safetensors"), *self.path.glob("photos-*.zip")):
            if path.name not in needed:
                path.unlink(missing_ok=True)
        remove_temporaries(self.path, "model.json", "weights-*", "photos-*")
        shutil.rmtree(self.working, ignore_errors=True)

    def size(self) -> int:
        """Bytes of the present version."""
        names = {"model.json", *self.read().files}
        return sum((self.path / name).stat().st_size for name in names)


def parse(content: Any, path: Path) -> Description:
    version = content.get("format") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{path} has format {version}; this version of incvec reads up to {FORMAT}. Update it.")
    try:
        return Description.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is damaged: {where}: {first['msg']}. {REMEDY}") from None


# Photos as files --------------------------------------------------------------------------------------------


def photo_name(part: str, label: int, index: int) -> str:
    return f"{part}/{label:04d}/{index:03d}.webp"


def zip_photos(kept: Sequence[Sequence[bytes]], check: Sequence[Sequence[bytes]]) -> bytes:
    """A zip file; its content depends on the photos only."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for part, classes in (("kept", kept), ("check", check)):
            for label, photos in enumerate(classes):
                for index, content in enumerate(photos):
                    file.writestr(zipfile.ZipInfo(photo_name(part, label, index)), content)
    return buffer.getvalue()


def encode(pixels: Tensor) -> bytes:
    """uint8 [3, H, W] as WebP."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, **WEBP)
    return buffer.getvalue()


def decode(content: bytes) -> Tensor:
    """The pixels of an encoded photo, uint8 [3, H, W]."""
    import numpy as np

    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
