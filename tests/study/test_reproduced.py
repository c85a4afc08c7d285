"""REPRODUCED.md comes from records only, and the committed page is current."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from incvec.presets import changed_settings, resolve
from incvec.study.comparisons import gain_table, main_table
from incvec.study.paper import ablation_configs, compare_gains, not_run_notes, paper_gains, paper_tables, sweep_configs
from incvec.study.reproduced import other_data_table, other_runs_table, render, time_table
from incvec.study.runs import load_runs, settings_key
from incvec.study.settings_tables import bounds_table, settings_table
from incvec.study.tables import Table
from tests.study.samples import sample

RESULTS = Path(__file__).parents[2] / "results"


def record(
    seed: int, aa: float, *addons: str, dataset: str = "cifar100", method: str = "podnet", **changed: Any
) -> dict[str, Any]:
    config = resolve({"method": method, "dataset": dataset, "addons": list(addons), "seed": seed, **changed})
    return {
        "method": method, "addons": list(addons), "dataset": dataset, "tasks": 5, "oracle": False, "seed": seed,
        "metrics": {"AA": aa, "LA": aa - 10, "FM": 20.0}, "config": config.resolved(), "seconds": 60.0,
        "environment": {"device": "a card", "commit": "abc"}, "accuracy": [[80.0]], "test_counts": [100],
    }  # fmt: skip


def row_of(table: Table | list[str] | None, start: str) -> list[str]:
    """The cells of the one row of a table, or of Markdown lines, that starts like this."""
    assert table is not None
    lines = table.markdown().splitlines() if isinstance(table, Table) else table
    (line,) = [line for line in lines if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def sections(text: str) -> dict[str, list[str]]:
    """Lines by their nearest heading."""
    lines: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        lines.setdefault(heading, []).append(line)
    return lines


def test_mean_deviation_and_difference() -> None:
    table = main_table("cifar100", [record(0, 64.0), record(1, 66.0)])
    assert row_of(table, "| podnet | 5 |")[2:5] == ["65.00 ± 1.41 (2)", "64.00", "+1.00"]
    assert row_of(table, "| podnet | 10 |")[2] == "not run"


def test_clipped_forgetting_is_computed_from_the_matrix() -> None:
    """A task that is recognized better at the end counts as 0 in it, and as negative in FM."""
    own = record(0, 64.0) | {"accuracy": [[80.0], [70.0, 50.0], [60.0, 55.0, 90.0]], "test_counts": [100] * 3}
    assert row_of(main_table("cifar100", [own]), "| podnet | 5 |")[-1] == "10.00"


def paired_records() -> list[dict[str, Any]]:
    plain = [record(0, 60.0), record(1, 70.0)]
    return [*plain, record(0, 61.0, "ivt"), record(1, 73.0, "ivt"), record(2, 99.0, "ivt")]


def test_gains_are_paired() -> None:
    cells = row_of(gain_table("cifar100", paired_records()), "| podnet | 5 |")
    assert cells[2:5] == ["2", "+2.00 ± 1.00", "+1.36"]


def test_gain_of_a_row_with_another_variant_is_paired_with_a_host_of_that_variant() -> None:
    host, other = sample("finetune", variant="local"), sample("finetune", fall=1.0)
    merged = sample("finetune", "cofima", variant="local", fall=3.0)
    gains = compare_gains("cifar100", [host, other, merged], "cofima")
    expected = merged["metrics"]["AA"] - host["metrics"]["AA"]
    assert gains["finetune", 5][0].ours == pytest.approx((expected,))
    assert compare_gains("cifar100", [other, merged], "cofima") == {}


def test_pairs_with_different_base_tasks_are_listed() -> None:
    records = paired_records()
    assert "different base tasks" not in render(records)
    records[3]["accuracy"] = [[80.5]]
    assert "\nPairs with the same seed but different base tasks: podnet, 5 tasks, seed 1.\n" in render(records)


@pytest.mark.parametrize(
    ("changed", "text"), [({"podnet": {"memory": 7}}, "podnet.memory=7"), ({"order_seed": 7}, "order_seed=7")]
)
def test_changed_settings_stay_out_of_the_main_table(changed: dict[str, Any], text: str) -> None:
    records = [record(0, 64.0), record(0, 99.0, **changed)]
    assert row_of(main_table("cifar100", records), "| podnet | 5 |")[2] == "64.00"
    assert text in render(records)


def test_base_setting_equal_to_the_other_tasks_is_not_a_change() -> None:
    """A base setting that is left out is that of the other tasks."""
    same, other = sample("podnet", podnet={"base_lr": 0.1}), sample("podnet", podnet={"base_lr": 0.2})
    assert resolve({"method": "podnet", "dataset": "cifar100"}).sections["podnet"]["lr"] == 0.1
    assert changed_settings(same["config"]) == {}
    assert changed_settings(other["config"]) == {"podnet.base_lr": 0.2}
    lower = resolve({"method": "podnet", "dataset": "cifar100", "podnet": {"lr": 0.05}})
    assert changed_settings(lower.resolved()) == {"podnet.lr": 0.05}


@pytest.mark.parametrize("change", [{"order_seed": 7}, {"class_order": list(range(100))}, {"base_classes": 40}])
def test_another_class_order_or_base_is_another_experiment(change: dict[str, Any]) -> None:
    assert changed_settings(sample(**change)["config"]) == change
    assert changed_settings(sample(seed=3, tasks=10, device="cpu", engine="eager")["config"]) == {}


def test_row_of_another_variant_shows_that_variant_only() -> None:
    """CoFiMA's row of the paper merges models fine-tuned with one classifier per task."""
    records = [sample("finetune", "cofima", variant="local"), sample("finetune", "cofima", fall=9.0)]
    row = row_of(main_table("cifar100", records), "| finetune + cofima | 5 |")
    assert row[2] == f"{records[0]['metrics']['AA']:.2f}"
    assert "(2)" not in row[2]
    rest = other_runs_table("cifar100", records)
    assert rest is not None
    assert len(rest.rows) == 1  # the one that is not the paper's


