"""The table of reproduced numbers comes from records alone, and the committed page is never stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from incvec.presets import changed_settings, resolve
from incvec.records import find_records, read_record
from incvec.study import ablations
from incvec.study.compare import kind, paper, paper_file, paper_gains, runs_of
from incvec.study.reproduced import bound_table, gains, others, page, stand_in, switch_table, table
from tests.study.samples import sample

RESULTS = Path(__file__).parents[2] / "results"


def record(
    seed: int, aa: float, *addons: str, dataset: str = "cifar100", method: str = "podnet", **changed: Any
) -> dict[str, Any]:
    config = resolve({"method": method, "dataset": dataset, "addons": list(addons), "seed": seed, **changed})
    return {
        "method": method, "addons": list(addons), "dataset": dataset, "tasks": 5, "oracle": False, "seed": seed,
        "metrics": {"AA": aa, "LA": aa - 10, "FM": 20.0}, "config": config.resolved(), "seconds": 60.0,
        "environment": {"device": "a card", "commit": "abc"}, "accuracy": [[80.0]],
    }  # fmt: skip


def row_of(lines: list[str], start: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_mean_spread_and_difference() -> None:
    lines = table("cifar100", [record(0, 64.0), record(1, 66.0)])
    cells = row_of(lines, "| podnet | 5 |")
    assert cells[2:5] == ["65.00 ± 1.41 (2)", "64.00", "+1.00"]
    assert row_of(lines, "| podnet | 10 |")[2] == "not run"


def test_gains_are_paired() -> None:
    records = [record(0, 60.0), record(1, 70.0), record(0, 61.0, "ivt"), record(1, 73.0, "ivt"), record(2, 99.0, "ivt")]
    cells = row_of(gains("cifar100", records), "| podnet | 5 |")
    assert cells[2:5] == ["2", "+2.00 ± 1.00", "+1.36"]


def test_pairs_of_two_base_tasks_are_told() -> None:
    records = [record(0, 60.0), record(1, 70.0), record(0, 61.0, "ivt"), record(1, 73.0, "ivt"), record(2, 99.0, "ivt")]
    assert not any("base task" in line for line in gains("cifar100", records))
    records[3]["accuracy"] = [[80.5]]
    assert gains("cifar100", records)[-1].endswith("though of one seed: podnet, 5 tasks, seed 1.")


def test_changed_settings_stay_out_of_the_main_table() -> None:
    records = [record(0, 64.0), record(0, 99.0, podnet={"memory": 7})]
    assert row_of(table("cifar100", records), "| podnet | 5 |")[2] == "64.00"
    assert "podnet.memory=7" in page(records)


def test_a_base_setting_spelt_out_is_no_change() -> None:
    """One that is left out is that of the other tasks: the two say the same."""
    spelt, unlike = sample("podnet", podnet={"base_lr": 0.1}), sample("podnet", podnet={"base_lr": 0.2})
    assert resolve({"method": "podnet", "dataset": "cifar100"}).sections["podnet"]["lr"] == 0.1
    assert changed_settings(spelt["config"]) == {}
    assert changed_settings(unlike["config"]) == {"podnet.base_lr": 0.2}
    lower = resolve({"method": "podnet", "dataset": "cifar100", "podnet": {"lr": 0.05}})
    assert changed_settings(lower.resolved()) == {"podnet.lr": 0.05}


def test_another_class_order_is_another_experiment() -> None:
    given = {"method": "podnet", "dataset": "cifar100"}
    assert changed_settings(resolve({**given, "order_seed": 7}).resolved()) == {"order_seed": 7}
    order = list(range(100))
    assert changed_settings(resolve({**given, "class_order": order}).resolved()) == {"class_order": order}


def test_a_row_of_another_variant_counts_with_that_variant_alone() -> None:
    """What the paper merges in CoFiMA's row is fine-tuning with a classifier for each task."""
    records = [sample("finetune", "cofima", variant="local"), sample("finetune", "cofima", fall=9.0)]
    row = row_of(table("cifar100", records), "| finetune + cofima | 5 |")
    assert row[2] == f"{records[0]['metrics']['AA']:.2f}"
    assert "(2)" not in row[2]
    assert len(others("cifar100", records)) == 3  # two lines above, and the one that is not the paper's


