"""Experiments on finished runs and on models of your own: lines and planes through states, oracle gap, curvature."""

from incvec.lab.paths import barrier, path, positions
from incvec.lab.planes import Plane, plane
from incvec.lab.points import Points, Scores
from incvec.lab.snapshots import Rebuilt, snapshot_model, task_accuracy

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