SWITCHES = ("cifar100-switches", "cifar100-readings")
BOUNDS = ("cifar100-podnet", "cifar100-oracles")


def test_settings_have_their_gain_and_the_papers() -> None:
    host, default = sample("podnet", fall=7.0), sample("podnet", "ivt")
    other = sample("podnet", "ivt", fall=5.0, ivt={"interval": 5})
    unlike = sample("podnet", "ivt", fall=6.0, ivt={"interval": 5, "batchnorm": "layer"})
    table = settings_table(SWITCHES, "cifar100", [host, default, other, unlike])
    assert table is not None
    names = [(row[0], row[2]) for row in table.texts()]
    assert names == [("podnet + ivt", setting) for setting in ("the paper", "default", "`ivt.interval=5`")]
    a, b, c = (record["metrics"]["AA"] for record in (other, default, host))
    cells = row_of(table, "| podnet + ivt | 5 | `ivt.interval=5` |")
    assert cells[3:7] == ["1", f"{a:.2f}", f"{a - c:+.2f}", f"{a - 65.36:+.2f}"]
    assert row_of(table, "| podnet + ivt | 5 | default |")[3:6] == ["1", f"{b:.2f}", f"{b - c:+.2f}"]
    assert row_of(table, "| podnet + ivt | 5 | the paper |")[3:6] == ["3", "65.36", "+1.36"]
    assert table.note.count("`ivt.fisher_loss=own`") == 4  # by host, each once, though both sweeps have PODNet's
    assert "fcs + ivt, 5 tasks: `ivt.batchnorm=keep, ivt.last=teleport" in table.note
    rest = other_runs_table("cifar100", [host, default, other, unlike])
    assert rest is not None
    (row,) = rest.texts()
    assert "ivt.batchnorm=layer" in row[2]


def test_settings_are_compared_on_the_same_seeds_and_other_bases_are_marked() -> None:
    host, default = sample("podnet", fall=7.0), sample("podnet", "ivt")
    again = sample("podnet", "ivt", fall=1.0, seed=1)  # a seed without other settings
    other = sample("podnet", "ivt", fall=5.0, ivt={"interval": 5})
    table = settings_table(SWITCHES, "cifar100", [host, default, again, other])
    assert table is not None
    assert row_of(table, "| podnet + ivt | 5 | default |")[3:5] == ["1", f"{default['metrics']['AA']:.2f}"]
    assert "†" not in table.markdown() + table.note
    other["accuracy"][0][0] += 0.5
    table = settings_table(SWITCHES, "cifar100", [host, default, again, other])
    assert table is not None
    assert [row[2] for row in table.texts()] == ["the paper", "default", "`ivt.interval=5` †"]
    assert table.note.startswith("† Started from another base task")


