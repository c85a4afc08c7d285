"""Mending a store whose account is whole: what does not match its checksum is made again, to the same bytes.

`store.json` is not touched, and nothing is written that has not the checksum that stands there: no byte that was right
is ever changed. The last chunk of a shard is written after its others, so that one that was lost or cut short stays too
short to be opened until it is whole, whenever mending is broken off.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from incvec.data.layouts import Layout
from incvec.data.store.chunks import cores, decoded, made
from incvec.data.store.disk import sync, write
from incvec.data.store.open import (
    LEFT_OUT,
    LIST,
    PARTS,
    REMEDY,
    STORE,
    Progress,
    Store,
    digest,
    open_store,
    read_account,
)
from incvec.data.store.plan import VERSIONS, Chunk, Done, Plan
from incvec.data.store.write import (
    SHARD_BYTES,
    another,
    check_left_out,
    check_space,
    locked,
    make_plan,
    set_lengths,
    unbroken,
)
from incvec.errors import DataError


def repair(
    layout: Layout,
    root: str | Path,
    side: int = 256,
    unreadable: Literal["refuse", "leave-out"] = "refuse",
    workers: int | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    chunk_rows: int | None = None,
    reading_back: Progress | None = None,
) -> tuple[Store, list[str]]:
    """Verify a finished store and mend it from the images it was made of; returns it opened, and what was mended."""
    plan = make_plan(layout, Path(root).expanduser(), side, shard_bytes, chunk_rows)
    store = read_account(plan.root)
    versions = store.about.get("versions", {})  # it may have been made with others: the checksums decide
    if store.about.get("key") != plan.key_with(versions):
        raise another(plan, store, versions)
    check_left_out(store, unreadable)
    sums = [checksum for part in PARTS for checksum in store.parts[part].sums]
    told = {chunk.number: Done(chunk.number, right, []) for chunk, right in zip(plan.work, sums, strict=True)}
    with locked(plan.root):
        whole = unbroken(plan, told, reading_back)
        check_space(plan.root, _lacking(plan), "Free some.")
        bad = [chunk._replace(wanted=told[chunk.number].sum) for chunk in plan.work if chunk.number not in whole]
        _remake(plan, bad, workers or cores(), progress)
        set_lengths(plan)  # of those that are too long
        mended = [*(_place(plan, chunk) for chunk in bad), *_mend_indices(plan, store), *_mend_list(plan, store)]
        return open_store(plan.root), mended


def _lacking(plan: Plan) -> int:
    """Bytes by which shards are too short; what is written over needs no space."""
    lacking = 0
    for shard, rows in (shard for part in PARTS for shard in plan.shards(part)):
        path = plan.root / shard
        lacking += max(0, rows * plan.row_bytes - (path.stat().st_size if path.exists() else 0))
    return lacking


def _place(plan: Plan, chunk: Chunk) -> str:
    first = chunk.offset // plan.row_bytes
    return f"{chunk.shard}, rows {first} to {first + len(chunk.files) - 1}"


def _remake(plan: Plan, bad: list[Chunk], workers: int, progress: Progress | None) -> None:
    count, total = 0, sum(len(chunk.files) for chunk in bad)
    if bad and progress is not None:
        progress(count, total)
    last = {chunk.shard: chunk for chunk in bad}
    for chunks in ([chunk for chunk in bad if chunk is not last[chunk.shard]], list(last.values())):
        for chunk, one in made(plan, chunks, min(workers, len(chunks))):
            if one.sum != chunk.wanted:
                raise _others(plan, chunk, one)
            count += len(chunk.files)
            if progress is not None:
                progress(count, total)
        for shard in {chunk.shard for chunk in chunks}:
            sync(plan.root / shard)  # if it fails, the rows that were right are kept all the same


def _others(plan: Plan, chunk: Chunk, one: Done) -> DataError:
    cannot = f" Of its images {len(one.bad)} cannot be read, the first: {one.bad[0][1]}" if one.bad else ""
    return DataError(
        f"{plan.root / _place(plan, chunk)} cannot be made again as it was: its images, or what decodes them "
        f"({', '.join(f'{name} {number}' for name, number in VERSIONS.items())}), are others now.{cannot} "
        f"Put back what it was made of and run this again. Where that is gone: {REMEDY}"
    )


def _mend_indices(plan: Plan, store: Store) -> list[str]:
    """Labels and file names, where they are not what they were; the images are by now."""
    mended = []
    for part in PARTS:
        account = store.parts[part]
        labels = np.array([label for _, label in plan.files(part)], dtype="<i4")
        for file, wanted, content in (
            (f"{part}-labels.bin", account.labels_hash, labels.tobytes()),
            (f"{part}-files.txt", account.files_hash, os.fsencode(plan.names[part])),
        ):
            path = plan.root / file
            if path.is_file() and digest(path.read_bytes()) == wanted:
                continue
            if digest(content) != wanted and file.endswith("labels.bin"):
                content = _without_zeros(store, part, labels).tobytes()
            if digest(content) != wanted:
                raise DataError(f"{path} cannot be made again as {STORE} tells of it. {REMEDY}")
            write(path, content)
            mended.append(file)
    return mended


def _without_zeros(store: Store, part: str, labels: NDArray[np.int32]) -> NDArray[np.int32]:
    """The labels where rows of zeros are images that were left out; the hash says whether they are."""
    row = int(np.prod(store.row))
    shards = [np.memmap(store.root / name, np.uint8, "r", shape=(rows, row)) for name, rows in store.parts[part].shards]
    seen = np.concatenate([np.fromiter((image.any() for image in shard), bool, len(shard)) for shard in shards])
    return np.where(seen, labels, LEFT_OUT).astype("<i4")


def _mend_list(plan: Plan, store: Store) -> list[str]:
    """The list of images that were left out, if it is lost, with what is wrong with them now; it has no hash."""
    if not store.about["left_out"] or (plan.root / LIST).is_file():
        return []
    files = [
        str(file)
        for part in PARTS
        for (file, _), label in zip(plan.files(part), store.labels(part), strict=True)
        if label == LEFT_OUT
    ]
    bad: list[tuple[int, str]] = []
    for _ in decoded(Chunk(0, LIST, 0, plan.side, tuple(files)), bad):
        pass
    wrong = dict(bad)
    write(plan.root / LIST, "".join(f"{wrong.get(i, f'{file} was left out')}\n" for i, file in enumerate(files)))
    return [LIST]
