"""Data sets, class orders, the task stream, exemplar memory, sources and views on the device."""

from incvec.data.dataset import Dataset
from incvec.data.datasets import DATASETS, check, load_dataset
from incvec.data.select import class_means, herd, herd_greedy, kmeans
from incvec.data.source import ImageSource
from incvec.data.store.stream import Streamed, StreamedSource, make_source, make_views
from incvec.data.stream import class_order, relabel, split
from incvec.data.views import Views, rotate90, rotation_labels

__all__ = [
    "DATASETS",
    "Dataset",
    "ImageSource",
    "Streamed",
    "StreamedSource",
    "Views",
    "check",
    "class_means",
    "class_order",
    "herd",
    "herd_greedy",
    "kmeans",
    "load_dataset",
    "make_source",
    "make_views",
    "relabel",
    "rotate90",
    "rotation_labels",
    "split",
]