def test_settings_of_a_run_without_addons_are_compared_with_its_default() -> None:
    default, kept = sample("pass", tasks=25, fall=1.0), sample("pass", tasks=25, last_batch="keep", fall=2.0)
    table = settings_table(("last-batch",), "cifar100", [default, kept])
    gain = kept["metrics"]["LA"] - default["metrics"]["LA"]
    assert row_of(table, "| pass | 25 | default |")[5] == ""
    assert row_of(table, "| pass | 25 | `last_batch=keep` |")[8] == f"{gain:+.2f}"


def test_intervals_of_several_seeds_have_standard_errors() -> None:
    records = [sample("podnet", seed=seed, fall=4.0) for seed in range(3)]
    records += [sample("podnet", "ivt", seed=seed, fall=2.0 + seed, ivt={"interval": None}) for seed in range(3)]
    gains = [records[3 + seed]["metrics"]["LA"] - records[seed]["metrics"]["LA"] for seed in range(3)]
    error = statistics.stdev(gains) / 3**0.5
    row = row_of(settings_table(("ivt-interval",), "cifar100", records), "| podnet + ivt | 5 | `ivt.interval=null` |")
    assert row[3] == "3"
    assert row[8] == f"{statistics.mean(gains):+.2f} ± {error:.2f}"
    assert settings_table(("ivt-interval",), "imagenet-subset", records) is None


def test_oracles_and_joint_training() -> None:
    records = [
        sample(), sample(seed=1), sample("podnet", "ivt", fall=3.0), sample(oracle=True, fall=1.0), sample("joint"),
        sample(tasks=10), sample("mrfa", oracle=True, fall=1.0),
    ]  # fmt: skip
    table = bounds_table(BOUNDS, "cifar100", records)
    plain, ivt, oracle = (records[place]["metrics"]["LA"] for place in (0, 2, 3))
    assert row_of(table, "| podnet | 5 |")[2].endswith("(2)")
    assert row_of(table, "| podnet + ivt | 5 |")[-1] == f"{100 * (ivt - plain) / (oracle - plain):.0f} %"
    assert row_of(table, "| podnet oracle | 5 |")[3] == f"{oracle:.2f}"
    assert row_of(table, "| mrfa + ivt | 5 |")[3] == "not run"
    assert row_of(table, "| joint | 1 |")[2:] == ["72.50", "72.50", "", "", ""]
    assert table is not None
    missing = "pass oracle, 5 tasks; podnet oracle, 10 tasks; podnet oracle, 25 tasks"
    assert table.note == f"Not run: {missing}."
    assert "Not run: mrfa oracle, 5 tasks" in render([])
    assert other_runs_table("cifar100", records) is None


def test_cells_that_were_not_run_say_why() -> None:
    cells = {("a", 5): (), ("a", 10): (1.0,), ("b", 5): None, ("c", 5): ()}
    assert not_run_notes({"a": "too large", "b": "too large"}, cells) == ["Not run: a (5), b (5): too large."]
    assert not_run_notes({"": "no images"}, {("a", 5): (), ("b", 5): ()}) == ["Not run: all: no images."]
    assert not_run_notes({"": "no images"}, {("a", 5): (1.0,)}) == []
    text = render([sample("pass", "ivt", tasks=10)])
    assert "Not run: pass + ivt (5, 25), fcs + ivt (5, 10, 25): trained before a bug fix" in text


def pretrained(method: str, la: float, *addons: str, classes: int = 100, **changed: Any) -> dict[str, Any]:
    given = {"dataset": "cifar100", "seed": 0, **changed}
    config = resolve({"method": method, "addons": list(addons), **given})
    metrics = {"AA": la + 5, "LA": la, "FM": 8.0, "fm_spu": -1.0}
    return {
        "method": method, "addons": list(addons), "dataset": config.dataset, "tasks": config.tasks, "oracle": False,
        "seed": 0, "metrics": metrics, "config": config.resolved(), "seconds": 60.0, "class_order": [0] * classes,
        "environment": {"device": "a card", "commit": "abc"},
    }  # fmt: skip


