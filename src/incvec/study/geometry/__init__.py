"""Experiments on finished runs and on your own models: paths, planes and curvature."""

from incvec.study.geometry.evaluation import EvaluationOptions, Scores, StateEvaluator
from incvec.study.geometry.paths import barrier, path, positions
from incvec.study.geometry.planes import Plane, plane
from incvec.study.geometry.snapshots import Snapshot, load_snapshot, task_accuracy

__all__ = [
    "EvaluationOptions",
    "Plane",
    "Scores",
    "Snapshot",
    "StateEvaluator",
    "barrier",
    "load_snapshot",
    "path",
    "plane",
    "positions",
    "task_accuracy",
]
