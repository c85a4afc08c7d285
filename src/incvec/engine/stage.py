"""One stage of a task: hooks, epochs, loss terms and checkpoints around the steps of a `StageLoop`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from incvec.contracts import Stage, Task
from incvec.engine import events as ev
from incvec.engine.capture import capture_with_fallback
from incvec.engine.checkpoint import Position
from incvec.engine.loop import StageLoop
from incvec.engine.loss_history import LossHistory, check_weights, fetch_history, mean_terms
from incvec.engine.record import StageLog
from incvec.engine.seeds import derive
from incvec.engine.state import RunState
from incvec.errors import TrainingError

STEPS_PER_TICK = 16  # queued before other runs get a turn


def train_stage(state: RunState, task: Task, stage: Stage, others_running: Callable[[], bool]) -> Iterator[ev.Event]:
    """Train the stage at the run's position, from its beginning or from the epoch it was resumed at."""
    number, first_epoch = state.position.stage, state.position.epoch
    loop = state.loop = state.loop or begin_stage(state, task, stage)
    state.parts.world.probe = loop.probe
    loop.set_mode(state.config.sync_batchnorm)
    log = state.progress.stage_log(task, stage)
    loop.prepare_addons(task, first_epoch)  # they allocate what their part of the step uses
    for text in capture(state, loop, log, others_running):
        yield ev.Notice(text)
    state.estimate.record_rows(task, stage, len(loop.rows))
    yield ev.StageStarted(task.index, stage.name, stage.epochs, first_epoch, len(loop.rows), loop.steps)
    began = time.monotonic()
    unread: deque[LossHistory] = deque()
    for epoch in range(first_epoch, stage.epochs):
        begin_epoch(state, task, loop, epoch)
        if loop.own not in loop.attempted:
            for text in capture(state, loop, log, others_running):
                yield ev.Notice(text)
            begin_epoch(state, task, loop, epoch)  # again: the capture has drawn and accumulated
        for step in range(1, loop.steps + 1):
            loop.queue_step()
            if step % STEPS_PER_TICK == 0:
                yield ev.Tick()
        end_epoch(state, task, loop, epoch)
        unread.append(fetch_history(loop, epoch))
        last, save = epoch + 1 == stage.epochs, state.save_due()
        while len(unread) > (0 if last or save else 1):  # read an epoch's losses while the device trains the next one
            history = unread.popleft()
            while not history.arrived():
                yield ev.Tick(waiting=True)
            yield log_epoch(state, task, loop, log, history)
        if save and not last:
            check_weights(loop.parameters, task, stage)  # the last update, which no loss has seen yet
            state.position = Position(task.index, number, epoch + 1)
            yield state.save()
    log["seconds"] = round(log["seconds"] + time.monotonic() - began, 3)
    end_stage(state, task, loop)
    state.position = Position(task.index, number + 1, 0)
    if state.save_due():
        yield state.save()


def begin_stage(state: RunState, task: Task, stage: Stage) -> StageLoop:
    """Begin hooks, method first. The owner of the stage returns the rows it trains on."""
    method = state.parts.method
    state.reseed(task.index, stage.name, "begin_stage")
    rows = method.begin_stage(task, stage) if stage.owner is None else None
    for addon in state.listeners(task, stage):
        state.reseed(task.index, stage.name, "begin_stage", addon.name)
        addon_rows = addon.begin_stage(task, stage)
        if stage.owner == addon.name:
            rows = addon_rows
    if rows is None:
        raise TrainingError(f"begin_stage of {stage.owner or method.name} returned no rows for stage {stage.name!r}.")
    state.synchronize(rows=rows)
    return state.make_loop(task, stage, rows)


def capture(state: RunState, loop: StageLoop, log: StageLog, others_running: Callable[[], bool]) -> list[str]:
    """Capture the epoch's step if the engine is `graph`; returns notices about slower modes."""
    stage = loop.stage
    loop.attempted.add(loop.own)
    if state.parts.engine != "graph":
        return []
    if stage.eager:
        notices = [f"stage {stage.name!r} runs eagerly: {stage.eager}"] if len(loop.attempted) == 1 else []
    else:
        began = time.monotonic()
        live = {**state.tensors(addons=False), **loop.parameters}
        notices = capture_with_fallback(loop, live, state.failed_captures, state.saver.wait, others_running)
        log["capture_seconds"] = round(log.get("capture_seconds", 0.0) + time.monotonic() - began, 3)
    for text in notices:
        state.progress.add_notice(text)
    return notices


def begin_epoch(state: RunState, task: Task, loop: StageLoop, epoch: int) -> None:
    """Seed every draw of the epoch, then prepare the loop and the add-ons. The order is the same in all processes."""
    seed, purpose = state.config.seed, (task.index, loop.stage.name, epoch)
    distributed = state.distributed
    rank = (f"rank {distributed.rank} of {distributed.world_size}",) if loop.sharded else ()
    state.reseed(*purpose, "loss", *rank)
    loop.views_generator.manual_seed(derive(seed, *purpose, "views", *rank))
    shuffle = torch.Generator(loop.world.device).manual_seed(derive(seed, *purpose, "shuffle"))
    loop.begin_epoch(epoch, shuffle)
    loop.prepare_addons(task, epoch)


def end_epoch(state: RunState, task: Task, loop: StageLoop, epoch: int) -> None:
    state.distributed.average_batchnorm_statistics(state.parts.method)
    probes = loop.probes
    for addon in loop.addons:
        addon.end_epoch(task, loop.stage, epoch + 1, loop.optimizer)
    if loop.probes > probes:  # weights may have been computed from what each process observed
        state.synchronize()


def log_epoch(state: RunState, task: Task, loop: StageLoop, log: StageLog, history: LossHistory) -> ev.EpochEnded:
    stage, epoch = loop.stage, history.epoch + 1
    where = f"task {task.index + 1}, stage {stage.name!r}"
    terms = mean_terms(history, loop.terms, where, state.last_checkpoint)
    for name, value in terms.items():
        log["terms"].setdefault(name, []).append(float(f"{value:.5g}"))
    fraction, seconds_left = state.estimate.progress(task, stage, epoch)
    return ev.EpochEnded(task.index, stage.name, epoch, stage.epochs, terms, fraction, seconds_left)


def end_stage(state: RunState, task: Task, loop: StageLoop) -> None:
    """End hooks: add-ons, then the method. The base task's main stage leaves its Fisher in the world."""
    parts, stage = state.parts, loop.stage
    check_weights(loop.parameters, task, stage)
    if loop.fisher is not None:
        fisher = loop.fisher.mean()
        prefix = "model."
        parts.world.base_fisher = {n.removeprefix(prefix): f for n, f in fisher.items() if n.startswith(prefix)}
    for addon in loop.addons:
        state.reseed(task.index, stage.name, "end_stage", addon.name)
        addon.end_stage(task, stage)
    state.reseed(task.index, stage.name, "end_stage")
    if stage.owner is None:
        parts.method.end_stage(task, stage)
    state.synchronize()
    state.drop_loop()
