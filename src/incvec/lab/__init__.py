"""Experiments on finished runs and on models of your own: straight lines between states, to begin with."""

from incvec.lab.paths import Rebuilt, path, positions, snapshot_model, task_accuracy

__all__ = ["Rebuilt", "path", "positions", "snapshot_model", "task_accuracy"]