def test_switches_stand_beside_their_host_and_the_paper() -> None:
    host, default = sample("podnet", fall=7.0), sample("podnet", "ivt")
    other = sample("podnet", "ivt", fall=5.0, ivt={"interval": 5})
    unlike = sample("podnet", "ivt", fall=6.0, ivt={"interval": 5, "batchnorm": "interpolate"})
    lines = switch_table("cifar100", [host, default, other, unlike])
    assert len(lines) == 2 + (2 + 9) + (2 + 2) + 2 * (2 + 4)
    a, b, c = (record["metrics"]["AA"] for record in (other, default, host))
    cells = row_of(lines, "| podnet + ivt | `ivt.interval=5` |")
    assert cells[2:6] == ["1", f"{a:.2f}", f"{a - c:+.2f}", f"{a - 65.36:+.2f}"]
    assert row_of(lines, "| podnet + ivt | `default` |")[2:5] == ["1", f"{b:.2f}", f"{b - c:+.2f}"]
    assert row_of(lines, "| podnet + ivt | `ivt.interval=20` |")[2:6] == ["0", "not run", "", ""]
    assert row_of(lines, "| mrfa + ivt | the paper |")[2:5] == ["3", "63.50", "+1.65"]
    rest = others("cifar100", [host, default, other, unlike])
    assert len(rest) == 3
    assert "ivt.batchnorm=interpolate" in rest[2]


def test_switches_are_told_for_their_seeds_and_from_the_hosts_base() -> None:
    host, default = sample("podnet", fall=7.0), sample("podnet", "ivt")
    again = sample("podnet", "ivt", fall=1.0, seed=1)  # the switches have no such seed
    other = sample("podnet", "ivt", fall=5.0, ivt={"interval": 5})
    lines = switch_table("cifar100", [host, default, again, other])
    assert row_of(lines, "| podnet + ivt | `default` |")[2:4] == ["1", f"{default['metrics']['AA']:.2f}"]
    assert not any("†" in line for line in lines)
    other["accuracy"][0][0] += 0.5
    lines = switch_table("cifar100", [host, default, again, other])
    assert [line.split(" |")[1] for line in lines if "†" in line and "|" in line] == [" `ivt.interval=5` †"]
    assert lines[-1].startswith("† Begun at another trained base task")


def test_the_oracle_and_joint_training() -> None:
    records = [
        sample(), sample(seed=1), sample("podnet", "ivt", fall=3.0), sample(oracle=True, fall=1.0), sample("joint"),
        sample(tasks=10),
    ]  # fmt: skip
    lines = bound_table("cifar100", records)
    plain, ivt, oracle = (records[place]["metrics"]["LA"] for place in (0, 2, 3))
    assert row_of(lines, "| podnet | 5 |")[2] == "2"
    assert row_of(lines, "| podnet + ivt | 5 |")[-1] == f"{100 * (ivt - plain) / (oracle - plain):.0f} %"
    assert row_of(lines, "| podnet (oracle) | 5 |")[4] == f"{oracle:.2f}"
    assert row_of(lines, "| joint | 1 |")[2:] == ["1", "72.50", "72.50", "", ""]
    assert "not run" in row_of(bound_table("cifar100", []), "| joint | 1 |")
    assert others("cifar100", records) == []


# Pre-trained models ------------------------------------------------------------------------------------------


def pretrained(method: str, la: float, *addons: str, classes: int = 100, **changed: Any) -> dict[str, Any]:
    given = {"dataset": "cifar100", "seed": 0, **changed}
    config = resolve({"method": method, "addons": list(addons), **given})
    metrics = {"AA": la + 5, "LA": la, "FM": 8.0, "fm_spu": -1.0}
    return {
        "method": method, "addons": list(addons), "dataset": config.dataset, "tasks": config.tasks, "oracle": False,
        "seed": 0, "metrics": metrics, "config": config.resolved(), "seconds": 60.0, "class_order": [0] * classes,
        "environment": {"device": "a card", "commit": "abc"},
    }  # fmt: skip


