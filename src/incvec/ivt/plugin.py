"""The plug-in: anchor, cumulative Fisher, schedule and state of Increment Vector Transformation.

    ivt = IVT(model, interval=10)
    for task in tasks:
        ...                                      # grow the model, make this task's optimizer
        ivt.begin_task(optimizer=optimizer)      # anchor <- theta
        for epoch in range(epochs):
            for batch in loader: ...             # forward, backward, optimizer.step()
            ivt.end_epoch()                      # F_t; every interval-th epoch: theta <- anchor + S (theta - anchor)
        ivt.end_task()                           # Fbar_t = Fbar_{t-1} + F_t

Memory: the anchor, Fbar and F, three times the trained parameters in float32 (CLIP ViT-B/16 with its 150 million
parameters: 3 x 0.6 GB). With memory="host" the anchor and Fbar are in host memory, and only F is on the device. A step
adds squares to F in place. Steps, ends of epochs and diagonal teleports never synchronize with the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .fisher import BatchFisher, Structure, capturing, check_choice
from .names import fisher_shape, float_parameters, grown, kernel_names, state_dtype, unwrap
from .state import State, check_fits, pack, unpack
from .transform import ReportRow, block_teleport_, report_rows, teleport_

OptimizerState = Literal["keep", "reset"]
Memory = Literal["device", "host"]


class IVT:
    """Increment Vector Transformation (https://arxiv.org/abs/2509.21898, Algorithm 1) for any training loop.

    Args:
        model: the module to teleport. Parameters are identified by name; compiled, DP and DDP wrappers are unwrapped.
        optimizers: the optimizers whose steps are counted; `begin_task(optimizer=...)` replaces them. F covers the
            parameters in their groups and no others. Each step adds one square per parameter, of the gradient that
            the optimizer sees (after clipping, accumulation and all-reduce, unscaled, without weight decay).
        interval: epochs between teleports. None: only when `teleport()` is called.
        structure: "diagonal", or "kernel" for one block per convolution kernel slice. F and Fbar then have k*k numbers
            per weight, and a teleport solves one k*k system per slice.
        optimizer_state: "keep", or "reset" to zero the state of teleported parameters (momentum, Adam's moments and
            step) at each teleport.
        memory: "device" keeps the anchor and Fbar beside the parameters. "host" keeps them in host memory (pinned if
            the parameters are on a GPU), and a teleport streams them in pieces. The result is the same bit for bit;
            begin_task() and end_task() then synchronize with the device.
        listen: False registers no hook; the host calls `accumulate` before each step.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        interval: int | None = 10,
        structure: Structure = "diagonal",
        fisher: Literal["batch"] = "batch",
        optimizer_state: OptimizerState = "keep",
        memory: Memory = "device",
        listen: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        check_choice("structure", structure, Structure)
        if fisher != "batch":
            raise ValueError(f"fisher={fisher!r} was removed: F comes from the steps, or from set_fisher()")
        check_choice("optimizer_state", optimizer_state, OptimizerState)
        check_choice("memory", memory, Memory)
        if interval is not None and (not isinstance(interval, int) or isinstance(interval, bool) or interval < 1):
            raise ValueError(f"interval={interval!r}: give a number of epochs from 1 up, or None for no schedule")
        self.interval = interval
        self.structure = structure
        self.optimizer_state = optimizer_state
        self.memory = memory
        self.listen = listen
        self._model = unwrap(model)
        self._optimizers: tuple[Optimizer, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._kernels: frozenset[str] = frozenset()
        self._anchor: dict[str, Tensor] = {}
        self._cumulative: dict[str, Tensor] = {}
        self._fisher = BatchFisher({})
        self._task = 0
        self._epoch = 0
        self._in_task = False
        self._finalized = False  # F holds means of an epoch, no longer sums
        self._stepless = False  # since the last end_epoch()
        self._statistics: list[tuple[str, int, Tensor]] = []
        self.attach(*optimizers)

    # The model and its optimizers

    @property
    def task(self) -> int:
        """Number of the current task, or of the last one; the first is 1."""
        return self._task

    @property
    def epoch(self) -> int:
        """Epochs ended in this task."""
        return self._epoch

    @property
    def anchor(self) -> Mapping[str, Tensor]:
        """The parameters the task began with, by name; empty between tasks."""
        return self._anchor

    @property
    def cumulative(self) -> Mapping[str, Tensor]:
        """Fbar of the tasks ended so far, by name."""
        return self._cumulative

    @property
    def fisher(self) -> Mapping[str, Tensor]:
        """F_t of the last epoch once `end_epoch` has run, until then this epoch's sums; by name."""
        return {name: self._fisher.sums[name] for name in self._fisher.seen}

    def attach(self, *optimizers: Optimizer) -> None:
        """Count the steps of these optimizers and of no others."""
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; "
                    "a wrapper's inner optimizer is what steps, pass that one"
                )
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizers = optimizers
        if self.listen:
            self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def _read_parameters(self) -> None:
        self._parameters = float_parameters(self._model)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._kernels = kernel_names(self._model) if self.structure == "kernel" else frozenset()

    def _trained(self, optimizers: Iterable[Optimizer]) -> dict[str, nn.Parameter]:
        """The model's parameters in the optimizers' groups that require gradients."""
        stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self._parameters.items() if id(p) in stepped and p.requires_grad}

    def _require_task(self, call: str) -> None:
        if not self._in_task:
            raise RuntimeError(f"{call} outside a task: call begin_task() first")

    # Algorithm 1, call by call

    @torch.no_grad()
    def begin_task(self, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Anchor the parameters at their present values. Call it after the model has grown and been initialized.

        optimizer: this task's optimizer or optimizers, replacing the previous ones. Without any, all
        parameters that require gradients are trained by the task, and the host calls `accumulate`.

        Fbar is matched by name: new parameters have none, rows added to dimension 0 have zeros, and the Fbar of
        removed parameters is dropped.
        """
        if self._in_task:
            raise RuntimeError(
                f"begin_task() inside task {self._task}: call end_task() first (to go on with a loaded state, only "
                "attach() the optimizer)"
            )
        if optimizer is not None:
            self.attach(*([optimizer] if isinstance(optimizer, Optimizer) else optimizer))
        if self.optimizer_state == "reset" and not self._optimizers:
            raise ValueError("optimizer_state='reset' needs to know the optimizer: begin_task(optimizer=...)")
        self._read_parameters()
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        if self._optimizers:
            trained = self._trained(self._optimizers)
        if not trained:
            raise ValueError(
                "no parameter of the model requires gradients and is in the groups of the optimizer; "
                "was the optimizer made for another model, or copied together with one?"
            )
        self._cumulative = {
            name: self._placed(
                grown(name, old, self._parameters[name], name in self._kernels), self._parameters[name].device
            )
            for name, old in self._cumulative.items()
            if name in self._parameters
        }
        self._anchor = {}
        self._fisher = BatchFisher({}, self._kernels)
        self._admit(trained)
        for stepping in [trained, *(self._trained([known]) for known in self._optimizers)]:
            if stepping:
                self._fisher.counter(stepping)
        self._task += 1
        self._epoch = 0
        self._in_task = True
        self._finalized = self._stepless = False

    def _admit(self, parameters: Mapping[str, Tensor]) -> None:
        self._fisher.allocate(parameters)
        for name, parameter in parameters.items():
            value = parameter.detach()
            self._anchor[name] = self._placed(value.to(state_dtype(value), copy=True), value.device)

    def _placed(self, value: Tensor, device: torch.device) -> Tensor:
        """The tensor moved to where the anchor and Fbar of a parameter on `device` are stored."""
        if self.memory == "device":
            return value.to(device)
        pinned = device.type == "cuda"
        if value.device.type == "cpu" and value.is_pinned() == pinned:
            return value
        # A blocking copy: no later code has to wait for it.
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned).copy_(value)

    def begin_epoch(self) -> None:
        """Set the epoch's sums to zero. Optional: the first step after `end_epoch` does the same.

        A host that replays a captured CUDA graph runs no Python in its steps, so it calls this before each
        epoch. Calling it again before a step changes nothing.
        """
        self._require_task("begin_epoch()")
        self._fisher.zero_()
        self._finalized = self._stepless = False

    def _open_epoch(self) -> None:
        if self._finalized:
            if any(capturing(total) for total in self._fisher.sums.values()):
                raise RuntimeError("call begin_epoch() before capturing, or every replay would zero the sums")
            self.begin_epoch()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._in_task:
            return
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(closure) computes its gradients after IVT has read them; "
                "call backward() yourself and then step() without a closure"
            )
        self.accumulate(
            (p for group in optimizer.param_groups for p in group["params"]),
            grad_scale=getattr(optimizer, "grad_scale", None),
            found_inf=getattr(optimizer, "found_inf", None),
        )

    @torch.no_grad()
    def accumulate(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Add the squares of `.grad` to F and count one step. Called by the hook, or by a host without hooks.

        parameters: those that step now, by default all of the task's. Parameters of other models are ignored. One
        that was frozen at begin_task() is added with its present value as its anchor.

        Capturable in a CUDA graph after one call outside it with the same parameters: in-place operations on
        existing buffers, no synchronization. grad_scale, found_inf: see `BatchFisher.accumulate`.
        """
        self._require_task("accumulate()")
        self._open_epoch()
        if parameters is None:
            parameters = [self._parameters[name] for name in self._anchor]
        named: list[tuple[str, Tensor]] = []
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None:
                continue
            if name not in self._anchor and parameter.grad is not None:
                self._admit({name: parameter})
            named.append((name, parameter))
        self._fisher.accumulate(named, grad_scale=grad_scale, found_inf=found_inf)

    def observe(self, *arguments: object, **options: object) -> None:
        """Removed."""
        raise AttributeError("IVT.observe() was removed: pass an F computed elsewhere to set_fisher()")

    def _finalize(self) -> None:
        if not self._finalized:
            self._fisher.mean_()
            self._finalized = True

    def end_epoch(self) -> bool:
        """F_t of this epoch; every interval-th epoch of tasks 2, 3, ... teleports. Returns whether it did."""
        self._require_task("end_epoch()")
        if self._stepless:
            warnings.warn(
                "end_epoch() without a step since the last one: F_t stays that of the earlier epoch. "
                "If the model was trained, IVT is not listening to the optimizer that steps",
                stacklevel=2,
            )
        self._finalize()
        self._stepless = True
        self._epoch += 1
        if self.interval is None or self._epoch % self.interval:
            return False
        return self.teleport()

    @torch.no_grad()
    def teleport(self, leave: tuple[str, ...] = (), towards: Mapping[str, Tensor] | None = None) -> bool:
        """theta <- anchor + S (theta - anchor), in place, by this epoch's F_t. Returns whether anything moved.

        Called by the schedule or by the user. In the middle of an epoch it finalizes the epoch's sums, and the next
        step starts new ones. In the first task Fbar_0 = 0, hence S = 1, and nothing is done.

        leave: prefixes of parameter names that are not teleported; their F is collected all the same.
        towards: values by name that replace the anchor for this teleport, for a host that has rescaled a parameter.
        `report` then uses the rescaled units.
        """
        self._require_task("teleport()")
        self._finalize()
        anchor = {**self._anchor, **(towards or {})}
        current = float_parameters(self._model)
        known = [name for name in self._cumulative if name in self._fisher.seen and name in current]
        names = [name for name in known if not name.startswith(leave)]
        for name in names:
            if current[name].shape != anchor[name].shape:
                raise RuntimeError(
                    f"parameter {name!r} has shape {tuple(current[name].shape)}, but was anchored with "
                    f"{tuple(anchor[name].shape)}: grow the model before begin_task(), not after"
                )
        diagonal = [name for name in names if name not in self._kernels]
        rows = teleport_(
            [current[name] for name in diagonal],
            [anchor[name] for name in diagonal],
            [self._cumulative[name] for name in diagonal],
            [self._fisher.sums[name] for name in diagonal],
        )
        measured = dict(zip(diagonal, rows, strict=True))
        for name in names:
            if name in self._kernels:
                measured[name] = block_teleport_(
                    current[name], anchor[name], self._cumulative[name], self._fisher.sums[name]
                )
        self._statistics = [(name, current[name].numel(), measured[name]) for name in names]
        if self.optimizer_state == "reset":
            for optimizer in self._optimizers:
                for name in names:
                    for value in optimizer.state.get(current[name], {}).values():
                        if isinstance(value, Tensor):
                            value.zero_()
        return bool(names)

    @torch.no_grad()
    def set_fisher(self, fisher: Mapping[str, Tensor]) -> None:
        """Set F_t of the current task, for example from a saved base model, instead of collecting it from steps.

        It is treated as the mean of an epoch that just ended: `teleport` and `end_task` use it, and a further step
        starts a new epoch.
        """
        self._require_task("set_fisher()")
        unknown = sorted(set(fisher) - set(self._parameters))
        if unknown:
            raise KeyError(
                f"the model has no parameters {unknown[:5]}; its names are {list(self._parameters)[:5]}, ..."
            )
        for name, value in fisher.items():
            shape = fisher_shape(self._parameters[name], name in self._kernels)
            if value.shape != shape:
                raise ValueError(f"F of {name!r} must have shape {tuple(shape)}, got {tuple(value.shape)}")
        self._admit({name: self._parameters[name] for name in fisher if name not in self._anchor})
        self._fisher.restore(fisher, [1.0] * len(fisher))
        self._finalized = True

    @torch.no_grad()
    def end_task(self) -> None:
        """Fbar_t = Fbar_{t-1} + F_t. Synchronizes with the device once, to check that there were steps."""
        self._require_task("end_task()")
        self._finalize()
        if not any(self._fisher.counts().values()):
            raise RuntimeError(
                f"task {self._task} ends without any step seen by IVT. Give begin_task(optimizer=...) the "
                "optimizer that steps (a deep copy of one loses its hooks), or call accumulate() "
                "yourself; set_fisher() takes an F computed elsewhere"
            )
        for name in self._fisher.seen:
            fresh, past = self._fisher.sums[name], self._cumulative.get(name)
            if past is None:
                # A copy: replaying a captured step once more would add to the sums themselves.
                self._cumulative[name] = self._placed(fresh.clone(), fresh.device)
            else:
                past.add_(fresh.to(past.device))
        self._anchor = {}
        self._fisher = BatchFisher({})
        self._in_task = self._finalized = False

    # Report and state

    def report(self) -> list[ReportRow]:
        """Statistics of the last teleport, one row per tensor. Synchronizes with the device."""
        return report_rows(self._statistics)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to resume, as a flat mapping of contiguous copies; see `incvec.ivt.state`."""
        fisher, counts = self.fisher, self._fisher.counts()
        return pack(
            State(
                task=self._task,
                epoch=self._epoch,
                in_task=self._in_task,
                epoch_finalized=self._finalized,
                anchor=self._anchor,
                cumulative=self._cumulative,
                fisher=fisher,
                steps=torch.stack([counts[name] for name in sorted(fisher)]) if fisher else torch.zeros(0),
            )
        )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a `state_dict`. The model must have grown to that task; do not call begin_task() again for it.

        The optimizers are not part of the state: pass them to IVT(...) or `attach`. Buffers of the right shape
        are written in place, so a captured CUDA graph stays valid.
        """
        saved = unpack(state)
        self._read_parameters()
        check_fits(saved, self._parameters, self._kernels)
        self._cumulative = {n: self._stored(n, v, self._cumulative) for n, v in saved.cumulative.items()}
        self._anchor = {n: self._stored(n, v, self._anchor) for n, v in saved.anchor.items()}
        if not (self._in_task and saved.in_task):
            self._fisher = BatchFisher({}, self._kernels)
        self._fisher.allocate({name: self._parameters[name] for name in self._anchor})
        self._fisher.restore(saved.fisher, saved.steps.tolist())
        self._task, self._epoch = saved.task, saved.epoch
        self._in_task, self._finalized = saved.in_task, saved.epoch_finalized
        self._stepless = saved.epoch_finalized  # no step since the end of that epoch
        self._statistics = []

    def _stored(self, name: str, value: Tensor, present: Mapping[str, Tensor]) -> Tensor:
        """The saved value, in the existing buffer if it fits, else in a new one."""
        parameter = self._parameters.get(name)
        near = torch.device("cpu") if parameter is None else parameter.device
        device = near if self.memory == "device" else torch.device("cpu")
        buffer = present.get(name)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (value.shape, value.dtype, device):
            return self._placed(value.to(device, copy=True), near)
        return buffer.copy_(value)
