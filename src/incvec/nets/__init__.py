"""Backbones by name, heads that grow by appending blocks, and the model that joins the two."""

from incvec.nets.backbones import BACKBONES, build_backbone, check_backbone, finer_backbone
from incvec.nets.heads import Block, CosineHead, Head, LinearHead, ProxyHead, mean_row_norm, to_float32
from incvec.nets.model import Classifier
from incvec.nets.resnet import Backbone, Features, Norm, Residual

__all__ = [
    "BACKBONES",
    "Backbone",
    "Block",
    "Classifier",
    "CosineHead",
    "Features",
    "Head",
    "LinearHead",
    "Norm",
    "ProxyHead",
    "Residual",
    "build_backbone",
    "check_backbone",
    "finer_backbone",
    "mean_row_norm",
    "to_float32",
]