def test_another_model_is_never_shown_as_clip() -> None:
    clip = [pretrained("flyp", 50.0), pretrained("flyp", 70.0, "ivt", flyp={"weights": "/a/copy"})]
    lite = [pretrained("flyp", 11.0, variant="lite"), pretrained("flyp", 14.0, "ivt", variant="lite")]
    made = sections(render([*clip, *lite]))
    with_clip, with_lite = made["CLIP ViT-B/16: CIFAR-100"], made["Not CLIP: CIFAR-100"]
    assert row_of(with_clip, "| flyp | 10 | 55")[2:] == ["55.00", "69.86", "50.00", "52.45", "8.00", "-1.00", "29.43"]
    assert "| flyp | 10 | +20.00 | +16.12 | +20.00 | +23.36 | +0.00 |" in with_clip
    assert row_of(with_lite, "| flyp | 10 | 16")[2:] == ["16.00", "11.00", "8.00", "-1.00"]
    assert "| flyp | 10 | +3.00 | +16.12 | +3.00 | +23.36 | +0.00 |" in with_lite  # gains are compared with the paper's
    assert "| host | tasks | AA | paper, with CLIP | LA | paper, with CLIP | FM |" in with_lite
    assert not [line for line in with_clip if "11.00" in line or "14.00" in line]
    assert not [line for line in with_lite if any(number in line for number in ("52.45", "69.86", "50.00"))]
    assert row_of(with_lite, "| spu | 10 |")[2:] == ["not run"] * 4
    scratch = next(lines for heading, lines in made.items() if "from scratch" in heading)
    assert not [line for line in scratch if "flyp" in line]


def test_runs_with_other_settings_have_a_table_of_their_own() -> None:
    other = pretrained("flyp", 33.0, variant="lite", flyp={"pixels": 96})
    few = pretrained("slca", 44.0, dataset="aircraft", tasks=5, classes=20, variant="lite")
    rate = pretrained("flyp", 66.0, variant="lite", held_out=10, stop_after=2, flyp={"lr": 3e-5})
    made = sections(render([other, few, rate]))
    assert row_of(made["Not CLIP: CIFAR-100"], "| flyp | 10 |")[3] == "not run"
    assert row_of(made["Not CLIP: FGVC-Aircraft, 20 of its 100 variants"], "| slca | 5 |")[3] == "44.00"
    assert "| 3e-05 | 71.00 | 66.00 |" in made["The learning rate, on held-out training images"]
    (line,) = [line for line in made["Other runs of pre-trained models"] if "lite0" in line]
    assert "lite0-minilm, 96 px" in line


def test_values_that_the_paper_does_not_report() -> None:
    missing = ["not run", "", ""]
    row = row_of(main_table("imagenet-subset", []), "| icarl | 25 |")
    assert row[2:] == ["not run", "52.97", "", *missing, *missing, ""]
    assert row_of(main_table("imagenet", []), "| podnet + ivt | 10 |")[3] == "65.07"
    assert "fcs" not in [row[0] for row in main_table("imagenet", []).texts()]


def test_average_gains_of_the_paper_are_those_of_its_rows() -> None:
    """The last line of its second table, which paper.yaml does not contain."""
    averages_of = {5: (3.93, 5.45, -8.90), 10: (5.36, 6.23, -11.65), 25: (6.61, 6.10, -12.53)}
    rows = paper_tables("scratch")["imagenet-subset"]["rows"]
    for tasks, averages in averages_of.items():
        gains = [paper_gains(rows, host, tasks) for host in ("podnet", "mrfa", "pass", "fcs")]
        for place, average in enumerate(averages):
            assert sum(gain[place] or 0 for gain in gains) / 4 == pytest.approx(average, abs=0.011)


def test_data_set_that_the_paper_does_not_have() -> None:
    def tiny(aa: float, *addons: str, **changed: Any) -> dict[str, Any]:
        return record(0, aa, *addons, dataset="tiny-imagenet-100", **changed)

    records = [tiny(50.0), tiny(40.0, variant="short"), tiny(43.5, "ivt", variant="short")]
    content = paper_tables("scratch")["tiny-imagenet-100"]
    table = other_data_table("tiny-imagenet-100", content, records)
    assert row_of(table, "| podnet | paper |")[3:6] == ["50.00", "not run", "not run"]
    assert row_of(table, "| podnet | short |")[3:8] == ["40.00", "43.50", "+3.50", "+0.95", "+1.36"]
    assert row_of(table, "| podnet | short |")[8] == ""  # ours on CIFAR-100
    assert "not run" in row_of(table, "| mrfa | paper |")
    assert ["mrfa", "short"] not in [row[:2] for row in table.texts()]  # a variant without runs is left out
    assert row_of(table, "| fcs | paper |")[3:7] == ["not run", "not run", "not run", "+2.92"]
    more = other_data_table("tiny-imagenet-100", content, [*records, record(0, 60.0), record(0, 61.25, "ivt")])
    headings = ["AA gain", "AA paper, imagenet-subset", "AA paper, cifar100", "AA ours, cifar100"]
    assert [column.label for column in more.columns[5:9]] == headings
    assert row_of(more, "| podnet | short |")[5:9] == ["+3.50", "+0.95", "+1.36", "+1.25"]
    text = render([*records, tiny(60.0, podnet={"memory": 7})])
    assert "64 x 64 pixels" in text
    assert text.count("podnet.memory=7") == 1  # among the other runs
    assert "variant=short" not in text  # those have rows of their own


