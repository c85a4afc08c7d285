"""What `results/REPRODUCED.md` and a report say of pre-trained models: a table for each, headed with what it is.

CLIP's stands beside the paper's numbers. Any other model's stands alone: its numbers are no reproduction of CLIP's.
What IVT adds to it stands beside what it adds to CLIP in the paper, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from incvec.methods import find_method
from incvec.presets import changed_settings
from incvec.study import style
from incvec.study.compare import Comparison, known, made_from, minus, paper_file, row_name, spread
from incvec.study.sheet import Cell, Column, Row, Sheet, number, word
from incvec.study.sheet import spread as sheet_spread

Records = Sequence[Mapping[str, Any]]
MEASURES = ("AA", "LA", "FM", "fm_spu")
OWN_FM = ("rapf",)  # rows whose FM in the paper is the written formula's


@dataclass(frozen=True)
class Part:
    """One table: records of one data set with so many classes."""

    dataset: str
    title: str
    classes: int
    tasks: tuple[int, ...]
    rows: tuple[str, ...]


LITE_TITLE = "EfficientNet-Lite0 and MiniLM joined in closed form: a small dual encoder that is not CLIP"
HOSTS = ("zeroshot", "flyp", "flyp + ivt", "slca", "slca + ivt")


def clip_parts() -> list[Part]:
    content = paper_file()["pretrained"]
    return [Part(name, part["title"], 100, (5, 10), tuple(part["rows"])) for name, part in content.items()]


def lite_parts() -> list[Part]:
    rows = tuple(paper_file()["pretrained"]["cifar100"]["rows"])
    return [
        Part("cifar100", "CIFAR-100", 100, (10,), rows),
        Part("aircraft", "FGVC-Aircraft, 20 of its 100 variants", 20, (5,), HOSTS),
    ]


def starts_pretrained(record: Mapping[str, Any]) -> bool:
    return find_method(record["method"]).pretrained


def is_clip(record: Mapping[str, Any]) -> bool:
    return starts_pretrained(record) and record["config"][record["method"]]["net"] == "clip"


def chosen(part: Part, variant: str, records: Records) -> list[Mapping[str, Any]]:
    """The records that belong in a table: the variant's own settings, all classes of the part, no oracle."""
    found = []
    for record in records:
        if record["dataset"] != part.dataset or len(record["class_order"]) != part.classes:
            continue
        changed = set(changed_settings(record["config"])) - {"variant"}
        changed = {key for key in changed if not key.endswith(".weights")}  # a local copy
        if record["oracle"] or record["config"]["variant"] != variant or changed:
            continue
        found.append(record)
    return found


def values(row: str, tasks: int, records: Records) -> dict[str, str]:
    """Each measure over the seeds, or that it was not run."""
    own = [r for r in records if row_name(r) == row and r["tasks"] == tasks]
    found = {}
    for measure in MEASURES:
        known = [value for r in own if (value := r["metrics"].get(measure)) is not None]
        found[measure] = spread(known) if known else "not run" if not own else ""
    return found


def beside_the_paper(part: Part, records: Records) -> list[str]:
    """CLIP's table: FM as written, and `fm_spu`, which the paper's column is but for RAPF's row."""
    theirs = paper_file()["pretrained"][part.dataset]["rows"]
    lines = ["| row | tasks | AA | paper | LA | paper | FM | fm_spu | paper |", "|---" * 9 + "|"]
    for tasks in part.tasks:
        for row in part.rows:
            ours = values(row, tasks, records)
            a, last, forgetting = ("" if value is None else f"{value:.2f}" for value in theirs[row][tasks])
            forgetting += " (FM)" if row in OWN_FM else ""
            cells = [ours["AA"], a, ours["LA"], last, ours["FM"], ours["fm_spu"], forgetting]
            lines.append(f"| {row} | {tasks} | " + " | ".join(cells) + " |")
    return lines


def alone(part: Part, records: Records) -> list[str]:
    lines = ["| row | tasks | AA | LA | FM | fm_spu |", "|---" * 6 + "|"]
    for tasks in part.tasks:
        for row in part.rows:
            lines.append(f"| {row} | {tasks} | " + " | ".join(values(row, tasks, records).values()) + " |")
    return lines


