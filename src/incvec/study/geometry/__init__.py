"""Experiments on finished runs and on models of your own: lines and planes through states, oracle gap, curvature."""

from incvec.study.geometry.paths import barrier, path, positions
from incvec.study.geometry.planes import Plane, plane
from incvec.study.geometry.points import Points, Scores
from incvec.study.geometry.snapshots import Rebuilt, snapshot_model, task_accuracy

__all__ = [
    "Plane",
    "Points",
    "Rebuilt",
    "Scores",
    "barrier",
    "path",
    "plane",
    "positions",
    "snapshot_model",
    "task_accuracy",
]
