"""Compiling backbones: once for student, teacher and all tasks, since their parameters are inputs."""

from __future__ import annotations

import torch

from incvec.contracts import Method
from incvec.nets import Backbone

RECOMPILES = 64  # train and eval, with and without gradients, a few batch sizes: all are legitimate


def compile_backbones(method: Method) -> None:
    """Let every backbone of the method, the teacher's too, run compiled."""
    torch._dynamo.config.recompile_limit = RECOMPILES
    torch._dynamo.config.suppress_errors = True  # what will not compile is run as it is written
    for module in method.modules():
        if isinstance(module, Backbone) and module._compiled_call_impl is None:
            module.compile(dynamic=False)


def forget_compiled(method: Method) -> None:
    """Back to plain calls."""
    for module in method.modules():
        if isinstance(module, Backbone):
            module._compiled_call_impl = None
