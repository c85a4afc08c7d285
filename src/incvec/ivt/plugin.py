"""IVT: anchor, cumulative Fisher, schedule, state.

    ivt = IVT(model, optimizer, interval=10)
    for task in tasks:
        ...                                      # grow the model, make this task's optimizer
        ivt.begin_task(optimizer=optimizer)      # anchor <- theta
        for epoch in range(epochs):
            for batch in loader: ...             # forward, backward, optimizer.step()
            ivt.end_epoch()                      # F_t; every interval-th epoch: theta <- anchor + S (theta - anchor)
        ivt.end_task()                           # Fbar_t = Fbar_{t-1} + F_t

Memory: the anchor, Fbar and F, three times the trained parameters in float32 (CLIP ViT-B/16 with its 150 million: 3 x
0.6 GB). With memory="host" the first two lie in host memory, and only F, 0.6 GB, on the device. A step adds squares to
F in place; nothing in a step, an epoch's end or a diagonal teleport waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .fisher import BatchFisher, Kind, LossFunction, Structure, capturing, check_choice, squared_gradients
from .names import fisher_shape, float_parameters, grown, kernel_names, state_dtype, unwrap
from .state import State, check_fits, pack, unpack
from .transform import ReportRow, block_teleport_, report_rows, teleport_

OptimizerState = Literal["keep", "reset"]
Memory = Literal["device", "host"]


class IVT:
    """Increment Vector Transformation (https://arxiv.org/abs/2509.21898, Algorithm 1) for any training loop.

    model: what is teleported. Parameters are known by name; a compiled, DP or DDP wrapper is looked through.
    optimizers: whose steps to listen to; `begin_task(optimizer=...)` replaces them. F takes the parameters in
        their groups and no others, one square for each step, gradients as the optimizer sees them (after
        clipping, accumulation and all-reduce, unscaled, without its weight decay).
    interval: epochs between teleports; None: only where `teleport()` is called.
    structure: "diagonal", or "kernel" for a block for each convolution kernel slice (F and Fbar then hold k*k
        numbers a weight there, and a teleport solves one k*k system a slice).
    fisher: "batch" is the paper's estimator, from the steps themselves. "sample", "exact" and "sampled" are fed
        by `observe` instead; `incvec.ivt.fisher` states their cost.
    optimizer_state: "keep", or "reset" to zero the state of teleported parameters (momentum, Adam's moments and
        step) at each teleport.
    memory: "device" keeps the anchor and Fbar beside the parameters; "host" in host memory (pinned where those are on a
        GPU), from where a teleport streams them in pieces. The same bits either way; begin_task() and end_task() wait
        for the device then.
    listen: False registers no hook: the host calls `accumulate` itself, before each step.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        interval: int | None = 10,
        structure: Structure = "diagonal",
        fisher: Kind = "batch",
        optimizer_state: OptimizerState = "keep",
        memory: Memory = "device",
        listen: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        check_choice("structure", structure, Structure)
        check_choice("fisher", fisher, Kind)
        check_choice("optimizer_state", optimizer_state, OptimizerState)
        check_choice("memory", memory, Memory)
        if interval is not None and (not isinstance(interval, int) or isinstance(interval, bool) or interval < 1):
            raise ValueError(f"interval={interval!r}: give a number of epochs from 1 up, or None for no schedule")
        self.interval = interval
        self.structure = structure
        self.kind = fisher
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

    # What is known of the model and its optimizers

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
        """Listen to these optimizers' steps and to no others."""
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; "
                    "a wrapper's inner optimizer is what steps, pass that one"
                )
        for handle in self._handles:
            handle.remove()
        self._optimizers = optimizers
        listening = optimizers if self.listen and self.kind == "batch" else ()
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in listening]

    def _look_at_model(self) -> None:
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
        """Anchor the parameters as they are now: call it once the model has grown and been initialized.

        optimizer: this task's optimizer or optimizers, in place of those known so far. Without any, all
        parameters that require gradients are the task's, and the host calls `accumulate`.

        Fbar follows the names: new parameters have none, rows that were added to dimension 0 have zeros, what
        vanished is dropped.
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
        self._look_at_model()
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
        """The tensor where the anchor and Fbar of a parameter on `device` live; itself where it is there already."""
        if self.memory == "device":
            return value.to(device)
        pinned = device.type == "cuda"
        if value.device.type == "cpu" and value.is_pinned() == pinned:
            return value
        # A copy that waits: nobody has to ask later whether it has arrived.
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned).copy_(value)

    def begin_epoch(self) -> None:
        """Set the epoch's sums to zero. Optional: the first step after `end_epoch` does it too.

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
                f"{type(optimizer).__name__}.step(closure) computes its gradients after IVT has looked at them; "
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
        """Add the squares of `.grad` to F and count one step. The hook calls it; so may a host without hooks.

        parameters: those that step now, by default all the task's. Others than the model's are passed over; one
        that was frozen when the task began joins with its present value as its anchor.

        Capturable in a CUDA graph after one call outside it with the same parameters: in-place operations on
        existing buffers, no synchronization. grad_scale, found_inf: see `BatchFisher.accumulate`.
        """
        self._require_task("accumulate()")
        if self.kind != "batch":
            raise RuntimeError(f"fisher={self.kind!r} is fed by observe(loss_fn, batch), not by gradients of steps")
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

    def observe(
        self,
        loss_fn: LossFunction,
        batch: Any,
        *,
        generator: torch.Generator | None = None,
        chunk_size: int = 16,
    ) -> None:
        """Feed the estimators "sample", "exact" and "sampled" with one batch, at the parameters of this moment.

        loss_fn(batch) calls the model (the plain module): for "sample" it returns the loss of a batch of one
        sample, for "exact" and "sampled" the logits (samples, classes). batch holds tensors with one sample a
        row. The model is in evaluation mode for the call, so BatchNorm uses its running statistics.

        F_t is the mean over all samples observed in the epoch. Cost, in forwards and backwards of the batch:
        "sample" 1 + 1, "sampled" 2 + 1 (draws from `generator`), "exact" 1 + the number of classes; memory for
        `chunk_size` gradients of the model. Observing the epochs that end in a teleport is enough.
        """
        self._require_task("observe()")
        if self.kind == "batch":
            raise RuntimeError("fisher='batch' listens to the optimizer; observe() is for sample, exact and sampled")
        self._open_epoch()
        parameters = {name: self._parameters[name] for name in self._anchor}
        squares, count = squared_gradients(
            self._model, loss_fn, batch, parameters,
            kind=self.kind, kernels=self._kernels, generator=generator, chunk_size=chunk_size,
        )  # fmt: skip
        self._fisher.add(squares, count)

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

        The schedule calls it; so may the user. In the middle of an epoch it closes the epoch's sums, and the
        next step begins new ones. In the first task Fbar_0 = 0, hence S = 1, and nothing is done.

        leave: parameters whose names begin so stay where they are; their F is collected all the same.
        towards: by name, what stands in for the anchor this time: for a host that has told a parameter in other units,
        which are the units of `report` then.
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
        """Take F_t of the current task from elsewhere (say, from a saved base model) instead of from its steps.

        It stands as if it were the mean of an epoch just ended: `teleport` and `end_task` use it, and a further
        step would begin a new epoch in its place.
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
        """Fbar_t = Fbar_{t-1} + F_t. Waits for the device once, to see that there were steps at all."""
        self._require_task("end_task()")
        self._finalize()
        if not any(self._fisher.counts().values()):
            raise RuntimeError(
                f"task {self._task} ends without a step that IVT has seen. Give begin_task(optimizer=...) the "
                "optimizer that steps (a deep copy of one loses its hooks), or call accumulate() or observe() "
                "yourself; set_fisher() takes an F computed elsewhere"
            )
        for name in self._fisher.seen:
            fresh, past = self._fisher.sums[name], self._cumulative.get(name)
            if past is None:
                # A copy: a captured step that is replayed once more adds into the sums themselves.
                self._cumulative[name] = self._placed(fresh.clone(), fresh.device)
            else:
                past.add_(fresh.to(past.device))
        self._anchor = {}
        self._fisher = BatchFisher({})
        self._in_task = self._finalized = False

    # Looking back, saving, going on

    def report(self) -> list[ReportRow]:
        """What the last teleport did, one row a tensor. Waits for the device."""
        return report_rows(self._statistics)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything to go on from, as a flat mapping of contiguous copies; see `incvec.ivt.state`."""
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
        """Go on where `state_dict` was taken; the model must have grown to that task. No begin_task() follows.

        Whose steps to listen to is not part of the state: give the optimizer to IVT(...) or `attach`. Buffers that
        fit are written in place, so a captured CUDA graph stays valid.
        """
        saved = unpack(state)
        self._look_at_model()
        check_fits(saved, self._parameters, self._kernels)
        self._cumulative = {n: self._stored(n, v, self._cumulative) for n, v in saved.cumulative.items()}
        self._anchor = {n: self._stored(n, v, self._anchor) for n, v in saved.anchor.items()}
        if not (self._in_task and saved.in_task):
            self._fisher = BatchFisher({}, self._kernels)
        self._fisher.allocate({name: self._parameters[name] for name in self._anchor})
        self._fisher.restore(saved.fisher, saved.steps.tolist())
        self._task, self._epoch = saved.task, saved.epoch
        self._in_task, self._finalized = saved.in_task, saved.epoch_finalized
        self._stepless = saved.epoch_finalized  # an epoch had ended: nothing has stepped since
        self._statistics = []

    def _stored(self, name: str, value: Tensor, present: Mapping[str, Tensor]) -> Tensor:
        """The saved value in the buffer that is there, or in a new one where it belongs."""
        parameter = self._parameters.get(name)
        near = torch.device("cpu") if parameter is None else parameter.device
        device = near if self.memory == "device" else torch.device("cpu")
        buffer = present.get(name)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (value.shape, value.dtype, device):
            return self._placed(value.to(device, copy=True), near)
        return buffer.copy_(value)
