"""Packing: decode every image of a data set once, on all cores, into a store (see packed.py).

Images lie at fixed places in the shards, so that processes write without knowing of one another. The unit of work is
a chunk of rows; a journal has a line, with a checksum of its bytes, for every chunk that was written. Packing that
was broken off in whatever way goes on after reading back what the journal tells: a chunk whose bytes are not those, or
whose files are others by now, is made again. `store.json` is written last, once all files are on the disk.

Images are turned as their EXIF says, made RGB, and brought to the side as torchvision's Resize and CenterCrop do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from incvec.data.folder import is_hidden
from incvec.data.layouts import Layout
from incvec.data.store.chunks import cores, made
from incvec.data.store.disk import kept, sync, unwritten, write
from incvec.data.store.open import (
    FORMAT,
    JOURNAL,
    LEFT_OUT,
    LIST,
    PARTS,
    STORE,
    UNREADABLE,
    Progress,
    Store,
    amount,
    chunk_sum,
    digest,
    is_store,
    open_store,
)
from incvec.data.store.plan import VERSIONS, Chunk, Done, Journal, Plan
from incvec.errors import ConfigError, DataError

SHARD_BYTES = 1 << 31
CHUNK_BYTES = 1 << 25
CHUNK_ROWS = 256


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    try:
        handle = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(f"{root} cannot be written to: {error.strerror}. Choose a place to write to.") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process is packing into {root}; wait for it or choose another place") from None
        yield
    finally:
        os.close(handle)


def pack(
    layout: Layout,
    root: str | Path,
    side: int = 256,
    unreadable: Literal["refuse", "leave-out"] = "refuse",
    workers: int | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    chunk_rows: int | None = None,
    reading_back: Progress | None = None,
) -> Store:
    """Make a store of the listed images, or go on with one; returns it opened.

    `reading_back` is told how far the check of a broken-off store is, before `progress` hears of packing.
    """
    path = Path(root).expanduser()
    plan = make_plan(layout, path, side, shard_bytes, chunk_rows)
    if (path / STORE).is_file():  # it may lie where nothing can be written, a lock included
        return _finished(plan, unreadable)
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file: expected the name of a folder to make, or of a broken-off store.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{path} cannot be made a folder: {error.strerror}. Choose a place you may write to."
        ) from error
    with locked(path):
        if (path / STORE).is_file():  # finished by another process just now
            return _finished(plan, unreadable)
        journal = Journal(path / JOURNAL)
        done = _begin(plan, journal, reading_back)
        (path / UNREADABLE).unlink(missing_ok=True)  # they may have been mended
        _work(plan, journal, done, workers or cores(), progress)
        return _finish(plan, done, unreadable)


def make_plan(layout: Layout, root: Path, side: int, shard_bytes: int, chunk_rows: int | None) -> Plan:
    if side < 1:
        raise ConfigError(f"the side is {side}: expected the images' side in pixels, 1 or more")
    if root.resolve().is_relative_to(layout.listing.root.resolve()):
        raise ConfigError(f"{root} lies in the folder of the images, where it may be taken for a class: choose another")
    row = 3 * side * side
    shard_rows = max(1, shard_bytes // row)
    return Plan(root, side, layout, shard_rows, chunk_rows or max(1, min(CHUNK_ROWS, CHUNK_BYTES // row, shard_rows)))


def _finished(plan: Plan, unreadable: str) -> Store:
    """The store that is there, where it is what this packing would make."""
    store = open_store(plan.root)
    for part in PARTS:
        store.labels(part)  # raises where they are lost
    about = store.about
    if about.get("key") != plan.key:
        raise another(plan, store, VERSIONS)
    if about.get("sources", plan.sources) != plan.sources:  # stores made before have none
        raise DataError(
            f"{plan.root} was packed from files of the same names but of other sizes or times: images were replaced "
            "since. Remove it and run the same command again; where only the times changed, use it as it is."
        )
    check_left_out(store, unreadable)
    return store


def check_left_out(store: Store, unreadable: str) -> None:
    if store.about["left_out"] and unreadable == "refuse":
        raise DataError(
            f"{store.root} was packed without {store.about['left_out']} unreadable image(s), listed in "
            f"{store.root / LIST}. To keep it so, say --unreadable leave-out; else replace them, remove the store and "
            "pack it again."
        )


def another(plan: Plan, store: Store, versions: Mapping[str, str]) -> DataError:
    """What to say of a store that is not what the plan would make with these versions."""
    before = {"side": store.side, "classes": len(store.classes), **store.about.get("versions", {})}
    now = {"side": plan.side, "classes": len(plan.layout.listing.classes), **versions}
    return DataError(
        f"{plan.root} holds a store of other images or settings ({_changes(before, now) or 'other files'}). "
        "Choose another place, or remove it first."
    )


def _begin(plan: Plan, journal: Journal, reading_back: Progress | None) -> dict[int, Done]:
    """What earlier packing left that is whole; shards of their full size, where there are none yet."""
    settings, classes, told = journal.read()
    if settings is None and not journal.path.exists() and is_store(plan.root):
        open_store(plan.root)  # tells what is wrong with it
    if settings is None:
        strangers = [entry.name for entry in plan.root.iterdir() if not is_hidden(entry.name) and entry.name != JOURNAL]
        if strangers:
            raise DataError(f"{plan.root} is not empty ({strangers[0]}): expected a new folder, or a broken-off store")
    elif settings != plan.settings:
        raise DataError(
            f"{plan.root} holds a broken-off packing with other settings ({_changes(settings, plan.settings)}). "
            "Choose another place, or remove it."
        )
    found = {
        chunk.number: Done(chunk.number, *told[key])
        for chunk in plan.work
        if told and (key := plan.chunk_key(chunk)) in told
    }
    if settings is not None and not found and classes != plan.classes:  # another data set's is not written over
        raise DataError(
            f"{plan.root} holds a broken-off packing of other images, with other classes. Choose another place, or "
            "remove it."
        )
    whole = unbroken(plan, found, reading_back)
    total = sum(len(chunk.files) for chunk in plan.work) * plan.row_bytes
    shards = {shard for part in PARTS for shard, _ in plan.shards(part)}
    files = [plan.root / shard for shard in shards]
    needed = total - sum(file.stat().st_blocks * 512 for file in files if file.exists())
    check_space(plan.root, needed, "Free some, or choose a smaller --size.")
    if settings is None:
        journal.write({"settings": plan.settings, "classes": plan.classes})
    for old in plan.root.glob("*-[0-9][0-9][0-9][0-9][0-9].bin"):
        if old.name not in shards:  # there were more images
            old.unlink()
    set_lengths(plan)
    return whole


def set_lengths(plan: Plan) -> None:
    """Shards of their full length; what is missing takes no space yet."""
    for shard, rows in (shard for part in PARTS for shard in plan.shards(part)):
        try:
            with open(plan.root / shard, "ab") as file:
                file.truncate(rows * plan.row_bytes)
        except OSError as error:
            raise DataError(unwritten(plan.root / shard, error)) from error


def unbroken(plan: Plan, found: Mapping[int, Done], reading_back: Progress | None) -> dict[int, Done]:
    """Of the chunks that are told of, those whose bytes are there."""
    claimed = [chunk for chunk in plan.work if chunk.number in found and not found[chunk.number].bad]
    # Those with files that could not be read are made again: such files may have been mended since.

    def look(chunk: Chunk) -> str | None:
        return chunk_sum(plan.root / chunk.shard, chunk.offset, len(chunk.files) * plan.row_bytes)

    total, read, whole = sum(len(chunk.files) for chunk in claimed), 0, {}
    with ThreadPoolExecutor(cores()) as pool:
        for chunk, right in zip(claimed, pool.map(look, claimed), strict=True):
            if right == found[chunk.number].sum:
                whole[chunk.number] = found[chunk.number]
            read += len(chunk.files)
            if reading_back is not None:
                reading_back(read, total)
    return whole


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)}, now {now.get(name)}" for name in names)


def check_space(root: Path, needed: int, remedy: str) -> None:
    free = shutil.disk_usage(root).free
    if needed > free:
        raise DataError(f"{root} needs {amount(needed)} more and has {amount(free)} free. {remedy}")


def _work(plan: Plan, journal: Journal, done: dict[int, Done], workers: int, progress: Progress | None) -> None:
    """Make what is missing, in processes of their own where there is enough of it."""
    chunks = plan.work
    total = sum(len(chunk.files) for chunk in chunks)
    count = sum(len(chunk.files) for chunk in chunks if chunk.number in done)
    left = [chunk for chunk in chunks if chunk.number not in done]
    if progress is not None:
        progress(count, total)
    shard, synced = Path(), Future[None]()
    synced.set_result(None)
    with ThreadPoolExecutor(1) as writer:  # what is made goes to the disk while more is being made
        for chunk, one in made(plan, left, min(workers, len(left))):
            journal.write({"chunk": plan.chunk_key(chunk), "sum": one.sum, "bad": one.bad})
            done[one.number] = one
            count += len(chunk.files)
            if synced.done():
                kept(shard, synced.result)
                shard = plan.root / chunk.shard
                synced = writer.submit(sync, shard)
            if progress is not None:
                progress(count, total)
        kept(shard, synced.result)


def _finish(plan: Plan, done: dict[int, Done], unreadable: str) -> Store:
    chunks = plan.work
    bad = [message for chunk in chunks for _, message in done[chunk.number].bad]
    unread = plan.root / UNREADABLE
    if bad:
        write(unread, "\n".join(bad) + "\n")
    if bad and unreadable == "refuse":
        shown = "\n".join(f"  {message}" for message in bad[:10])
        raise DataError(
            f"{len(bad)} image(s) cannot be read (all are listed in {unread}):\n{shown}\n"
            "Leave them out with --unreadable leave-out, or replace or remove them; then run the same command again. "
            "After a removed image, all that follow are packed anew."
        )
    parts: dict[str, dict[str, Any]] = {}
    left_out: Counter[str] = Counter()
    number = 0
    for part in PARTS:
        labels = np.array([label for _, label in plan.files(part)], dtype="<i4")
        sums, row = [], 0
        for _, _, files in plan.chunks(part):
            for i, _ in done[number].bad:
                left_out[plan.layout.listing.classes[labels[row + i]]] += 1
                labels[row + i] = LEFT_OUT
            sums.append(done[number].sum)
            row += len(files)
            number += 1
        names = os.fsencode(plan.names[part])  # a name may be any bytes
        for label, count in enumerate(np.bincount(labels[labels >= 0], minlength=len(plan.layout.listing.classes))):
            if count == 0:
                name = plan.layout.listing.classes[label]
                raise DataError(
                    f"class {name!r} has no readable {part} image left (those that cannot be read are listed in "
                    f"{unread}): replace some, or remove its folders; then run the same command again"
                )
        write(plan.root / f"{part}-labels.bin", labels.tobytes())
        write(plan.root / f"{part}-files.txt", names)
        parts[part] = {
            "shards": plan.shards(part), "chunk": plan.chunk_rows, "sums": sums,
            "labels_hash": digest(labels.tobytes()), "files_hash": digest(names),
        }  # fmt: skip
    (plan.root / LIST).unlink(missing_ok=True)
    if bad:
        write(plan.root / LIST, "\n".join(bad) + "\n")
    for part in PARTS:
        for shard, _ in plan.shards(part):
            kept(plan.root / shard, partial(sync, plan.root / shard))
    layout = plan.layout
    content = [plan.side, layout.listing.classes, [[p["labels_hash"], p["sums"]] for p in parts.values()]]
    account = {
        "format": FORMAT,
        "side": plan.side,
        "classes": list(layout.listing.classes),
        "fingerprint": digest(json.dumps(content).encode()),
        "about": {
            "layout": layout.name, "rule": layout.listing.rule, "class_list": layout.class_list,
            "left_out": len(bad), "left_out_by_class": dict(left_out), "versions": VERSIONS, "key": plan.key,
            "sources": plan.sources,
        },
        "parts": parts,
    }  # fmt: skip
    temporary = plan.root / f"{STORE}.part"
    write(temporary, json.loads(json.dumps(account)))
    os.replace(temporary, plan.root / STORE)
    sync(plan.root)
    for leftover in (plan.root / JOURNAL, unread):
        leftover.unlink(missing_ok=True)
    return open_store(plan.root)
