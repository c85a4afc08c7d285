"""The plug-in: options, schedule, listening and state of Increment Vector Transformation.

    ivt = IVT(model, interval=10, exclude=["head"], batchnorm="layer")
    for task in tasks:
        ...                                      # grow the model, make this task's optimizer
        ivt.begin_task(optimizer, epochs=160)    # anchor <- theta
        for epoch in range(160):
            for batch in loader: ...             # forward, backward, optimizer.step()
            ivt.end_epoch()                      # F_t; every interval-th epoch: theta <- anchor + S (theta - anchor)
        ivt.end_task()                           # Fbar_t = Fbar_{t-1} + F_t

Memory: the anchor, Fbar and F, three times the trained parameters in float32 (CLIP ViT-B/16 with its 150 million
parameters: 3 x 0.6 GB). With memory="host" the anchor and Fbar are in host memory, and only F is on the device. A step
adds squares to F in place. Steps, ends of epochs and diagonal teleports never synchronize with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import names
from .batchnorm import Probe, batchnorm_layers
from .checks import Endings, check_parameters, warn_about_batchnorm, warn_about_gone, warn_about_left_out
from .core import BatchNormChoice, Core, Memory
from .fisher import Structure, check_choice
from .inputs import Inputs
from .listening import Listener, Watched, refuse_lbfgs
from .names import Excluded, Past, exclusions, float_parameters, unwrap
from .optimizer_state import reset_state
from .processes import gradients_of, measured_fisher
from .schedule import FisherLoss, Last, Schedule, check_epochs
from .statistics import ReportRow, TeleportRow, report_rows, teleport_rows

OptimizerState = Literal["keep", "reset"]
T = TypeVar("T")


class IVT(Schedule):
    """Increment Vector Transformation (https://arxiv.org/abs/2509.21898) for any training loop.

    The defaults are those that our study recommends; `IVT.verbatim` is Algorithm 1 as the paper writes it.

    Args:
        model: the module to teleport. Parameters are identified by name; compiled, DP and DDP wrappers are unwrapped.
        interval: epochs between teleports. None: only when `teleport()` is called.
        exclude: what is never teleported: prefixes of parameter names ("fc" or "fc."), predicates of a name and a
            parameter, or modules (of one that is replaced when the model grows, give the name). None: tensors that have
            grown since an earlier task, the classifier in most networks. One that has all its rows from the start does
            not grow: name it.
        last: "skip" omits the teleport after a task's last epoch, so that training ends with trained weights; it needs
            begin_task(epochs=...). "teleport" keeps it.
        batchnorm: "keep" teleports weights and biases of BatchNorm layers like all others. "layer" teleports a
            convolution and the norm after it together, as one map (for methods that train on new classes only).
            "recalibrate" re-estimates the running statistics when the task ends (for structure="kernel"). None: "keep",
            with a warning if the model has BatchNorm layers.
        fisher_loss: "whole" takes F_t from the gradients that the optimizer sees. "own" takes it from the loss given to
            `collect`, the new task's own, without distillation, which represents the old tasks.
        structure: "diagonal", or "kernel" for one block per convolution kernel slice. F and Fbar then have k² numbers
            per weight of a k x k kernel, and a teleport solves one system of k² equations per slice.
        optimizer_state: "keep", or "reset" to give teleported parameters a fresh state at each teleport.
        memory: "device" stores the anchor and Fbar on the parameters' device. "host" stores them in host memory (pinned
            if the parameters are on a GPU), and a teleport streams them in pieces. The result is the same bit for bit;
            begin_task() and end_task() then synchronize with the device.
        probe: for batchnorm="layer": runs the model, in train mode, on the inputs that define the maps, the same ones
            at each call and in each process. None: the inputs of its last calls (up to 4 batches) are remembered and
            used again.

    If torch.distributed has several processes, they train the model together: batchnorm="layer" and "recalibrate" take
    the inputs of the first one, and `collect` averages over all. Every process then has to make the same calls: if one
    leaves out a `collect`, an `end_epoch` or an `end_task`, the others wait. These are the processes of the DDP wrapper
    that IVT was given; without a wrapper, all of them. IVT may be given the module or any of its wrappers, and it stays
    valid if you make a new DDP wrapper after the model has grown.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        interval: int | None = 10,
        exclude: Iterable[Excluded] | Excluded | None = None,
        last: Last = "skip",
        batchnorm: BatchNormChoice | None = None,
        fisher_loss: FisherLoss = "whole",
        structure: Structure = "diagonal",
        optimizer_state: OptimizerState = "keep",
        memory: Memory = "device",
        probe: Probe | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if probe is not None and not callable(probe):
            raise TypeError(f"probe: expected a function without arguments, got {type(probe).__name__}")
        if batchnorm is not None:
            check_choice("batchnorm", batchnorm, BatchNormChoice)
        check_choice("structure", structure, Structure)
        check_choice("optimizer_state", optimizer_state, OptimizerState)
        check_choice("memory", memory, Memory)
        super().__init__(interval, last, fisher_loss)
        self.exclude = None if exclude is None else exclusions(exclude)
        self.batchnorm: BatchNormChoice = batchnorm or "keep"
        self.structure = structure
        self.optimizer_state = optimizer_state
        self.memory = memory
        self.probe = probe
        self.model = model
        self.core = Core(unwrap(model), structure, memory, layers=batchnorm == "layer")
        self._listener = Listener(self)
        self._inputs = Inputs(model, probe, self._warn)
        self._grown: set[str] = set()  # tensors that have grown since an earlier task
        self._endings = Endings()
        if batchnorm is None:
            warn_about_batchnorm(unwrap(model), self._warn)

    @classmethod
    def verbatim(cls, model: nn.Module, interval: int | None = 10, **options: Any) -> IVT:
        """Algorithm 1 as the paper writes it: every parameter, also after the last epoch, BatchNorm like the others."""
        return cls(model, **{"interval": interval, "exclude": (), "last": "teleport", "batchnorm": "keep", **options})

    def __repr__(self) -> str:
        options = {name: getattr(self, name) for name in ("interval", "last", "batchnorm")}
        if self.exclude is not None:
            options["exclude"] = [item if isinstance(item, str) else type(item).__name__ for item in self.exclude]
        usual = {"fisher_loss": "whole", "structure": "diagonal", "optimizer_state": "keep"}
        options |= {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"<IVT of {type(unwrap(self.model)).__name__}: {self._place()}; {text}>"

    @property
    def anchor(self) -> Mapping[str, Tensor]:
        """The parameters the task began with, by name; empty between tasks."""
        return self.core.anchor

    @property
    def cumulative(self) -> Mapping[str, Tensor]:
        """Fbar of the tasks ended so far, by name, as new tensors."""
        return self.core.past_fisher()

    @property
    def fisher(self) -> Mapping[str, Tensor]:
        """F_t as a teleport would use it now, by name, as new tensors.

        The mean over the steps since the last `end_epoch`; if there were none yet, over those before it.
        """
        return self.core.new_fisher()

    # Algorithm 1, call by call

    def begin_task(
        self,
        optimizer: Any = None,
        *,
        epochs: int | None = None,
        past: Past | None = None,
    ) -> None:
        """Anchor the parameters at their present values. Call it after the model has grown and been initialized.

        optimizer: this task's optimizer or optimizers. F covers the parameters in their groups and no others. Each step
        adds one square per parameter, of the gradient that the optimizer sees (after clipping, accumulation and
        all-reduce, unscaled, without weight decay). Without any, all parameters that require gradients are trained by
        the task, and `watch` or a host's adapter counts the steps.

        epochs: of this task. Needed for last="skip", and by `collecting`.

        past: for heads that are replaced, merged or renamed: for the name of a tensor, the name of the earlier tensor
        whose rows it continues, several names whose rows follow each other, or None for a tensor without a past. By
        default a tensor continues the one of its own name; new parameters and rows added to dimension 0 have no past.
        """
        self._require_no_task()
        epochs = check_epochs("epochs", epochs, "if unknown")
        optimizers = self._optimizers(optimizer)
        if self.optimizer_state == "reset" and not optimizers:
            raise ValueError("optimizer_state='reset' needs to know the optimizer: begin_task(optimizer)")
        core, left_alone = self.core, self._left_alone()
        names.check_supported(core.model, left_alone)
        core.read_parameters()
        trained = names.trained(core.parameters, optimizers or None)
        if not trained:
            raise ValueError(
                "no parameter of the model requires gradients and is in the groups of the optimizer; "
                "was the optimizer made for another model, or copied together with one?"
            )
        self._endings.warn_about_new(core, {*(past or {}), *left_alone}, self._warn)
        rows = {name: len(value) for name, value in core.cumulative.items() if value.dim()}
        gone = core.begin(trained, past, left_alone)
        self._grown |= {
            name for name, count in rows.items() if name in core.cumulative and count < len(core.cumulative[name])
        }
        for counted in [trained, *(names.trained(core.parameters, [known]) for known in optimizers)]:
            if counted:
                core.fisher.counter(counted)
        self._task += 1
        self._epoch, self.epochs = 0, epochs
        self._in_task = True
        self._seen = self._copied = False
        self._listener.attach(optimizers)
        self._remember_inputs()
        warn_about_gone(gone, self._warn)
        if optimizers:
            warn_about_left_out(core, optimizers, self._task, self._warn)
        self._warn_about_schedule()

    def _left_alone(self) -> frozenset[str]:
        """Names that are not teleported."""
        return frozenset(self._grown) if self.exclude is None else names.excluded_names(self.core.model, self.exclude)

    def begin_epoch(self, epoch: int | None = None) -> None:
        """Set the epoch's sums to zero. Optional: the first step after `end_epoch` does the same.

        A host that replays a captured CUDA graph runs no Python in its steps, so it calls this before each
        epoch. Calling it again before a step changes nothing. A host that counts its epochs itself gives the number,
        from 1.
        """
        self._require_task("begin_epoch()")
        if epoch is not None:
            self._epoch = epoch - 1
        if self.collecting:
            self.core.begin_epoch()
        self._seen = True

    def collect(self, loss: Tensor) -> None:
        """With fisher_loss="own": add the squared gradients of the new task's own loss, a scalar.

        Call it before `backward()`, once per step, while `collecting` is True; in other epochs it does nothing. It runs
        one backward pass through this loss alone, keeps the graph for yours, and leaves `.grad` as it is. With several
        processes the gradients are averaged over them, and each of them has to call it.
        """
        self._require_task("collect()")
        if self.fisher_loss != "own":
            raise RuntimeError('collect() is for IVT(fisher_loss="own"); F comes from the optimizer\'s steps otherwise')
        if not self.collecting:
            return
        parameters = [p for p in (self.core.parameters[name] for name in self.core.anchor) if p.requires_grad]
        gradients = gradients_of(self.model, loss, parameters)
        if all(gradient is None for gradient in gradients):
            raise ValueError("collect(): the loss depends on no parameter of this task; is it of another model?")
        self.core.accumulate(zip(parameters, gradients, strict=True))
        self._seen = True

    def end_epoch(self) -> bool:
        """Finish F_t of this epoch; teleport at every interval-th epoch of tasks 2, 3, ... Returns whether it did."""
        self._require_task("end_epoch()")
        collecting = self.collecting
        self._check_epoch()
        if self._seen:
            self._inputs.check()
        check_parameters(self.core, self._task, self._warn)
        if collecting:
            self.core.finalize()
        self._seen = False
        self._epoch += 1
        return self.teleport() if self.teleports_after(self._epoch) else False

    @torch.no_grad()
    def teleport(self) -> bool:
        """theta <- anchor + S (theta - anchor), in place, with this epoch's F_t. Returns whether it moved any tensor.

        Called by the schedule or by the user. In the middle of an epoch it finalizes the epoch's sums, and the next
        step starts new ones. In the first task Fbar_0 = 0, hence S = 1, and nothing is done.
        """
        self._require_task("teleport()")
        self._check_fisher()
        layers = self.core.layers and self._task > 1 and bool(batchnorm_layers(self.core.model))
        with self._inputs.probing() if layers else nullcontext() as probe:
            moved = self.core.teleport(self._left_alone(), probe, self._epoch)
        if moved and layers:
            self._inputs.share()
        if self.optimizer_state == "reset":
            current = float_parameters(self.core.model)
            reset_state(self._listener.optimizers, [current[name] for name in moved])
        return bool(moved)

    @torch.no_grad()
    def end_task(self) -> None:
        """Fbar_t = Fbar_{t-1} + F_t. Synchronizes with the device, to check that there were steps."""
        self._require_task("end_task()")
        check_parameters(self.core, self._task, self._warn)
        self._check_steps()
        if self.batchnorm == "recalibrate" and batchnorm_layers(self.core.model):
            self._inputs.recalibrate()
        self._end()

    def _end(self) -> None:
        self._endings.record(self.core.parameters)
        self._warn_about_unknown(self.core.end())
        self._leave()

    def _leave(self) -> None:
        self._listener.detach()
        self._inputs.forget()
        self._in_task = self._seen = self._copied = False

    def abandon_task(self) -> None:
        """Discard the current task, for example after an exception: Fbar and `task` are as before begin_task().

        The model keeps the weights it has. If the task was loaded from a state, Fbar keeps the names that `past` gave.
        """
        if not self._in_task:
            raise RuntimeError("abandon_task() outside a task: there is nothing to abandon")
        self.core.abandon()
        self._task -= 1
        self._leave()

    def begin_with(self, batches: Iterable[T], loss: Callable[[T], Tensor]) -> None:
        """For a model that was trained elsewhere: measure F on samples of its classes. Counts as task 1.

        loss: the scalar loss of one batch, computed with the model as it is (in the mode it is in).
        """
        if self._in_task or self._task:
            raise RuntimeError("begin_with() comes before the first begin_task()")
        names.check_supported(self.core.model, self._left_alone())
        self.core.read_parameters()
        trained = names.trained(self.core.parameters)
        fisher = measured_fisher(self.model, trained, self.core.kernels, (loss(batch) for batch in batches))
        self.core.begin(trained)
        self.core.fisher = fisher
        self._task += 1
        self._end()

    # Listening

    def attach(self, *optimizers: Any) -> None:
        """Count the steps of these optimizers, given as in begin_task(), and of no others, from now to the task's end.

        For a task that continues from a loaded state, or whose optimizer was replaced.
        """
        if not self._in_task:
            raise RuntimeError("attach() outside a task: give the optimizer to begin_task(optimizer)")
        self._copied = False
        self._listener.attach(self._optimizers(*optimizers))
        self._remember_inputs()

    def _optimizers(self, *given: Any) -> tuple[Optimizer, ...]:
        optimizers = tuple(each for one in given for each in names.optimizers_of(one))
        if self.fisher_loss == "whole":
            refuse_lbfgs(optimizers)
        return optimizers

    def _remember_inputs(self) -> None:
        if self.batchnorm != "keep" and batchnorm_layers(self.core.model):
            self._inputs.remember()

    def watch(self, loader: Iterable[T]) -> Watched[T]:
        """Iterate over an epoch's batches: `for batch in ivt.watch(loader)`.

        Counts the steps of whatever optimizer trains the model within the loop, and calls `end_epoch` when the loader
        is exhausted. For hosts that have no epoch hooks, or create the optimizer after the task has begun. A loop that
        is left early (`break`, an exception) does not end the epoch.
        """
        self._require_task("watch()")
        return Watched(self, loader)

    def detach(self) -> None:
        """Stop listening and remove every hook. `attach` listens again."""
        self._listener.detach()
        self._inputs.forget()

    # Report, state and copies

    def report(self) -> list[ReportRow]:
        """Statistics of the last teleport, one row per tensor. Synchronizes with the device."""
        return report_rows(self.core.statistics)

    def teleports(self) -> list[TeleportRow]:
        """One row per teleport of this task, or of the last one between tasks. Synchronizes with the device."""
        return teleport_rows(self.core.teleports)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to resume, as a flat mapping of contiguous copies; see `incvec.ivt.state`."""
        return self.core.state(
            self._task, self._epoch, self._in_task, self.epochs if self._in_task else None, self._grown
        )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a `state_dict`.

        Within a task, grow the model to that task first, and call `attach(optimizer)` in place of begin_task(). Between
        tasks, continue with begin_task(). Buffers of the right shape are written in place, so a captured CUDA graph
        stays valid.
        """
        saved = self.core.load(state, self._in_task)
        self._task, self._epoch = saved.task, saved.epoch
        self.epochs = None if saved.epochs < 0 else saved.epochs
        self._in_task = saved.in_task
        self._grown = set(saved.grown)
        self._seen = not saved.epoch_finalized and any(saved.steps.tolist())
        self._endings = Endings()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out optimizers and hooks; a copy made within a task has to `attach` one."""
        return {**self.__dict__, "_listener": None, "_inputs": None, "_copied": self._in_task}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._listener = Listener(self)
        self._inputs = Inputs(self.model, self.probe, self._warn)