def test_ablations() -> None:
    records = [
        record(0, 55.0, podnet={"memory": 5}), record(0, 61.0, "ivt", podnet={"memory": 5}), record(0, 65.0),
        record(0, 60.0, "ivt", method="pass", ivt={"structure": "kernel", "batchnorm": "recalibrate"}),
    ]  # fmt: skip
    made = sections(render(records))
    memory = next(lines for heading, lines in made.items() if heading.startswith("Memory size"))
    fisher = next(lines for heading, lines in made.items() if heading.startswith("Diagonal against full"))
    assert row_of(memory, "| podnet | `podnet.memory=5` |")[3:6] == ["55.00", "54.63", "+0.37"]
    assert row_of(memory, "| podnet + ivt | `podnet.memory=5` |")[3:6] == ["61.00", "62.04", "-1.04"]
    assert row_of(memory, "| podnet + eopc | `podnet.memory=10` |")[3:6] == ["not run", "62.90", ""]
    assert row_of(memory, "| podnet | `podnet.memory=20` |")[3:6] == ["65.00", "64.00", "+1.00"]  # the preset's
    assert row_of(fisher, "| pass + ivt | `ivt.structure=kernel` | 5 |")[3:6] == ["60.00", "59.73", "+0.27"]
    assert row_of(fisher, "| pass + ivt | `ivt.structure=diagonal` | 10 |")[-3:] == ["11.29", "", ""]
    assert "Other runs" not in made  # they are shown once


def test_ablations_agree_with_the_main_table_and_the_sweeps() -> None:
    for name, content in paper_tables("ablations").items():
        planned = {settings_key(config.resolved()) for config in sweep_configs(content["sweep"])}
        for row, config in zip(content["rows"], ablation_configs(name), strict=True):
            assert settings_key(config.resolved()) in planned
            if not changed_settings(config.resolved()):
                for own, first in zip(
                    row["paper"], paper_tables("scratch")["cifar100"]["rows"][row["run"]][row["tasks"]], strict=True
                ):
                    assert own in (first, None)


def test_committed_page_is_current() -> None:
    if not (RESULTS / "REPRODUCED.md").exists():
        return
    records = [run.record for run in load_runs([RESULTS])]
    assert (RESULTS / "REPRODUCED.md").read_text() == render(records), (
        "results/REPRODUCED.md is stale: run python -m incvec.study.reproduced results"
    )


def test_time_on_the_gpu_comes_from_records() -> None:
    def timed(*addons: str, shared: bool, **given: Any) -> dict[str, Any]:
        record = sample("podnet", *addons, **given)
        environment = {**record["environment"], "device": "NVIDIA card"}
        return record | {"environment": environment, "base": {"shared": shared}, "task_seconds": [240.0, *[60.0] * 5]}

    records = [timed(shared=False), timed(shared=False, seed=1), timed("ivt", shared=True), sample("mrfa")]
    records[1]["task_seconds"] = [480.0, *[120.0] * 5]
    table = time_table("cifar100", records)
    assert row_of(table, "| podnet |")[1:3] == ["6.0 ± 2.8", "7.5 ± 3.5"]
    assert row_of(table, "| podnet + ivt |")[1:4] == ["6.0 ± 2.8", "5.0", "not run"]
    assert row_of(table, "| mrfa |")[1:3] == ["", "not run"]  # not on a GPU
    assert table is not None
    assert "2 of 42 cells, base tasks included: 0.3 h for one seed, 0.9 h for 3" in table.note  # 6 + 7.5 + 5 minutes
    assert time_table("cifar100", [sample()]) is None
