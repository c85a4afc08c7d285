"""Anchor, Fisher sums and teleport of one model: what the plug-in, the lab and the adapters share.

`Core` knows nothing of schedules, hooks and optimizers; `IVT` in plugin.py adds those. F and Fbar are stored times 2^64
(see fisher.py); `past_fisher` and `new_fisher` return them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .batchnorm import (
    STATISTICS,
    NormMap,
    Observed,
    Probe,
    as_map,
    batchnorm_layers,
    fold,
    observe,
    running_statistics,
    teleported,
    unfold,
    write_maps,
)
from .fisher import EXPONENT, BatchFisher, Structure, capturing, check_fisher
from .names import Past, clean, continued, fisher_shape, float_parameters, grown, kernel_names, state_dtype
from .state import State, check_fits, pack, unpack
from .statistics import overall
from .transform import block_teleport_, pull, teleport_

Memory = Literal["device", "host"]
BatchNormChoice = Literal["keep", "layer", "recalibrate"]


class Core:
    """The tensors of IVT by parameter name, and what is done with them. Calls are those of `IVT`, without checks."""

    def __init__(
        self, model: nn.Module, structure: Structure = "diagonal", memory: Memory = "device", layers: bool = False
    ) -> None:
        self.model = model
        self.structure = structure
        self.memory = memory
        self.layers = layers  # whether BatchNorm layers are teleported with the layers before them
        self.parameters: dict[str, nn.Parameter] = {}
        self.names: dict[int, str] = {}  # by identity of the parameter
        self.kernels: frozenset[str] = frozenset()
        self.anchor: dict[str, Tensor] = {}
        self.cumulative: dict[str, Tensor] = {}  # Fbar of the tasks that ended, times 2^64
        self.buffers: dict[str, Tensor] = {}  # BatchNorm's running statistics at the anchor
        self.fisher = BatchFisher({})
        self.finalized = False  # F holds means of an epoch, no longer sums
        self.statistics: list[tuple[str, int, Tensor]] = []  # of the last teleport
        self.teleports: list[tuple[int, int, Tensor]] = []  # of the task: epoch, number of elements, `overall`
        self._before: dict[str, Tensor] | None = None  # Fbar under the names and shapes before `begin`

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has parameters of its own. Its model may be incomplete yet, if the model has this object inside."""
        self.__dict__.update(state)
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}

    def read_parameters(self) -> None:
        """Take the model's parameters as they are now."""
        self.parameters = float_parameters(self.model)
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.kernels = kernel_names(self.model) if self.structure == "kernel" else frozenset()

    # Tasks and steps --------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, trained: Mapping[str, Tensor], past: Past | None = None, left_alone: Collection[str] = ()
    ) -> list[str]:
        """Anchor the trained parameters, and give Fbar their present names and shapes.

        A tensor that is left alone may have any shape: if its past does not fit, it is dropped. Returns the names of
        earlier tasks that the model no longer has and `past` does not use.
        """
        before, past = self.cumulative, past or {}
        cumulative = {}
        for name, old in continued(before, self.parameters, past).items():
            parameter = self.parameters[name]
            try:
                fitting = grown(name, old, parameter, name in self.kernels)
            except ValueError:
                if name in left_alone:
                    continue
                raise
            cumulative[name] = self._placed(fitting, parameter.device)
        self._before, self.cumulative = before, cumulative
        self.anchor = {}
        self.teleports = []
        self.fisher = BatchFisher({}, self.kernels)
        self.admit(trained)
        self.buffers = {}
        if self.layers:
            self.buffers = {name: buffer.clone() for name, buffer in running_statistics(self.model).items()}
        self.finalized = False
        used = {name for value in past.values() for name in ([value] if isinstance(value, str) else value or ())}
        return [name for name in before if name not in self.parameters and name not in used]

    def admit(self, parameters: Mapping[str, Tensor]) -> None:
        """Anchor further parameters at their present values."""
        self.fisher.allocate(parameters)
        for name, parameter in parameters.items():
            value = parameter.detach()
            self.anchor[name] = self._placed(value.to(state_dtype(value), copy=True), value.device)

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
        """Set the epoch's sums to zero."""
        self.fisher.zero_()
        self.finalized = False

    def finalize(self) -> None:
        """Turn the epoch's sums into F_t, unless that has been done."""
        if not self.finalized:
            self.fisher.mean_()
            self.finalized = True

    @torch.no_grad()
    def accumulate(
        self,
        gradients: Iterable[tuple[Tensor, Tensor | None]] | None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Add the squares of gradients to F and count one step.

        gradients: pairs of a parameter and its gradient, by default the `.grad` of all of the task's parameters.
        Parameters of other models are ignored, and one given twice counts once. One that was frozen when the task began
        is added with its present value as its anchor.

        Capturable in a CUDA graph after one call outside it with the same parameters: in-place operations on
        existing buffers, no synchronization. grad_scale, found_inf: see `BatchFisher.accumulate`.
        """
        if self.finalized:
            if any(capturing(total) for total in self.fisher.sums.values()):
                raise RuntimeError("call begin_epoch() before capturing, or every replay would zero the sums")
            self.begin_epoch()
        if gradients is None:
            parameters = [self.parameters[name] for name in self.anchor]
            gradients = ((parameter, parameter.grad) for parameter in parameters)
        named: dict[str, Tensor | None] = {}
        for parameter, gradient in gradients:
            name = self.names.get(id(parameter))
            if name is None:
                continue
            if name not in self.anchor and gradient is not None:
                self.admit({name: parameter})
            named[name] = gradient
        try:
            self.fisher.accumulate(named.items(), grad_scale=grad_scale, found_inf=found_inf)
        except RuntimeError as error:
            for name, gradient in named.items():
                if gradient is not None and gradient.device != self.fisher.sums[name].device:
                    raise RuntimeError(
                        f"parameter {name!r} was on {self.fisher.sums[name].device} when the task began and is on "
                        f"{gradient.device} now: move the model first, then call begin_task()"
                    ) from error
            raise

    @torch.no_grad()
    def set_fisher(self, fisher: Mapping[str, Tensor]) -> None:
        """Set F_t, for example from a saved base model, as the mean of an epoch that just ended."""
        unknown = sorted(set(fisher) - set(self.parameters))
        if unknown:
            raise KeyError(f"the model has no parameters {unknown[:5]}; its names are {list(self.parameters)[:5]}, ...")
        for name, value in fisher.items():
            shape = fisher_shape(self.parameters[name], name in self.kernels)
            if value.shape != shape:
                raise ValueError(f"F of {name!r} must have shape {tuple(shape)}, got {tuple(value.shape)}")
            check_fisher(name, value, name in self.kernels)
        self.admit({name: self.parameters[name] for name in fisher if name not in self.anchor})
        self.fisher.restore({name: value * 2.0**EXPONENT for name, value in fisher.items()}, [1.0] * len(fisher))
        self.finalized = True

    @torch.no_grad()
    def end(self) -> int:
        """Fbar_t = Fbar_{t-1} + F_t. Returns how many weights have no F, since it is not finite. Synchronizes."""
        self.finalize()
        unknown = []
        for name in self.fisher.seen:
            fresh, past = self.fisher.sums[name], self.cumulative.get(name)
            finite = torch.isfinite(fresh)
            unknown.append(fresh.numel() - finite.sum())
            fresh = torch.where(finite, fresh, 0.0)  # a new tensor: a captured step would add to the sums themselves
            if past is None:
                self.cumulative[name] = self._placed(fresh, fresh.device)
            else:
                past.add_(fresh.to(past.device))
        self.leave()
        return int(sum(count.cpu() for count in unknown))

    def leave(self) -> None:
        """Drop what belongs to the task."""
        self.anchor = {}
        self.buffers = {}
        self.fisher = BatchFisher({})
        self.finalized = False
        self._before = None

    def abandon(self) -> None:
        """Drop the task; Fbar is what it was before `begin`."""
        if self._before is not None:
            self.cumulative = self._before
        self.leave()

    # Teleport ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def teleport(self, excluded: Collection[str] = (), probe: Probe | None = None, epoch: int = 0) -> list[str]:
        """theta <- anchor + S (theta - anchor), in place, by this epoch's F_t. Returns the names that moved.

        Statistics of the teleport stay on the device.

        excluded: names that are not teleported; their F is collected all the same.
        probe: runs the network in the mode it is trained in, on the images that define the maps of BatchNorm layers.
        """
        self.finalize()
        current = float_parameters(self.model)
        # In the model's order: that of a loaded state may differ, and sums of statistics depend on it.
        known = [name for name in current if name in self.cumulative and name in self.fisher.seen]
        names = [name for name in known if name not in excluded]
        for name in names:
            if current[name].shape != self.anchor[name].shape:
                raise RuntimeError(
                    f"parameter {name!r} has shape {tuple(current[name].shape)}, but was anchored with "
                    f"{tuple(self.anchor[name].shape)}: grow the model before begin_task(), not after"
                )
        values: dict[str, Tensor] = {name: current[name] for name in names}
        anchors = {name: self.anchor[name] for name in names}
        write: Callable[[], None] | None = None
        if self.layers and probe is not None:
            write = self._fold_layers(values, anchors, probe)
        diagonal = [name for name in names if name not in self.kernels]
        rows = teleport_(
            [values[name] for name in diagonal],
            [anchors[name] for name in diagonal],
            [self.cumulative[name] for name in diagonal],
            [self.fisher.sums[name] for name in diagonal],
        )
        measured = dict(zip(diagonal, rows, strict=True))
        for name in names:
            if name in self.kernels:
                measured[name] = block_teleport_(
                    values[name], anchors[name], self.cumulative[name], self.fisher.sums[name]
                )
        if write is not None:
            write()
        self.statistics = [(name, current[name].numel(), measured[name]) for name in names]
        if names:
            elements = sum(current[name].numel() for name in names)
            self.teleports.append((epoch, elements, overall([measured[name] for name in names])))
        return names

    def _fold_layers(
        self, values: dict[str, Tensor], anchors: dict[str, Tensor], probe: Probe
    ) -> Callable[[], None] | None:
        """Replace filters before a norm by their product with its slope; returns what writes layers and norms back."""
        norms = {
            name: norm
            for name, norm in ((clean(name), norm) for name, norm in batchnorm_layers(self.model).items())
            if f"{name}.weight" in values and f"{name}.bias" in values and f"{name}.running_mean" in self.buffers
        }
        if not norms:
            return None
        seen: Observed = observe(self.model, list(norms.values()), probe)
        names = {module: clean(name) for name, module in self.model.named_modules()}
        maps: dict[Any, NormMap] = {}
        folded: dict[Any, tuple[str, Tensor, Tensor, Tensor, Tensor]] = {}
        for name, norm in norms.items():
            device = norm.weight.device
            scales = (self.scale(f"{name}.weight"), self.scale(f"{name}.bias"))
            weight, bias = (self.anchor[f"{name}.{kind}"].to(device) for kind in ("weight", "bias"))
            mean, var = (self.buffers[f"{name}.{kind}"] for kind in STATISTICS)
            old = as_map(weight, bias, mean, var, norm.eps)
            mean, var = seen.moments.get(norm, (norm.running_mean, norm.running_var))
            new = as_map(norm.weight, norm.bias, mean, var, norm.eps)
            maps[norm] = teleported(new, old, scales)
            filters = f"{names[seen.layers[norm]]}.weight" if norm in seen.layers else ""
            if filters in values:
                anchor = self.anchor[filters].to(device)
                folded[norm] = filters, anchor, new.slope, old.slope, scales[0]
                values[filters], anchors[filters] = fold(values[filters], new.slope), fold(anchor, old.slope)

        def write() -> None:
            for norm, (filters, anchor, new_slope, old_slope, scale) in folded.items():
                weight = seen.layers[norm].weight
                divided, slope = unfold(values[filters], weight, anchor, new_slope, old_slope, scale)
                weight.copy_(divided)
                maps[norm] = maps[norm]._replace(slope=slope)
            write_maps(maps, seen.moments, probe)

        return write

    def scale(self, name: str) -> Tensor:
        """S of a parameter that is teleported, in the diagonal structure."""
        new = self.fisher.sums[name]
        return 1 - pull(self.cumulative[name].to(new.device), new)

    # What others read -------------------------------------------------------------------------------------

    def past_fisher(self) -> dict[str, Tensor]:
        """Fbar of the tasks that ended, as new tensors."""
        return {name: value * 2.0**-EXPONENT for name, value in self.cumulative.items()}

    def new_fisher(self) -> dict[str, Tensor]:
        """F_t: the mean over the steps since the epoch began or, if it has ended, of that epoch; as new tensors."""
        if not self.finalized:
            return self.fisher.mean()
        return {name: self.fisher.sums[name] * 2.0**-EXPONENT for name in self.fisher.seen}

    # State ------------------------------------------------------------------------------------------------

    def state(
        self, task: int, epoch: int, in_task: bool, epochs: int | None, grown: Iterable[str] = ()
    ) -> dict[str, Tensor]:
        fisher, counts = {name: self.fisher.sums[name] for name in self.fisher.seen}, self.fisher.counts()
        teleports = self.teleports if in_task else []
        rows = [row.to(teleports[0][2].device) for *_, row in teleports]  # those of a loaded state are where it was
        return pack(
            State(
                task=task,
                epoch=epoch,
                in_task=in_task,
                epoch_finalized=self.finalized,
                epochs=-1 if epochs is None else epochs,
                anchor=self.anchor,
                cumulative=self.cumulative,
                fisher=fisher,
                buffers=self.buffers,
                grown={name: torch.ones(1) for name in grown},
                steps=torch.stack([counts[name] for name in sorted(fisher)]) if fisher else torch.zeros(0),
                teleports=torch.stack(rows) if rows else torch.zeros(0, 3),
                teleport_epochs=torch.tensor([row[:2] for row in teleports], dtype=torch.int64).view(-1, 2),
            )
        )

    @torch.no_grad()
    def load(self, packed: Mapping[str, Tensor], in_task: bool) -> State:
        """Restore what `state` returned. Buffers of the right shape are written in place."""
        saved = unpack(packed)
        self.read_parameters()
        check_fits(saved, self.parameters, self.kernels)
        self.cumulative = {n: self._stored(n, v, self.cumulative) for n, v in saved.cumulative.items()}
        self.anchor = {n: self._stored(n, v, self.anchor) for n, v in saved.anchor.items()}
        live = running_statistics(self.model)
        self.buffers = {n: v.to(live.get(n, v), copy=True) for n, v in saved.buffers.items()}
        if not (in_task and saved.in_task):
            self.fisher = BatchFisher({}, self.kernels)
        self.fisher.allocate({name: self.parameters[name] for name in self.anchor})
        self.fisher.restore(saved.fisher, saved.steps.tolist())
        self.finalized = saved.epoch_finalized
        self.statistics = []
        epochs: list[list[int]] = saved.teleport_epochs.tolist()
        rows = saved.teleports.clone().unbind()
        self.teleports = [(epoch, elements, row) for (epoch, elements), row in zip(epochs, rows, strict=True)]
        self._before = None
        return saved

    def _stored(self, name: str, value: Tensor, present: Mapping[str, Tensor]) -> Tensor:
        """The saved value, in the existing buffer if it fits, else in a new one."""
        parameter = self.parameters.get(name)
        near = torch.device("cpu") if parameter is None else parameter.device
        device = near if self.memory == "device" else torch.device("cpu")
        buffer = present.get(name)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (value.shape, value.dtype, device):
            return self._placed(value.to(device, copy=True), near)
        return buffer.copy_(value)