def gain_rows(part: Part, records: Records) -> Iterator[tuple[str, int, list[Comparison]]]:
    """What IVT adds to a host, seed by seed, beside what it adds to CLIP in the paper (whose FM is another measure)."""
    theirs = paper_file()["pretrained"][part.dataset]["rows"]
    for tasks, row in ((tasks, row) for tasks in part.tasks for row in part.rows):
        pairs = [
            (plain["metrics"], ivt["metrics"])
            for plain in records for ivt in records
            if (row_name(plain), row_name(ivt)) == (row, f"{row} + ivt")
            and plain["tasks"] == ivt["tasks"] == tasks and plain["seed"] == ivt["seed"]
            and plain.get("order_seed") == ivt.get("order_seed")
        ]  # fmt: skip
        if pairs:
            values = []
            for place, m in enumerate(("AA", "LA", "FM")):
                paper = theirs[f"{row} + ivt"][tasks][place] - theirs[row][tasks][place] if place < 2 else None
                values.append(Comparison(known(minus(b[m], a[m]) for a, b in pairs), paper))
            yield row, tasks, values


def gains(part: Part, records: Records, clip: bool) -> list[str]:
    lines = []
    for row, tasks, values in gain_rows(part, records):
        texts = []
        for value in values:
            found = spread(value.ours) if value.ours else ""
            texts.append(found if not found or found.startswith("-") else f"+{found}")
            texts += [f"{value.paper:+.2f}"] if value.paper is not None else []
        lines.append(f"| {row} | {tasks} | " + " | ".join(texts) + " |")
    paper = "paper" if clip else "paper, with CLIP"
    heads = ["host", "tasks", "AA", paper, "LA", paper, "FM"]
    head = ["", "IVT adds, in points:", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return [*head, *lines] if lines else []


def gain_sheet(part: Part, records: Records) -> Sheet | None:
    """The same for a report, of a model that is not the paper's."""
    rows = []
    for row, tasks, (average, last, forgetting) in gain_rows(part, records):
        cells = [word(style.label(row)), number(tasks, "d"), number(len(average.ours), "d")]
        for value in (average, last):
            cells += [sheet_spread(value, "+.2f", error=True), number(value.paper, "+.2f")]
        rows.append(Row((*cells, sheet_spread(forgetting, "+.2f", error=True))))
    columns = [Column("host", number=False), Column("tasks"), Column("seeds")]
    columns += [Column(label, heading) for heading in ("AA ↑", "LA ↑") for label in ("ours", "paper, with CLIP")]
    note = f"{LITE_TITLE}. With IVT minus without, paired by seed, in points."
    title = f"Not CLIP: {part.title}: what IVT adds"
    return Sheet(f"{part.dataset}-lite-gains", title, (*columns, Column("FM ↓")), tuple(rows), note) if rows else None


def sheets(dataset: str, records: Records) -> list[Sheet]:
    """The tables for a report, of those models that were run."""
    records = [r for r in records if starts_pretrained(r)]
    made: list[Sheet] = []
    for clip, parts in ((True, clip_parts()), (False, lite_parts())):
        for part in parts:
            own = chosen(part, "paper" if clip else "lite", records)
            if part.dataset == dataset and own:
                added = None if clip else gain_sheet(part, own)
                made += [part_sheet(part, own, clip), *([added] if added else [])]
    tried = [r for r in rate_records(records) if r["dataset"] == dataset]
    return [*made, rate_sheet(dataset, tried)] if tried else made


def rate_sheet(dataset: str, records: Records) -> Sheet:
    rows = []
    for r in records:
        rate = r["config"][r["method"]]["lr"]
        cells = [word(style.label(row_name(r))), Cell(f"{rate:g}", rate)]
        rows.append(Row((*cells, number(r["metrics"]["AA"]), number(r["metrics"]["LA"]))))
    columns = (Column("run", number=False), Column("rate"), Column("AA ↑"), Column("LA ↑"))
    note = "On training images held out of the first tasks; test images had no say."
    return Sheet(f"{dataset}-rate", "Not CLIP: the choice of the learning rate", columns, tuple(rows), note)


def part_sheet(part: Part, records: Records, clip: bool) -> Sheet:
    theirs = paper_file()["pretrained"][part.dataset]["rows"] if clip else {}
    rows = []
    for tasks, row in ((tasks, row) for tasks in part.tasks for row in part.rows):
        own = [r for r in records if row_name(r) == row and r["tasks"] == tasks]
        cells = [word(style.label(row)), number(tasks, "d"), number(len(own), "d")]
        told: Sequence[float | None] = theirs[row][tasks] if clip else ()
        for place, measure in enumerate(MEASURES):
            ours = Comparison(known(r["metrics"].get(measure) for r in own), None)
            cells.append(sheet_spread(ours, missing="–" if own else "not run"))
            cells += [number(told[place])] if clip and place < 2 else []
        if clip:
            forgetting = number(told[2])
            cells.append(Cell(f"{forgetting.text} (FM)", forgetting.value) if row in OWN_FM else forgetting)
        rows.append(Row(tuple(cells), quiet=not own))
    columns = [Column("method", number=False), Column("tasks"), Column("seeds")]
    for heading in ("AA ↑", "LA ↑"):
        columns += [Column("ours", heading), Column("paper", heading)] if clip else [Column(heading)]
    columns += [Column("FM ↓"), Column("fm_spu"), *([Column("paper's FM")] if clip else [])]
    if clip:
        title = f"CLIP ViT-B/16: {part.title} (the paper's table of pre-trained models)"
        note = "FM is the written formula; the paper's own numbers agree with fm_spu instead, save RAPF's."
    else:
        title = f"Not CLIP: {part.title}"
        note = f"{LITE_TITLE}. None of these numbers is one of CLIP's or comparable with the paper's."
    return Sheet(f"{part.dataset}-{'clip' if clip else 'lite'}", title, tuple(columns), tuple(rows), note)


def section(records: Records) -> list[str]:
    """All tables of pre-trained models, as lines."""
    records = [r for r in records if starts_pretrained(r)]
    lines = [
        "",
        "## Pre-trained: CLIP ViT-B/16 (the paper's table of pre-trained models)",
        "",
        "Commands: `incvec sweep clip-cifar100`, `incvec sweep clip-aircraft`. FM is the written formula; the paper's",
        "own numbers agree with `fm_spu` instead, save RAPF's: several are below what the formula can give.",
    ]
    used: list[Mapping[str, Any]] = []
    for part in clip_parts():
        own = chosen(part, "paper", records)
        lines += ["", f"### CLIP ViT-B/16: {part.title}", "", *beside_the_paper(part, own), *gains(part, own, True)]
        used += own
    lines += made_from(used)
    lines += [
        "",
        f"## Pre-trained: {LITE_TITLE}",
        "",
        "None of these numbers is one of CLIP's or comparable with the paper's. Commands:",
        "`incvec sweep lite-cifar100`, `incvec sweep lite-aircraft`; the learning rate is chosen once, by",
        "`incvec sweep lite-rate`: FLYP without IVT, on training images held out of CIFAR-100's first two tasks.",
    ]
    lite: list[Mapping[str, Any]] = []
    for part in lite_parts():
        own = chosen(part, "lite", records)
        lines += ["", f"### Not CLIP: {part.title}", "", *alone(part, own), *gains(part, own, False)]
        lite += own
    lines += rates(records) + made_from([*lite, *rate_records(records)])
    return lines + others([r for r in records if r not in used and r not in lite])


def rate_records(records: Records) -> list[Mapping[str, Any]]:
    """The runs that chose the learning rate, by rate."""
    own = [r for r in records if r["config"].get("held_out") and r["config"]["variant"] == "lite"]
    return sorted(own, key=lambda r: float(r["config"][r["method"]]["lr"]))


def rates(records: Records) -> list[str]:
    """The choice of the learning rate."""
    own = rate_records(records)
    if not own:
        return []
    lines = ["", "### The learning rate, on held-out training images", "", "| rate | AA | LA |", "|---|---|---|"]
    for r in own:
        lines.append(f"| {r['config'][r['method']]['lr']:g} | {r['metrics']['AA']:.2f} | {r['metrics']['LA']:.2f} |")
    return lines


def others(records: Records) -> list[str]:
    """Runs with other settings, each with its model's name."""
    rows = [r for r in records if not r["config"].get("held_out")]
    if not rows:
        return []
    lines = ["", "### Other runs of pre-trained models", "", "| run | model | data | tasks | seed | AA | LA | FM |"]
    lines.append("|---" * 8 + "|")
    for r in sorted(rows, key=lambda r: (r["dataset"], row_name(r), r["tasks"], r["seed"])):
        own, m = r["config"][r["method"]], r["metrics"]
        pixels = f"{own['pixels']} px" if own.get("pixels") else None
        model = ", ".join(filter(None, (own["net"], own.get("tag"), pixels)))
        name = row_name(r) + (" (oracle)" if r["oracle"] else "")
        forgetting = "" if m["FM"] is None else f"{m['FM']:.2f}"
        lines.append(
            f"| {name} | {model} | {r['dataset']} ({len(r['class_order'])} classes) | {r['tasks']} | {r['seed']} | "
            f"{m['AA']:.2f} | {m['LA']:.2f} | {forgetting} |"
        )
    return lines
