"""The headline: what each add-on adds, paired by seed."""

from __future__ import annotations

import statistics

from incvec.study.gains import addon_gains, gain_sentence, gains_table, headline
from incvec.study.groups import group_runs
from incvec.study.paper import Comparison
from tests.study.samples import runs_of, sample, study


def test_gains_are_differences_between_runs_of_one_seed() -> None:
    records = {f"{s}": sample(seed=s) for s in range(3)}
    records |= {f"ivt-{s}": sample("podnet", "ivt", seed=s, fall=3.0 + 0.3 * s) for s in range(1, 4)}
    (gain,) = addon_gains(group_runs(runs_of(records)))
    last = [records[f"ivt-{s}"]["metrics"]["LA"] - records[f"{s}"]["metrics"]["LA"] for s in (1, 2)]
    assert gain.metrics["LA"].ours == tuple(last)
    table = gains_table([gain])
    assert table is not None
    (row,) = table.texts()
    assert row[:4] == ["IVT", "PODNet", "CIFAR-100, 5 increments", "2"]
    assert row[5] == f"{statistics.mean(last):+.2f} ± {statistics.stdev(last):.2f}"
    (text,) = headline([gain])
    assert text.startswith(f"IVT with PODNet on CIFAR-100, 5 increments: last accuracy {statistics.mean(last):+.1f} ± ")
    assert text.endswith(", 2 seeds")


def test_only_runs_of_the_same_settings_are_compared() -> None:
    memory = {"podnet": {"memory": 5}}
    records = {"a": sample(), "b": sample("podnet", "ivt", **memory), "c": sample(oracle=True)}
    records["d"] = sample("podnet", "ivt", oracle=True)
    records["e"] = sample("podnet", "ivt", tasks=10)
    assert addon_gains(group_runs(runs_of(records))) == []
    records["f"] = sample(**memory, fall=5.0)
    (gain,) = addon_gains(group_runs(runs_of(records)))
    assert gain.metrics["LA"].ours == (records["b"]["metrics"]["LA"] - records["f"]["metrics"]["LA"],)
    assert gains_table([]) is None
    assert headline([]) == []


def test_sentence() -> None:
    one, several = Comparison((-1.25,)), Comparison((1.0, 2.0, 3.0))
    assert gain_sentence("IVT", several, one) == "IVT: last accuracy +2.0 ± 1.0, forgetting -1.2, 3 seeds"
    assert gain_sentence("IVT", one, Comparison(())) == "IVT: last accuracy -1.2, forgetting –, 1 seed"


def test_many_comparisons_are_counted_by_addon() -> None:
    gains = addon_gains(group_runs(runs_of(study())))
    assert len(gains) > 4
    lines = headline(gains)
    assert [line.partition(" ")[0].rstrip(":") for line in lines] == ["IVT", "EOPC"]
    preset = [gain for gain in gains if gain.addon == "IVT"]
    higher = sum(gain.metrics["LA"].mean > 0 for gain in preset)  # type: ignore[operator]
    assert f"last accuracy higher in {higher} of {len(preset)} comparisons" in lines[0]
    assert lines[0].endswith("1 to 3 seeds each")
