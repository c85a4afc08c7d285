"""Packing: decode every image of a data set once, on all cores, into a store (see open.py).

Rows have fixed positions in the shards, so processes write independently. The unit of work is a chunk of rows; a
journal gets one line per written chunk, with a checksum. Packing that was interrupted resumes after verifying what the
journal lists: a chunk with other bytes, or whose files have changed since, is written again. `store.json` is written
last, when all other files are on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from incvec.atomic_files import FileLock, write_bytes
from incvec.data.image_files import Progress
from incvec.data.listing import Listing, is_hidden
from incvec.data.store.chunks import ChunkResult, cores, write_chunks, write_error
from incvec.data.store.open import (
    JOURNAL,
    LEFT_OUT,
    PARTS,
    STORE,
    UNREADABLE,
    ByteRange,
    Store,
    StorePart,
    find_intact,
    format_bytes,
    is_store,
    metadata_file,
    open_store,
    sha256,
)
from incvec.data.store.plan import VERSIONS, Plan
from incvec.errors import ConfigError, DataError

SHARD_BYTES = 1 << 31
CHUNK_BYTES = 1 << 25
CHUNK_ROWS = 256
HEADER, CHUNK = {"settings", "classes"}, {"chunk", "checksum", "unreadable"}  # keys of the lines of a journal
Results = dict[int, ChunkResult]  # by the number of the chunk


def pack(
    listing: Listing,
    root: str | Path,
    side: int = 256,
    unreadable: Literal["refuse", "leave-out"] = "refuse",
    workers: int | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    chunk_rows: int | None = None,
    verify_progress: Progress | None = None,
) -> Store:
    """Write a store of the listed images, or resume one; returns it open.

    `verify_progress` is called while the chunks of an interrupted packing are verified, before `progress` is.
    """
    path = Path(root).expanduser()
    plan = _make_plan(listing, path, side, shard_bytes, chunk_rows)
    if (path / STORE).is_file():  # before the lock: the store may be read-only
        return _check_complete(plan, unreadable)
    with FileLock(path / ".lock", DataError):
        if (path / STORE).is_file():  # another process has just completed it
            return _check_complete(plan, unreadable)
        results = _resume(plan, verify_progress)
        _create_shards(plan)
        (path / UNREADABLE).unlink(missing_ok=True)
        _write_missing(plan, results, workers or cores(), progress)
        return _complete(plan, results, unreadable)


def _make_plan(listing: Listing, root: Path, side: int, shard_bytes: int, chunk_rows: int | None) -> Plan:
    if side < 1:
        raise ConfigError(f"the side is {side}: expected the side of the images in pixels, 1 or more")
    if root.resolve().is_relative_to(listing.root.resolve()):
        raise ConfigError(
            f"{root} is inside the folder of the images, where it could be taken for a class: choose another"
        )
    row_bytes = 3 * side * side
    shard_rows = max(1, shard_bytes // row_bytes)
    chunk_rows = chunk_rows or max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes, shard_rows))
    return Plan(root, listing, side, shard_rows, chunk_rows)


def _check_complete(plan: Plan, unreadable: str) -> Store:
    """The existing store, if it is what this packing would write."""
    store = open_store(plan.root)
    for part in PARTS:
        store.labels(part)
    if store.about["key"] != plan.key([chunk.key() for chunk in plan.chunks]):
        before = {"side": store.side, "classes": len(store.classes)}
        now = {"side": plan.side, "classes": len(plan.listing.classes)}
        raise DataError(
            f"{plan.root} is a store of other images or settings "
            f"({_changes(before, now) or 'files were added, removed or replaced'}). Choose another folder, or remove "
            "it first; if only the times of the files have changed, use it as it is."
        )
    if store.about["left_out"] and unreadable == "refuse":
        raise DataError(
            f"{store.root} was packed without {store.about['left_out']} unreadable image(s), listed in "
            f"{store.root / UNREADABLE}. To keep it, give --unreadable leave-out; otherwise replace them, remove "
            "the store and pack the images again."
        )
    return store


def _resume(plan: Plan, progress: Progress | None) -> Results:
    """The intact chunks of an interrupted packing. Starts the journal of a new one."""
    journal = _read_journal(plan.root / JOURNAL)
    header = journal.pop("", None)
    if header is None:
        if not (plan.root / JOURNAL).exists() and is_store(plan.root):
            open_store(plan.root)  # raises
        others = [entry.name for entry in plan.root.iterdir() if not is_hidden(entry.name) and entry.name != JOURNAL]
        if others:
            raise DataError(f"{plan.root} is not empty ({others[0]}): expected a new folder, or an incomplete store")
    elif header["settings"] != plan.settings:
        raise DataError(
            f"{plan.root} is an incomplete store with other settings ({_changes(header['settings'], plan.settings)}). "
            "Choose another folder, or remove it."
        )
    results: Results = {}
    for chunk in plan.chunks if journal else ():
        if (key := chunk.key()) in journal:
            results[chunk.number] = ChunkResult(key, journal[key]["checksum"], journal[key]["unreadable"])
    if header is not None and not results and header["classes"] != plan.classes_hash:
        raise DataError(
            f"{plan.root} is an incomplete store of other images, with other classes. Choose another folder, or remove "
            "it."
        )
    _check_space(plan)
    if header is None:
        _append(plan.root / JOURNAL, {"settings": plan.settings, "classes": plan.classes_hash})
    return _verify(plan, results, progress)


def _shard_sizes(plan: Plan) -> dict[Path, int]:
    return {plan.root / shard: rows * plan.row_bytes for part in PARTS for shard, rows in plan.shards(part)}


def _check_space(plan: Plan) -> None:
    shards = _shard_sizes(plan)
    needed = sum(shards.values()) - sum(file.stat().st_blocks * 512 for file in shards if file.exists())
    free = shutil.disk_usage(plan.root).free
    if needed > free:
        raise DataError(
            f"{plan.root} needs {format_bytes(needed)} more and has {format_bytes(free)} free. Free some space, or "
            "choose a smaller --size."
        )


def _create_shards(plan: Plan) -> None:
    """Files of the full size, and none of a packing that had more images."""
    shards = _shard_sizes(plan)
    for file in plan.root.glob("*-[0-9][0-9][0-9][0-9][0-9].bin"):
        if file not in shards:
            file.unlink()
    for file, size in shards.items():
        try:
            with open(file, "ab") as handle:
                handle.truncate(size)  # sparse: takes no space yet
        except OSError as error:
            raise write_error(file, error) from error


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of the journal by chunk key; the header has none. Lines torn by a kill are ignored."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    journal: dict[str, dict[str, Any]] = {}
    for line in lines:
        with suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.keys() >= HEADER:
                journal[""] = entry
            elif isinstance(entry, dict) and entry.keys() >= CHUNK and isinstance(entry["chunk"], str):
                journal[entry["chunk"]] = entry
    return journal


def _append(journal: Path, entry: Mapping[str, Any]) -> None:
    try:
        with open(journal, "ab") as file:
            file.write(b"\n" + json.dumps(entry).encode())  # the previous line may be torn
    except OSError as error:
        raise write_error(journal, error) from error


def _verify(plan: Plan, results: Results, progress: Progress | None) -> Results:
    """The results whose bytes are on the disk.

    Chunks with unreadable images are written again: the images may have been replaced.
    """
    numbers = [number for number, result in results.items() if not result.unreadable]
    ranges = []
    for number in numbers:
        chunk = plan.chunks[number]
        size, expected = len(chunk.names) * plan.row_bytes, results[number].checksum
        ranges.append(ByteRange(plan.root / chunk.shard, chunk.offset, size, len(chunk.names), expected))
    intact = find_intact(ranges, progress)
    return {number: results[number] for number, right in zip(numbers, intact, strict=True) if right}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)}, now {now.get(name)}" for name in names)


def _write_missing(plan: Plan, results: Results, workers: int, progress: Progress | None) -> None:
    missing = [chunk for chunk in plan.chunks if chunk.number not in results]
    total = sum(len(chunk.names) for chunk in plan.chunks)
    done = total - sum(len(chunk.names) for chunk in missing)
    if progress is not None:
        progress(done, total)
    for chunk, result in write_chunks(plan.root, missing, min(workers, len(missing))):
        _append(
            plan.root / JOURNAL, {"chunk": result.key, "checksum": result.checksum, "unreadable": result.unreadable}
        )
        results[chunk.number] = result
        done += len(chunk.names)
        if progress is not None:
            progress(done, total)


def _complete(plan: Plan, results: Results, unreadable: str) -> Store:
    """Write the labels, file names and metadata of a store whose chunks are all written."""
    errors = [message for chunk in plan.chunks for _, message in results[chunk.number].unreadable]
    report = plan.root / UNREADABLE
    if errors:
        write_bytes(report, _lines(errors), DataError)
    if errors and unreadable == "refuse":
        shown = "\n".join(f"  {message}" for message in errors[:10])
        raise DataError(
            f"{len(errors)} image(s) cannot be read (all are listed in {report}):\n{shown}\n"
            "Leave them out with --unreadable leave-out, or replace or remove them; then run the same command again. "
            "After a removed image, all following images are packed again."
        )
    left_out: Counter[str] = Counter()
    parts = {part: _complete_part(plan, part, results, left_out) for part in PARTS}
    for part in PARTS:
        for shard, _ in plan.shards(part):
            _sync_shard(plan.root / shard)
    listing = plan.listing
    content = [plan.side, listing.classes, [[part.labels_hash, part.checksums] for part in parts.values()]]
    about = {
        "layout": listing.layout, "split": listing.split, "class_list": listing.class_list, "left_out": len(errors),
        "left_out_by_class": dict(left_out), "versions": VERSIONS,
        "key": plan.key([results[chunk.number].key for chunk in plan.chunks]),
    }  # fmt: skip
    fingerprint = sha256(json.dumps(content).encode())
    store = Store(plan.root, plan.side, listing.classes, about, parts, fingerprint)
    write_bytes(plan.root / STORE, metadata_file(store), DataError)
    (plan.root / JOURNAL).unlink()
    return open_store(plan.root)


def _complete_part(plan: Plan, part: str, results: Results, left_out: Counter[str]) -> StorePart:
    classes = plan.listing.classes
    labels = np.array([label for _, label in plan.files(part)], dtype="<i4")
    checksums, row = [], 0
    for chunk in plan.chunks:
        if chunk.part == part:
            for i, _ in results[chunk.number].unreadable:
                left_out[classes[labels[row + i]]] += 1
                labels[row + i] = LEFT_OUT
            checksums.append(results[chunk.number].checksum)
            row += len(chunk.names)
    for name, count in zip(classes, np.bincount(labels[labels >= 0], minlength=len(classes)), strict=True):
        if count == 0:
            raise DataError(
                f"class {name!r} has no readable {part} image (unreadable ones are listed in "
                f"{plan.root / UNREADABLE}): replace some, or remove its folders; then run the same command again"
            )
    names = _lines(name.replace("\n", "\\n").replace(os.sep, "/") for name in plan.names[part])
    write_bytes(plan.root / f"{part}-labels.bin", labels.tobytes(), DataError)
    write_bytes(plan.root / f"{part}-files.txt", names, DataError)
    return StorePart(plan.shards(part), plan.chunk_rows, tuple(checksums), sha256(labels.tobytes()), sha256(names))


def _lines(texts: Iterable[str]) -> bytes:
    return os.fsencode("".join(f"{text}\n" for text in texts))  # file names may be any bytes


def _sync_shard(path: Path) -> None:
    """Flush a shard to the disk, or remove it.

    A disk reports a failed write once, and lost bytes may still be read back from the page cache: resuming must not
    accept them.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise DataError(f"{write_error(path, error)} {path.name} was removed and will be written again.") from error
