"""Options of the data sets, apart from the code that loads them: settings are validated before torch is imported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from incvec.config import Options

Placement = Literal["resident", "streamed"]
TEST_EVERY = 5


class DatasetOptions(Options):
    """Options that every data set has."""

    held_out: int | None = Field(
        None, ge=2, description="evaluate on every n-th training image of a class, excluded from training"
    )


class FolderOptions(DatasetOptions):
    """Options of the data set `folder`."""

    image_size: int = Field(64, ge=1, description="side of the square images, in pixels")
    test_every: int = Field(TEST_EVERY, ge=2, description="without train/, every n-th file of a class is a test image")
    test_folder: str | None = Field(None, description="folder of the test images, if neither test/ nor val/")


class StoreOptions(DatasetOptions):
    """Options of every data set in a packed store."""

    image_size: int | None = Field(None, ge=1, description="input side of the network; none: 7/8 of a large side")
    placement: Placement | None = Field(None, description="on the device or streamed to it; none: by its free memory")


class SubsetOptions(StoreOptions):
    """Options of data sets that may be a part of a store."""

    class_list: str | None = Field(None, description="some of the classes: the name of a list, or a file")
