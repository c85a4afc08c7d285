"""`incvec data pack`, which shows packing as it goes, and `incvec data aircraft`."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from statistics import median_low
from typing import Annotated

import typer
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from incvec.data import aircraft
from incvec.data.class_lists import CLASS_LISTS, find_class_list
from incvec.data.folder import Listing, quiet_pillow
from incvec.data.layouts import LAYOUTS, Layout, list_images
from incvec.data.store.open import LIST, amount
from incvec.data.store.repair import repair
from incvec.data.store.write import pack
from incvec.study.tables import duration

QUIET = 10.0  # seconds between two lines where there is no terminal
LOOKS = 20  # images that are looked at for their size


class Unreadable(StrEnum):
    refuse = "refuse"
    leave_out = "leave-out"


LayoutName = StrEnum("LayoutName", {name.replace("-", "_"): name for name in LAYOUTS})  # type: ignore[misc]


class Meter:
    """How far something is with its images: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, word: str = "packing") -> None:
        self.console, self.word = console, word
        self.bar: Progress | None = None
        self.began: tuple[float, int] | None = None
        self.told = time.monotonic()
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.began is None:
            self.began = now, done
            if self.console.is_terminal:
                columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
                texts = TextColumn(self.word), TextColumn("{task.fields[rate]}")
                self.bar = Progress(texts[0], *columns, texts[1], console=self.console, expand=True)
                self.bar.start()
                self.row = self.bar.add_task("", total=None, rate="")
        self.done = done
        rate = (done - self.began[1]) / max(now - self.began[0], 1e-9)
        if self.bar is not None:
            self.bar.update(self.row, completed=done, total=total, rate=f"{rate:.0f} images/s")
        elif now - self.told >= QUIET:
            self.told = now
            left = f", {duration((total - done) / rate)} left" if rate else ""
            self.console.print(f"{self.word}: {done} of {total} images, {rate:.0f} images/s{left}", highlight=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    @property
    def seconds(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began[0]


class PackingMeter(Meter):
    """Of packing, which may have to read back what is there before it goes on."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.reading = Meter(console, "reading back")

    def reading_back(self, done: int, total: int) -> None:
        if self.reading.began is None:
            self.tell("this store was broken off: what is there is read back and verified first")
        self.reading(done, total)

    def __call__(self, done: int, total: int) -> None:
        if self.began is None:
            self.reading.close()
            if done:
                self.tell(f"going on: {done} of {total} images were packed before")
        super().__call__(done, total)

    def tell(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.reading.close()
        super().close()

    def summary(self) -> str:
        if self.began is None:
            return "packed before"
        return f"{self.done - self.began[1]} images packed in {duration(self.seconds)}"


@contextmanager
def stoppable() -> Iterator[None]:
    """Asked to end (SIGTERM), this process ends as with Ctrl-C: what is being written is finished and told."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def enlarged(listing: Listing, size: int) -> str | None:
    """What to say where images are smaller than what they are to be stored as, by a look at some."""
    sides = []
    for file, _ in listing.train[:: max(1, len(listing.train) // LOOKS)][:LOOKS]:
        with suppress(Exception), quiet_pillow(), Image.open(file) as image:  # packing tells of what cannot be read
            sides.append(min(image.size))
    if not sides or median_low(sides) >= size:
        return None
    side = median_low(sides)
    return f"most of these images are smaller (short side {side}) and will be enlarged; --size {side} would not do that"


def data_pack(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The images: train/ and val/, or class folders.")],
    store: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make; the data root of later runs.")],
    size: Annotated[
        int, typer.Option(min=1, help="The side images are stored with; from 128 on, 7/8 of it is seen.")
    ] = 256,
    classes: Annotated[
        str | None,
        typer.Option(help=f"Some classes only: {', '.join(CLASS_LISTS)}, or a file of names.", show_default="all"),
    ] = None,
    layout: Annotated[LayoutName | None, typer.Option(help="How they lie.", show_default="by looking")] = None,
    ground_truth: Annotated[
        Path | None, typer.Option(help="The classes of a flat val/.", show_default="looked for beside it")
    ] = None,
    unreadable: Annotated[Unreadable, typer.Option(help="What to do where images cannot be read.")] = Unreadable.refuse,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one a core")] = None,
    mend: Annotated[
        bool, typer.Option("--repair", help="Verify a finished store and pack anew what is damaged alone.")
    ] = False,
) -> None:
    """Decode a data set once, on all cores, into a store that runs open at once.

    Stopped in whatever way, the same command goes on where it was. Images are turned as their EXIF says and made RGB;
    the short side is brought to --size and the middle square kept.
    """
    console = Console()
    chosen = None if classes is None else find_class_list(classes)
    found = list_images(source, None if layout is None else layout.value, chosen, ground_truth)
    listing = found.listing
    total = len(listing.train) + len(listing.test)
    meter = PackingMeter(console)
    meter.tell(
        f"{found.name} layout ({listing.rule}): {len(listing.classes)} classes, {len(listing.train)} training and "
        f"{len(listing.test)} test images, {amount(total * 3 * size * size)} at {size} x {size}"
    )
    if listing.ignored:
        meter.tell(f"{listing.ignored} other file(s) ignored: not images by their names")
    if mend:
        return _repair(found, store, size, unreadable, workers, meter)
    if told := enlarged(listing, size):
        meter.tell(told)
    try:
        with stoppable():
            made = pack(found, store, size, unreadable.value, workers, meter, reading_back=meter.reading_back)
    finally:
        meter.close()
    summary, left_out = meter.summary(), made.about["left_out"]
    if left_out:
        summary += f"; {left_out} unreadable, listed in {made.root / LIST}"
    meter.tell(f"{summary}: {made.root}")


def _repair(
    found: Layout, store: Path, size: int, unreadable: Unreadable, workers: int | None, meter: PackingMeter
) -> None:
    meter.reading.word = "verifying"
    try:
        with stoppable():
            made, mended = repair(found, store, size, unreadable.value, workers, meter, reading_back=meter.reading)
    finally:
        meter.close()
    for place in mended:
        meter.tell(f"mended: {place}")
    meter.tell(f"{len(mended)} place(s) mended: {made.root}" if mended else f"nothing is damaged: {made.root}")


def data_aircraft(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A whole copy in torchvision's layout, or an .npz of encoded images.")
    ],
    root: Annotated[Path, typer.Argument(metavar="DST", help="The data root of later runs.")],
    variants: Annotated[
        Path | None, typer.Option(help="A file that names the variants to keep, one a line.", show_default="all")
    ] = None,
) -> None:
    """Make a copy of FGVC-Aircraft with some of its variants, in torchvision's layout, its own split kept.

    An .npz holds `label`, `is_test`, `class_names`, the files' bytes (`webp`, `jpg` or `png`) and their `offsets`.
    """
    wanted = None if variants is None else [line.strip() for line in variants.read_text().splitlines() if line.strip()]
    for line in aircraft.copy(source.expanduser(), root.expanduser(), wanted):
        Console().print(line, highlight=False, markup=False, soft_wrap=True)


def register(data: typer.Typer) -> None:
    """Add the commands to `incvec data`."""
    data.command(
        "pack",
        epilog="[bold]Examples[/bold]\n\nincvec data pack ~/imagenet ~/imagenet-subset --classes imagenet-subset\n\n"
        "incvec data pack ~/tiny-imagenet-200 ~/tiny --size 64 --classes tiny-imagenet-100\n\n"
        "incvec data pack ~/photos ~/photos-packed --size 160 --unreadable leave-out",
    )(data_pack)
    data.command(
        "aircraft",
        epilog="[bold]Examples[/bold]\n\nincvec data aircraft aircraft20.npz ~/aircraft20\n\n"
        "incvec data aircraft ~/data ~/aircraft20 --variants twenty.txt",
    )(data_aircraft)
