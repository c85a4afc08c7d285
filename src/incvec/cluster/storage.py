"""Where the runs of a cluster are stored: a folder that all nodes see, or an fsspec address such as s3://bucket/runs.

With an address, a worker trains in a scratch folder of its node. What exists of a run is fetched before it starts, and
every file is copied to the storage right after it was written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from incvec.atomic_files import FileLock, mirrored, write_bytes
from incvec.cluster.job import is_address
from incvec.errors import ConfigError, StorageError
from incvec.records import read_record

# Their files appear whole or not at all. Elsewhere a file is renamed when it is complete.
OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "r2"))
RETRIES = (1.0, 4.0)  # seconds before another attempt


class Storage:
    """The folders of runs and `bases`, at an address. With an fsspec address, `scratch` has copies of its files."""

    def __init__(self, address: str, scratch: Path) -> None:
        self.address = address
        self.remote = is_address(address)
        self.folder = scratch if self.remote else Path(address)
        self._files: Any = None
        self._root = ""
        if self.remote:
            self._files, self._root = open_address(address)
        elif not self.folder.is_dir():
            raise StorageError(
                f"the folder {address} does not exist on this node. Give --storage a folder that all nodes see, or an "
                "fsspec address."
            )

    def run_folder(self, name: str) -> Path:
        return self.folder / name

    @property
    def bases(self) -> Path:
        return self.folder / "bases"

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        """While open, files that are written to the scratch folder are copied to the address."""
        if not self.remote:
            yield
            return
        with mirrored(self.folder, self):
            yield

    def read_record(self, name: str) -> dict[str, Any] | None:
        """The record of a run, validated; None if it has none yet."""
        path = self.run_folder(name) / "record.json"
        if self.remote:
            self.fetch(path)
        return read_record(path) if path.exists() else None

    def prepare(self, name: str) -> None:
        """Fetch what exists of a run."""
        if self.remote:
            for file in ("record.json", "checkpoint.safetensors"):
                path = self.run_folder(name) / file
                path.unlink(missing_ok=True)  # from an earlier attempt here; others may have continued since
                self.fetch(path)

    def finish(self, name: str) -> None:
        """The run's record is stored: remove its checkpoint, and the copies of its files here."""
        if self.remote:
            with suppress(FileNotFoundError, StorageError):  # a checkpoint beside a record does no harm
                self._remove(self.run_folder(name) / "checkpoint.safetensors")
            shutil.rmtree(self.run_folder(name), ignore_errors=True)

    # incvec.atomic_files.Mirror -------------------------------------------------------------------------

    def store(self, path: Path) -> None:
        key, files = self._key(path), self._files
        temporary = f"{key}.{uuid.uuid4().hex}.part"  # containers on several nodes have the same process numbers

        def put() -> None:
            if is_object_store(files):
                files.put_file(str(path), key)
                return
            files.makedirs(key.rpartition("/")[0], exist_ok=True)
            files.put_file(str(path), temporary)
            files.mv(temporary, key)

        self._attempt(put)

    def fetch(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.fetched")
        try:
            self._attempt(lambda: self._files.get_file(self._key(path), str(temporary)))
            os.replace(temporary, path)
        except FileNotFoundError:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()  # if it was created for this file

    # ----------------------------------------------------------------------------------------------------

    def _remove(self, path: Path) -> None:
        self._attempt(lambda: self._files.rm(self._key(path)))

    def _key(self, path: Path) -> str:
        return f"{self._root}/{path.relative_to(self.folder).as_posix()}"

    def _attempt(self, operation: Callable[[], Any]) -> Any:
        """Call it, again if it fails. A file system may raise anything; the file may also not exist."""
        waits = list(RETRIES)
        while True:
            try:
                return operation()
            except FileNotFoundError:
                raise
            except Exception as error:
                if not waits:
                    raise StorageError(
                        f"the storage {self.address} cannot be used ({type(error).__name__}: {error}). Check its "
                        "address, and that all nodes may read and write there."
                    ) from error
                time.sleep(waits.pop(0))


def open_address(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it. Listings are not cached: other nodes write, too."""
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise ConfigError(
            f"the storage {address} needs fsspec, which the extra `cluster` installs: pip install 'incvec[cluster]'."
        ) from None
    try:
        files, root = url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"the storage {address} cannot be opened: {error}.") from None
    return files, root.rstrip("/")


def check_storage(address: str) -> None:
    """Write a file there and remove it, before anything is started. A folder is created."""
    name = f".check-{uuid.uuid4().hex}"
    if not is_address(address):
        path = Path(address) / name
        write_bytes(path, b"", StorageError, "Give --storage a folder that all nodes may write to.")
        path.unlink()
        return
    with tempfile.TemporaryDirectory() as scratch:
        storage, path = Storage(address, Path(scratch)), Path(scratch) / name
        path.write_bytes(b"1")
        storage.store(path)
        storage._remove(path)


def fetch_folder(address: str, folder: Path) -> None:
    """Copy the folder at the address to this machine, unless it is here already. It appears when it is complete."""
    if folder.exists():
        return
    files, root = open_address(address)
    temporary = folder.with_name(f".{folder.name}.fetched")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        files.get(f"{root}/", f"{temporary}/", recursive=True)
        os.replace(temporary, folder)
    except Exception as error:  # a file system may raise anything
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            f"{address} could not be copied to {folder} ({type(error).__name__}: {error}). Check the address of "
            "--data-source and the free space on this node."
        ) from error


def is_object_store(files: Any) -> bool:
    protocol = files.protocol
    return not OBJECT_STORES.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)


@contextmanager
def scratch_folder(sweep: str, worker: str) -> Iterator[Path]:
    """A folder of this worker on the disk of its node, removed at the end; so are those of workers that were killed.

    It is in INCVEC_SCRATCH, or where the system has its temporary files.
    """
    parent = Path(os.environ.get("INCVEC_SCRATCH") or tempfile.gettempdir()) / f"incvec-{sweep}"
    if parent.is_symlink() or (parent.exists() and parent.stat().st_uid != os.getuid()):
        raise StorageError(
            f"{parent} belongs to another user. Set INCVEC_SCRATCH to a folder of your own on this node."
        )
    for file in parent.glob("*/.lock"):
        lock = FileLock(file, StorageError)
        with suppress(StorageError, OSError):
            if lock.acquire():
                shutil.rmtree(file.parent, ignore_errors=True)
                lock.release()
    folder = parent / worker
    lock = FileLock(folder / ".lock", StorageError)
    while not (lock.acquire() and lock.path.exists()):  # a worker that starts now may take it for one of a killed one
        lock.release()
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                parent.rmdir()