def parts(text: str) -> dict[str, list[str]]:
    """Lines by their nearest heading."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        found.setdefault(heading, []).append(line)
    return found


def test_another_model_is_never_told_as_clip() -> None:
    clip = [pretrained("flyp", 50.0), pretrained("flyp", 70.0, "ivt", flyp={"weights": "/a/copy"})]
    lite = [pretrained("flyp", 11.0, variant="lite"), pretrained("flyp", 14.0, "ivt", variant="lite")]
    made = parts(page([*clip, *lite]))
    beside, alone = made["CLIP ViT-B/16: CIFAR-100"], made["Not CLIP: CIFAR-100"]
    assert row_of(beside, "| flyp | 10 | 55")[2:] == ["55.00", "69.86", "50.00", "52.45", "8.00", "-1.00", "29.43"]
    assert "| flyp | 10 | +20.00 | +16.12 | +20.00 | +23.36 | +0.00 |" in beside
    assert row_of(alone, "| flyp | 10 | 16")[2:] == ["16.00", "11.00", "8.00", "-1.00"]
    assert "| flyp | 10 | +3.00 | +16.12 | +3.00 | +23.36 | +0.00 |" in alone  # gains alone stand beside the paper's
    assert "| host | tasks | AA | paper, with CLIP | LA | paper, with CLIP | FM |" in alone
    assert not [line for line in beside if "11.00" in line or "14.00" in line]
    assert not [line for line in alone if any(number in line for number in ("52.45", "69.86", "50.00"))]
    assert row_of(alone, "| spu | 10 |")[2:] == ["not run"] * 4
    scratch = next(lines for heading, lines in made.items() if "from scratch" in heading)
    assert not [line for line in scratch if "flyp" in line]


def test_what_is_not_the_presets_stands_apart() -> None:
    other = pretrained("flyp", 33.0, variant="lite", flyp={"pixels": 96})
    few = pretrained("slca", 44.0, dataset="aircraft", tasks=5, classes=20, variant="lite")
    rate = pretrained("flyp", 66.0, variant="lite", held_out=10, stop_after=2, flyp={"lr": 3e-5})
    made = parts(page([other, few, rate]))
    assert row_of(made["Not CLIP: CIFAR-100"], "| flyp | 10 |")[3] == "not run"
    assert row_of(made["Not CLIP: FGVC-Aircraft, 20 of its 100 variants"], "| slca | 5 |")[3] == "44.00"
    assert "| 3e-05 | 71.00 | 66.00 |" in made["The learning rate, on held-out training images"]
    (line,) = [line for line in made["Other runs of pre-trained models"] if "lite0" in line]
    assert "lite0-minilm, 96 px" in line


# ImageNet, and what stands in for it ---------------------------------------------------------------------------


def test_values_the_paper_leaves_out() -> None:
    lines = table("imagenet-subset", [])
    assert row_of(lines, "| icarl | 25 |")[2:] == ["not run", "52.97", "", "not run", "", "", "not run", "", ""]
    assert row_of(table("imagenet", []), "| podnet + ivt | 10 |")[3] == "65.07"
    assert not [line for line in table("imagenet", []) if line.startswith("| fcs")]  # not reported there


def test_the_papers_average_gains_are_those_of_its_rows() -> None:
    """The last line of its second table, which nothing here is made from."""
    told = {5: (3.93, 5.45, -8.90), 10: (5.36, 6.23, -11.65), 25: (6.61, 6.10, -12.53)}
    for tasks, averages in told.items():
        hosts = [paper_gains(paper()["imagenet-subset"]["rows"], h, tasks) for h in ("podnet", "mrfa", "pass", "fcs")]
        for place, average in enumerate(averages):
            assert sum(gain[place] or 0 for gain in hosts) / 4 == pytest.approx(average, abs=0.011)


def test_a_data_set_in_place_of_another() -> None:
    def tiny(aa: float, *addons: str, **changed: Any) -> dict[str, Any]:
        return record(0, aa, *addons, dataset="tiny-imagenet-100", **changed)

    records = [tiny(50.0), tiny(40.0, variant="short"), tiny(43.5, "ivt", variant="short")]
    content = paper()["tiny-imagenet-100"]
    lines = stand_in("tiny-imagenet-100", content, records)
    assert row_of(lines, "| podnet | paper |")[3:6] == ["50.00", "not run", "not run"]
    assert row_of(lines, "| podnet | short |")[3:8] == ["40.00", "43.50", "+3.50", "+0.95", "+1.36"]
    assert row_of(lines, "| podnet | short |")[8] == ""  # ours on CIFAR-100
    assert "not run" in row_of(lines, "| mrfa | paper |")
    assert not any("mrfa | short" in line for line in lines)  # not missed where it was not run
    more = stand_in("tiny-imagenet-100", content, [*records, record(0, 60.0), record(0, 61.25, "ivt")])
    assert row_of(more, "| host |")[5:9] == [
        "AA gain",
        "AA paper, imagenet-subset",
        "AA paper, cifar100",
        "AA ours, cifar100",
    ]
    assert row_of(more, "| podnet | short |")[5:9] == ["+3.50", "+0.95", "+1.36", "+1.25"]
    assert row_of(lines, "| fcs | paper |")[3:7] == ["not run", "not run", "not run", "+2.92"]
    text = page([*records, tiny(60.0, podnet={"memory": 7})])
    assert "64 x 64 pixels" in text
    assert text.count("podnet.memory=7") == 1  # below, with what was changed
    assert "variant=short" not in text  # those have their own rows


def test_the_papers_tables_of_single_settings() -> None:
    records = [
        record(0, 55.0, podnet={"memory": 5}), record(0, 61.0, "ivt", podnet={"memory": 5}), record(0, 65.0),
        record(0, 60.0, "ivt", method="pass", ivt={"structure": "kernel", "batchnorm": "recalibrate"}),
    ]  # fmt: skip
    made = parts(page(records))
    memory = next(lines for heading, lines in made.items() if heading.startswith("Memory size"))
    fisher = next(lines for heading, lines in made.items() if heading.startswith("Diagonal against full"))
    assert row_of(memory, "| podnet | `podnet.memory=5` |")[3:6] == ["55.00", "54.63", "+0.37"]
    assert row_of(memory, "| podnet + ivt | `podnet.memory=5` |")[3:6] == ["61.00", "62.04", "-1.04"]
    assert row_of(memory, "| podnet + eopc | `podnet.memory=10` |")[3:6] == ["not run", "62.90", ""]
    assert row_of(memory, "| podnet | `podnet.memory=20` |")[3:6] == ["65.00", "64.00", "+1.00"]  # the preset's
    assert row_of(fisher, "| pass + ivt | `ivt.structure=kernel` | 5 |")[3:6] == [
        "60.00",
        "59.73",
        "+0.27",
    ]
    assert row_of(fisher, "| pass + ivt | `ivt.structure=diagonal` | 10 |")[-2:] == ["11.29", ""]
    assert "Other runs" not in made  # they are shown once


def test_single_settings_agree_with_the_first_table_and_with_the_sweeps() -> None:
    for name, content in paper_file()["ablations"].items():
        planned = {kind(config.resolved()) for config in runs_of(content["sweep"])}
        for row, config in zip(content["rows"], ablations.configs(name), strict=True):
            assert kind(config.resolved()) in planned
            if not changed_settings(config.resolved()):
                for own, first in zip(row["paper"], paper()["cifar100"]["rows"][row["run"]][row["tasks"]], strict=True):
                    assert own in (first, None)


def test_committed_page_is_current() -> None:
    if not (RESULTS / "REPRODUCED.md").exists():
        return
    records = [read_record(path) for path in find_records([RESULTS])]
    assert (RESULTS / "REPRODUCED.md").read_text() == page(records), (
        "results/REPRODUCED.md is stale: run python -m incvec.study.reproduced results"
    )
