"""One stage's training step: a function of device tensors, run eagerly or replayed as a CUDA graph.

The step reads from pre-allocated tensors (the epoch's order, a cursor, the learning rates) and writes to pre-allocated
tensors (weights, optimizer state, Fisher sums, the history of loss terms). So an epoch is queued without host
synchronization, and its history is read once, after the next epoch has been queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from incvec.atomic_files import check_fits
from incvec.contracts import AddOn, Method, Stage, Task, World
from incvec.data import Streamed
from incvec.engine.distributed import SINGLE_PROCESS, Distributed
from incvec.engine.optimizer import make_optimizer, select_parameters
from incvec.errors import ConfigError, TrainingError
from incvec.ivt.fisher import BatchFisher

LAST_BATCH_ROLES = ("main", "balance", "path")  # alignment draws its features, measuring passes weight steps equally
MIN_LAST_ROWS = 2  # per process: BatchNorm has no variance of a single image
PROBE_BYTES = 1 << 28  # limit for the images of a probe, as float32 at the stored size; at least one batch is used


class StageLoop:
    """Steps and epochs of one stage on the given rows, and their state.

    `collect_fisher` accumulates the diagonal batch Fisher of each epoch in `fisher`. With `keep_last` the rows that do
    not fill a batch are one more step, `last_step`, in the stages that train on images. Rows that the processes cannot
    share equally are dropped, and all of them if a process would have fewer than `MIN_LAST_ROWS`.
    """

    def __init__(
        self,
        method: Method,
        addons: Sequence[AddOn],
        world: World,
        stage: Stage,
        rows: Tensor,
        distributed: Distributed = SINGLE_PROCESS,
        collect_fisher: bool = False,
        keep_last: bool = False,
    ) -> None:
        self.method, self.addons, self.world, self.stage, self.rows = method, addons, world, stage, rows
        self.distributed = distributed
        # A measuring pass accumulates its own sums, so every process runs the whole of it.
        self.sharded = stage.optimizer is not None and distributed.world_size > 1
        self.batch = min(stage.batch_size, len(rows))
        if self.sharded:
            self.batch -= self.batch % distributed.world_size
        self.full_steps = self.steps = len(rows) // self.batch if self.batch else 0
        if self.steps == 0:
            needed = f"; each of {distributed.world_size} processes needs at least one" if self.sharded else ""
            raise ConfigError(f"stage {stage.name!r} of {method.name} has {len(rows)} rows to train on{needed}.")
        self.last_batch = 0  # rows of the last, smaller batch over all processes
        if keep_last and stage.optimizer is not None and stage.role in LAST_BATCH_ROLES:
            processes = distributed.world_size
            share = len(rows) % self.batch // processes
            self.last_batch = share * processes if share >= MIN_LAST_ROWS else 0
            self.steps += self.last_batch > 0
        device = world.device
        self.param_groups = select_parameters(stage, method, addons)
        self.parameters = {name: p for group in self.param_groups for name, p in group.items()}
        self.optimizer = make_optimizer(stage, self.param_groups, device) if stage.optimizer else None
        self.fisher = BatchFisher(self.parameters) if collect_fisher else None
        self.learning_rates = [group.lr for group, own in zip(stage.groups, self.param_groups, strict=True) if own]
        self.factors = stage.schedule.factors(stage.epochs).tolist()
        source = world.sources[stage.source]
        self.streamed = source if isinstance(source, Streamed) else None
        self.fetch = source.fetch if self.streamed is None else self.streamed.staged
        self.loss: Callable[..., Mapping[str, Tensor]] = stage.loss or method.loss
        self.order = rows[: self.full_steps * self.batch + self.last_batch].clone()
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.rank_indices = self._rank_indices(self.batch)
        self.last_indices = self._rank_indices(self.last_batch)
        self.queued = 0  # steps of the epoch
        self.terms: list[str] = []
        self.history = torch.zeros(0, device=device)
        self.views_generator = torch.Generator(device)
        self.own = False  # whether steps of this epoch also compute the gradients of the method's own terms
        self.replays: dict[bool, Callable[[], None]] = {}  # captured steps, by `own`
        self.last_replays: dict[bool, Callable[[], None]] = {}  # those of the last, smaller batch
        self.attempted: set[bool] = set()  # those that a capture was attempted for
        self.probes = 0  # calls of `probe` so far
        self.sync_batchnorm = False

    def _rank_indices(self, batch: int) -> Tensor:
        """Positions within a global batch that this process trains on."""
        indices = torch.arange(batch, device=self.world.device)
        return indices[self.distributed.slice(batch)] if self.sharded else indices

    # The step -------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Fetch, forward, backward, gradient transforms, add-ons, optimizer: static tensor code throughout."""
        self._step(self.rank_indices)

    def last_step(self) -> None:
        """The same on the rows that do not fill a batch."""
        self._step(self.last_indices)

    def _step(self, indices: Tensor) -> None:
        rows = self.order.index_select(0, self.cursor * self.batch + indices)
        batch = self.fetch(rows, self.views_generator, self.stage.views)
        with torch.set_grad_enabled(bool(self.parameters)), self.world.autocast():
            terms = self.loss(batch)
            total = torch.stack([term.float() for term in terms.values()]).sum()
        self._write_history(terms)
        if self.parameters:
            if self.own:
                self._own_backward(terms)
            self._backward(total)
        self.cursor += 1

    def _set_gradients(self, loss: Tensor, keep_graph: bool = False) -> None:
        """`.grad` of every parameter, averaged over the processes."""
        parameters = list(self.parameters.values())
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep_graph)
        self._check_backbone_gradients(gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)  # fused optimizers need the same layout
            parameter.grad = gradient
        self.distributed.reduce_gradients(parameters)

    def _own_backward(self, terms: Mapping[str, Tensor]) -> None:
        """Gradients of the terms that classify the task's samples, for the add-ons that use them."""
        missing = [name for name in self.method.own_terms if name not in terms]
        if missing or not self.method.own_terms:
            raise ConfigError(
                f"the loss of {self.method.name} with these settings has the terms {', '.join(terms)}; none is that of "
                "the task's own samples alone. Use ivt.fisher_loss=whole."
            )
        own = torch.stack([terms[name].float() for name in self.method.own_terms]).sum()
        self._set_gradients(own, keep_graph=True)
        for addon in self.addons:
            if addon.uses_own_gradients(self.stage):
                addon.own_gradients(self.stage, self.parameters)

    def _backward(self, total: Tensor) -> None:
        parameters = list(self.parameters.values())
        self._set_gradients(total)
        self.method.gradients(self.parameters)
        if self.fisher is not None:
            self.fisher.accumulate((name, p.grad) for name, p in self.parameters.items())
        for addon in self.addons:
            addon.gradients(self.stage, self.parameters)
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def _check_backbone_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """A loss may leave single parameters without gradients. If it leaves the whole backbone, that is a bug."""
        missing = [g is None for name, g in zip(self.parameters, gradients, strict=True) if ".backbone." in name]
        if missing and all(missing):
            raise TrainingError(
                f"stage {self.stage.name!r} of {self.method.name} trains {len(missing)} tensors of the backbone, but "
                "its loss depends on none of them. This is a bug in the method or the engine; --engine eager may work."
            )

    def _write_history(self, terms: Mapping[str, Tensor]) -> None:
        if not self.terms:
            self.terms = list(terms)
            self.history = torch.zeros(self.steps, len(terms), device=self.world.device)
        row = torch.stack([term.detach().float() for term in terms.values()])
        self.history.index_copy_(0, self.cursor[None], row[None])

    # Epochs ---------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, shuffle: torch.Generator) -> None:
        """Write the epoch's order and learning rates; `epoch` counts from 0."""
        shuffled = torch.randperm(len(self.rows), generator=shuffle, device=self.rows.device)
        self.order.copy_(self.rows[shuffled[: len(self.order)]])
        self.cursor.zero_()
        self.queued = 0
        if self.streamed is not None:
            full, last = self.order.split([self.full_steps * self.batch, self.last_batch])
            self.streamed.ahead(full.view(-1, self.batch)[:, self.rank_indices], last[self.last_indices])
        if self.optimizer is not None:
            for group, lr in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
                group["lr"].fill_(self.factors[epoch] * lr)
        if self.fisher is not None:
            self.fisher.zero_()

    def queue_step(self) -> None:
        """Queue the epoch's next step on the device."""
        if self.streamed is not None:
            self.streamed.next()
        if self.last_batch and self.queued == self.full_steps:
            self.last_replays.get(self.own, self.last_step)()
        else:
            self.replays.get(self.own, self.step)()
        self.queued += 1

    def prepare_addons(self, task: Task, epoch: int) -> None:
        """Let the add-ons begin an epoch (counted from 0), and find out which gradients they use in it."""
        for addon in self.addons:
            addon.begin_epoch(task, self.stage, epoch + 1)
        self.own = any(addon.uses_own_gradients(self.stage) for addon in self.addons)

    def set_mode(self, sync_batchnorm: bool = True) -> None:
        """Train mode as the stage requires; BatchNorm over all processes if each has a part of the batch."""
        self.method.train()
        self.sync_batchnorm = sync_batchnorm and self.sharded
        self.distributed.set_sync_batchnorm(self.method, self.sync_batchnorm)
        if self.stage.batchnorm == "frozen":
            for module in self.method.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    @torch.no_grad()
    def probe(self, batches: int) -> None:
        """See `World.probe`. Runs in full precision, since add-ons compute weights from what they observe."""
        source, views = self.world.sources[self.stage.source], torch.Generator(self.world.device)
        views.manual_seed(0)
        self.world.generator.manual_seed(0)  # each epoch reseeds it
        self.probes += 1
        self.distributed.set_sync_batchnorm(self.method, False)  # every process has the whole batch
        try:
            limit = PROBE_BYTES // (4 * math.prod(source.row) * self.batch)
            self.loss(source.fetch(self.order[: max(1, min(batches, limit)) * self.batch], views, self.stage.views))
        finally:
            self.distributed.set_sync_batchnorm(self.method, self.sync_batchnorm)

    # State ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The rows, and the optimizer's tensors by parameter name."""
        tensors = {"rows": self.rows}
        if self.optimizer is not None:
            for name, parameter in self.parameters.items():
                for key, value in self.optimizer.state[parameter].items():
                    tensors[f"optimizer/{name}/{key}"] = value
        return tensors

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.state().items():
                check_fits(f"loop/{name}", state[name], tensor)
                tensor.copy_(state[name])
