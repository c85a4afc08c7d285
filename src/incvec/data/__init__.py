"""Data sets, class orders, the task stream, exemplar memory, and sources and views on the device."""

from typing import TYPE_CHECKING

from incvec.lazy import lazy_exports

if TYPE_CHECKING:
    from incvec.data.augment import rotate90, rotation_labels
    from incvec.data.dataset import Dataset
    from incvec.data.datasets import DATASETS, DatasetEntry, check, load_dataset
    from incvec.data.options import DatasetOptions
    from incvec.data.select import class_means
    from incvec.data.source import ImageSource
    from incvec.data.store.stream import Streamed, StreamedSource, make_source
    from incvec.data.stream import class_order, relabel, split
    from incvec.data.views import Views, make_views

__getattr__ = lazy_exports(
    __name__,
    {
        "augment": ("rotate90", "rotation_labels"),
        "dataset": ("Dataset",),
        "datasets": ("DATASETS", "DatasetEntry", "check", "load_dataset"),
        "options": ("DatasetOptions",),
        "select": ("class_means",),
        "source": ("ImageSource",),
        "store.stream": ("Streamed", "StreamedSource", "make_source"),
        "stream": ("class_order", "relabel", "split"),
        "views": ("Views", "make_views"),
    },
)

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetEntry",
    "DatasetOptions",
    "ImageSource",
    "Streamed",
    "StreamedSource",
    "Views",
    "check",
    "class_means",
    "class_order",
    "load_dataset",
    "make_source",
    "make_views",
    "relabel",
    "rotate90",
    "rotation_labels",
    "split",
]
