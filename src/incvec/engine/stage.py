"""One stage's training: a step as a function of device tensors, run eagerly or replayed as a CUDA graph.

The step reads everything from pre-allocated tensors (the epoch's order, a cursor, the learning rates) and
writes everything into such (weights, optimizer state, Fisher sums, the history of loss terms), so that an
epoch is queued without a host synchronization and its history is read once, after the next one is queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from incvec.contracts import AddOn, Method, Stage, World
from incvec.data import Streamed
from incvec.engine.distributed import SINGLE_PROCESS, Ranks
from incvec.errors import ConfigError, TrainingError
from incvec.ivt.fisher import BatchFisher

TICK = 16  # steps queued before other runs get a turn
PROBE_BYTES = 1 << 28  # of images at most, as float32 at the stored size, or one batch: two of 128 at 256 x 256


def select_parameters(stage: Stage, method: Method, addons: Sequence[AddOn]) -> list[dict[str, nn.Parameter]]:
    """The parameters of each group, by name; each parameter belongs to the first group that owns it."""
    named = dict(method.named_parameters())
    for addon in addons:
        named |= {f"addons.{addon.name}.{name}": parameter for name, parameter in addon.parameters()}
    named = {name: p for name, p in named.items() if not name.startswith("teacher.")}
    chosen: set[str] = set()
    groups = []
    for group in stage.groups:
        own = {name: p for name, p in named.items() if name not in chosen and group.owns(name)}
        chosen |= set(own)
        groups.append(own)
    if stage.groups and not chosen:
        raise ConfigError(f"stage {stage.name!r} of {method.name} trains nothing: no parameter has its prefixes.")
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
    return groups


def check_rates(stages: Iterable[Stage], method: str) -> None:
    """A rate is a 32-bit number on the device: one that is larger is told before anything is trained."""
    for stage in stages:
        for group in stage.groups:
            if group.lr > torch.finfo(torch.float32).max:
                raise ConfigError(
                    f"a learning rate of {group.lr:g} (stage {stage.name!r} of {method}) is more than a 32-bit number "
                    "can hold; choose a smaller one."
                )


def make_optimizer(stage: Stage, groups: list[dict[str, nn.Parameter]], device: torch.device) -> torch.optim.Optimizer:
    """A torch optimizer whose state exists from the start and whose rates are tensors, so a graph can hold it."""
    settings = stage.optimizer
    assert settings is not None
    lists = [
        {
            "params": list(own.values()),
            "lr": torch.tensor(group.lr, device=device),
            "weight_decay": group.weight_decay,
        }
        for group, own in zip(stage.groups, groups, strict=True)
        if own
    ]
    optimizer: torch.optim.Optimizer
    if settings.kind == "sgd":
        optimizer = torch.optim.SGD(
            lists, lr=torch.tensor(0.0, device=device), momentum=settings.momentum,
            nesterov=settings.nesterov, fused=True,
        )  # fmt: skip
    else:
        kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
        rate = torch.tensor(0.0, device=device)
        optimizer = kind(
            lists, lr=rate, betas=settings.betas, eps=settings.eps, fused=True, capturable=device.type == "cuda"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if settings.kind == "sgd":
                if settings.momentum:
                    state["momentum_buffer"] = zeros
            else:
                state["step"] = torch.zeros((), device=device)
                state["exp_avg"], state["exp_avg_sq"] = zeros, zeros.clone()
    return optimizer


class StageLoop:
    """Trains one stage on the given rows; `epoch()` queues one epoch's work and yields now and then."""

    def __init__(
        self,
        method: Method,
        addons: Sequence[AddOn],
        world: World,
        stage: Stage,
        rows: Tensor,
        views_generator: torch.Generator,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.method, self.addons, self.world, self.stage = method, addons, world, stage
        self.ranks = ranks
        # A measuring pass sums up what it sees, in places of its own: every rank makes the whole of it.
        self.sharded = stage.optimizer is not None and ranks.size > 1
        self.rows = rows
        self.batch = min(stage.batch_size, len(rows))
        if self.sharded:
            self.batch -= self.batch % ranks.size
        self.steps = len(rows) // self.batch if self.batch else 0
        if self.steps == 0:
            few = f" (each of {ranks.size} ranks needs one; there are {len(rows)})" if self.sharded else ""
            raise ConfigError(f"stage {stage.name!r} of {method.name} has no rows to train on{few}.")
        self.views_generator = views_generator
        self.fisher: BatchFisher | None = None
        device = world.device
        self.groups = select_parameters(stage, method, addons)
        self.parameters = {name: p for own in self.groups for name, p in own.items()}
        self.optimizer = make_optimizer(stage, self.groups, device) if stage.optimizer else None
        self.base_rates = [group.lr for group, own in zip(stage.groups, self.groups, strict=True) if own]
        self.factors = stage.schedule.factors(stage.epochs, self.steps)
        self.rates = self.factors[: self.steps].to(device)
        self.order = rows[: self.steps * self.batch].clone()
        source = world.sources[stage.source]
        self.streamed = source if isinstance(source, Streamed) else None
        self.fetch = source.fetch if self.streamed is None else self.streamed.staged
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.rank_indices = torch.arange(self.batch, device=device)
        if self.sharded:
            self.rank_indices = self.rank_indices[ranks.slice(self.batch)]
        self.terms: list[str] = []
        self.history = torch.zeros(0, device=device)
        self.loss: Callable[..., Mapping[str, Tensor]] = stage.loss or method.loss
        self.replay: Callable[[], None] | None = None
        self.probed = False  # since the engine last asked
        self.synchronized = False  # BatchNorm over the ranks

    # The step -------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Fetch, forward, backward, transform, add-ons, optimizer: static tensor code throughout."""
        rows = self.order.index_select(0, self.cursor * self.batch + self.rank_indices)
        batch = self.fetch(rows, self.views_generator, self.stage.views)
        with torch.set_grad_enabled(bool(self.parameters)), self.world.autocast():
            terms = self.loss(batch)
            total = torch.stack([term.float() for term in terms.values()]).sum()
        self._note(terms)
        if self.parameters:
            parameters = list(self.parameters.values())
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
            self._check_reached(gradients)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None and gradient.stride() != parameter.stride():
                    gradient = torch.empty_like(parameter).copy_(gradient)  # fused optimizers want one layout
                parameter.grad = gradient
            self.ranks.reduce_gradients(parameters)
            self.method.gradients(self.parameters)
            if self.fisher is not None:
                self.fisher.accumulate(self.parameters.items())  # zeroed as each epoch begins
            for addon in self.addons:
                addon.gradients(self.stage, self.parameters)
            if self.optimizer is not None:
                if self.stage.schedule.by == "step":
                    self._set_rates(self.rates.index_select(0, self.cursor[None]))
                self.optimizer.step()
            for parameter in parameters:
                parameter.grad = None
        self.cursor += 1

    def _check_reached(self, gradients: Sequence[Tensor | None]) -> None:
        """A parameter that no loss reaches may be meant so; a whole network that none reaches is a fault."""
        network = [g is None for name, g in zip(self.parameters, gradients, strict=True) if ".backbone." in name]
        if network and all(network):
            raise TrainingError(
                f"stage {self.stage.name!r} of {self.method.name} trains {len(network)} tensors of the backbone, but "
                "its loss reaches none of them: a fault of the method or the engine. --engine eager may get round it."
            )

    def _note(self, terms: Mapping[str, Tensor]) -> None:
        if not self.terms:
            self.terms = list(terms)
            self.history = torch.zeros(self.steps, len(terms), device=self.world.device)
        row = torch.stack([term.detach().float() for term in terms.values()])
        self.history.index_copy_(0, self.cursor[None], row[None])

    def _set_rates(self, factor: Tensor) -> None:
        assert self.optimizer is not None
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"].copy_((factor * base).squeeze())

    # Epochs ---------------------------------------------------------------------------------------------

    def prepare(self, epoch: int, shuffle: torch.Generator) -> None:
        """Lay out the epoch's order and rates; `epoch` counts from 0."""
        shuffled = torch.randperm(len(self.rows), generator=shuffle, device=self.rows.device)
        self.order.copy_(self.rows[shuffled[: len(self.order)]])
        self.cursor.zero_()
        if self.streamed is not None:
            self.streamed.ahead(self.order.view(self.steps, self.batch)[:, self.rank_indices])
        factors = self.factors[epoch * self.steps : (epoch + 1) * self.steps]
        if self.stage.schedule.by == "step":
            self.rates.copy_(factors)
        elif self.optimizer is not None:
            for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
                group["lr"].fill_(float(factors[0]) * base)

    def epoch(self) -> Iterator[None]:
        """Queue the epoch's steps."""
        run = self.replay or self.step
        for number in range(self.steps):
            if self.streamed is not None:
                self.streamed.next()
            run()
            if number % TICK == TICK - 1:
                yield None

    @torch.no_grad()
    def probe(self, batches: int) -> None:
        """See `World.probe`. An epoch begins by seeding its own draws. In full precision, since weights come of it."""
        source, views = self.world.sources[self.stage.source], torch.Generator(self.world.device)
        views.manual_seed(0)
        self.world.generator.manual_seed(0)
        self.probed = True
        self.ranks.set_norms(self.method, False)  # each rank has the whole batch
        try:
            most = PROBE_BYTES // (4 * math.prod(source.row) * self.batch)
            self.loss(source.fetch(self.order[: max(1, min(batches, most)) * self.batch], views, self.stage.views))
        finally:
            self.ranks.set_norms(self.method, self.synchronized)

    def set_mode(self, synchronized: bool = True) -> None:
        """Train mode as the stage asks for it; BatchNorm over all ranks where each has but a part of the batch."""
        self.method.train()
        self.synchronized = synchronized and self.sharded
        self.ranks.set_norms(self.method, self.synchronized)
        if self.stage.batchnorm == "frozen":
            for module in self.method.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    # State ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors by parameter name, and the rows."""
        found = {"rows": self.rows}
        if self.optimizer is not None:
            for name, parameter in self.parameters.items():
                for key, value in self.optimizer.state[parameter].items():
                    found[f"optimizer/{name}/{key}"] = value
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])
