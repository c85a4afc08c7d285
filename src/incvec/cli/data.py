"""`incvec data check`, `incvec data pack` and `incvec data aircraft`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from incvec.cli.common import say
from incvec.cli.steps import Steps
from incvec.data.class_lists import CLASS_LISTS, find_class_list
from incvec.declarations import declared
from incvec.errors import check_out
from incvec.study.tables import duration

if TYPE_CHECKING:
    from incvec.data.listing import Listing

SAMPLED = 20  # images whose size is read before packing


class Unreadable(StrEnum):
    refuse = "refuse"
    leave_out = "leave-out"


app = typer.Typer(no_args_is_help=True, help="Check, pack and copy data sets.")
LAYOUTS = declared("incvec.data.layouts", "LAYOUTS")
LayoutName = StrEnum("LayoutName", {name.replace("-", "_"): name for name in LAYOUTS})  # type: ignore[misc]


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="data")


class ImageProgress:
    """Progress over images; `on_start` is called first, with the number of images done before."""

    def __init__(
        self, action: str, console: Console | None = None, on_start: Callable[[int, int], None] | None = None
    ) -> None:
        self.action, self.console, self.on_start = action, console or Console(), on_start
        self.start: tuple[float, int] | None = None  # time, and images done before
        self.done = 0
        self.steps: Steps | None = None

    def __call__(self, done: int, total: int) -> None:
        if self.steps is None:
            self.start = time.monotonic(), done
            if self.on_start is not None:
                self.on_start(done, total)
            self.steps = Steps(self.console)
        self.done = done
        self.steps.show(self.action, done, total)

    def close(self) -> None:
        if self.steps is not None:
            self.steps.close()


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: current writes are finished, and the message says how to resume."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def upscaling_warning(listing: Listing, size: int) -> str | None:
    """A warning if most images are smaller than the size they are stored with, from a sample of them."""
    from PIL import Image

    from incvec.data.image_files import quiet_pillow

    sides = []
    for file, _ in listing.train[:: max(1, len(listing.train) // SAMPLED)][:SAMPLED]:
        with suppress(Exception), quiet_pillow(), Image.open(file) as image:  # packing reports unreadable images
            sides.append(min(image.size))
    if not sides or median_low(sides) >= size:
        return None
    side = median_low(sides)
    return f"most of these images are smaller (short side {side}) and will be upscaled; --size {side} avoids that"


@app.command("check", epilog="[bold]Example[/bold]\n\nincvec data check ~/data")
def data_check(
    folder: Annotated[
        Path, typer.Argument(help="Folder with cifar-100-python/, fgvc-aircraft-2013b/ or class folders, or a store.")
    ],
) -> None:
    """Verify a data set: checksums of CIFAR-100 or a packed store, every image of FGVC-Aircraft or class folders."""
    from incvec.data.datasets import check

    with closing(ImageProgress("checking", Console(stderr=True))) as progress:
        lines = check(folder, progress)
    for line in lines:
        typer.echo(line)


@app.command(
    "pack",
    epilog="[bold]Examples[/bold]\n\nincvec data pack ~/imagenet ~/imagenet-subset --classes imagenet-subset\n\n"
    "incvec data pack ~/tiny-imagenet-200 ~/tiny --size 64 --classes tiny-imagenet-100\n\n"
    "incvec data pack ~/photos ~/photos-packed --size 160 --unreadable leave-out",
)
def data_pack(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The images: train/ and val/, or class folders.")],
    store: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create; the data root of later runs.")],
    size: Annotated[
        int, typer.Option(min=1, help="Side of the stored images; from 128 on, networks see 7/8 of it.")
    ] = 256,
    classes: Annotated[
        str | None,
        typer.Option(help=f"Only some classes: {', '.join(CLASS_LISTS)}, or a file of names.", show_default="all"),
    ] = None,
    layout: Annotated[LayoutName | None, typer.Option(help="Layout of the files.", show_default="detected")] = None,
    ground_truth: Annotated[
        Path | None, typer.Option(help="Classes of a flat val/.", show_default="searched for beside it")
    ] = None,
    unreadable: Annotated[Unreadable, typer.Option(help="What to do if images cannot be read.")] = Unreadable.refuse,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one per core")] = None,
) -> None:
    """Decode a data set once, on all cores, into a store that runs open immediately.

    Interrupted at any time, the same command resumes. Images are rotated according to their EXIF orientation and
    converted to RGB; the short side is resized to --size and the center square is stored.
    """
    check_out(store.expanduser(), "a packed store", "DST")
    class_list = None if classes is None else find_class_list(classes)

    from incvec.data.layouts import list_images
    from incvec.data.store.open import UNREADABLE, format_bytes
    from incvec.data.store.write import pack

    listing = list_images(source, None if layout is None else layout.value, class_list, ground_truth)
    total = len(listing.train) + len(listing.test)
    say(
        f"{listing.layout} layout ({listing.split}): {len(listing.classes)} classes, {len(listing.train)} training and "
        f"{len(listing.test)} test images, {format_bytes(total * 3 * size * size)} at {size} x {size}"
    )
    if listing.ignored:
        say(f"{listing.ignored} other file(s) ignored: no image extension")
    if warning := upscaling_warning(listing, size):
        say(warning)

    def announce_resuming(done: int, total: int) -> None:
        verifying.close()
        if done:
            say(f"resuming: {done} of {total} images are packed")

    interrupted = "packing was interrupted before: verifying the packed images"
    verifying = ImageProgress("verifying", on_start=lambda *_: say(interrupted))
    packing = ImageProgress("packing", on_start=announce_resuming)
    with closing(verifying), closing(packing), sigterm_as_interrupt():
        packed = pack(listing, store, size, unreadable.value, workers, packing, verify_progress=verifying)
    summary = "already packed"
    if packing.start is not None:
        started, before = packing.start
        summary = f"{packing.done - before} images packed in {duration(time.monotonic() - started)}"
    left_out = packed.about["left_out"]
    note = f"; {left_out} unreadable, listed in {packed.root / UNREADABLE}" if left_out else ""
    say(f"{summary}{note}: {packed.root}")


@app.command(
    "aircraft",
    epilog="[bold]Examples[/bold]\n\nincvec data aircraft aircraft20.npz ~/aircraft20\n\n"
    "incvec data aircraft ~/data ~/aircraft20 --variants twenty.txt",
)
def data_aircraft(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Complete copy in torchvision's layout, or an .npz of encoded images.")
    ],
    root: Annotated[Path, typer.Argument(metavar="DST", help="The data root of later runs.")],
    variants: Annotated[
        Path | None, typer.Option(help="File with the variants to copy, one per line.", show_default="all")
    ] = None,
) -> None:
    """Copy some variants of FGVC-Aircraft, in torchvision's layout, keeping the official split.

    An .npz has `label`, `is_test`, `class_names`, the bytes of the files (`webp`, `jpg` or `png`) and their `offsets`.
    """
    check_out(root.expanduser(), "a data root", "DST")

    from incvec.data import aircraft

    names = None if variants is None else aircraft.read_lines(variants)
    for line in aircraft.copy(source.expanduser(), root.expanduser(), names):
        say(line)
