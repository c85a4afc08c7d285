"""`incvec data pack` and `incvec data check` on a store."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import yaml
from PIL import Image

from incvec.cli import data as data_commands
from incvec.cli import steps
from incvec.cli.sweep import plan, sweeps
from incvec.config import RunConfig
from incvec.data.store.open import open_store
from incvec.data.stream import split
from incvec.presets import load_presets, resolve
from tests.cli.conftest import invoke, message
from tests.data.pictures import make_root, make_store


def test_pack_and_check(tmp_path: Path) -> None:
    root, store = make_root(tmp_path / "images"), tmp_path / "store"
    names = tmp_path / "two.txt"
    names.write_text("n00000000\nn00000002\n")
    command = ("data", "pack", root, store, "--size", "16", "--classes", names, "--workers", "1")
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert "2 classes, 10 training and 4 test images" in result.stdout
    assert "14 images packed" in result.stdout
    again = invoke(*command)
    assert "already packed" in again.stdout
    report = invoke("data", "check", store)
    assert report.exit_code == 0, report.output
    assert "the list 'two.txt@" in report.stdout
    assert "checksums are correct" in report.stdout


def test_packing_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    result = invoke("data", "pack", tmp_path / "nowhere", tmp_path / "store")
    assert result.exit_code == 1
    assert "does not exist" in " ".join(result.stderr.split())


@pytest.mark.parametrize("inside", ["", "store"])
@pytest.mark.parametrize(("command", "what"), [("pack", "a packed store"), ("aircraft", "a data root")])
def test_a_file_in_place_of_the_folder_to_write_is_refused(
    command: str, what: str, inside: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    result = invoke("data", command, make_root(tmp_path / "images"), file / inside)
    assert result.exit_code == 1
    assert f"{file} is a file; {what} needs a folder. Give another one with DST." in message(result)


def test_a_damaged_store_names_its_images(tmp_path: Path) -> None:
    store = make_store(make_root(tmp_path / "images"), tmp_path / "store").root
    (store / "train-00000.bin").write_bytes(bytes((store / "train-00000.bin").stat().st_size))
    result = invoke("data", "check", store)
    assert result.exit_code == 1
    told = " ".join(result.stderr.split())
    assert "train images 4 to 7 (classes 'n00000000' to 'n00000001')" in told
    assert "Remove the store and pack the images again" in told


def test_unreadable_images(tmp_path: Path) -> None:
    root, store = make_root(tmp_path / "images"), tmp_path / "store"
    (root / "train" / "n00000001" / "bad.jpg").write_text("text")
    command = ("data", "pack", root, store, "--size", "16", "--workers", "1")
    refused = invoke(*command)
    assert refused.exit_code == 1
    assert "bad.jpg" in refused.stderr
    taken = invoke(*command, "--unreadable", "leave-out")
    assert taken.exit_code == 0, taken.output
    assert "1 unreadable" in " ".join(taken.stdout.split())
    assert "give --unreadable leave-out" in " ".join(invoke(*command).stderr.split())


def test_paths_are_printed_verbatim(tmp_path: Path) -> None:
    """Brackets are markup in rich."""
    root, store = make_root(tmp_path / "images"), tmp_path / "st[bold]y[/]"
    (root / "train" / "n00000001" / "notes.txt").write_text("not an image")
    result = invoke("data", "pack", root, store, "--size", "16", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert str(store) in result.stdout
    assert "16.1 kB at 16 x 16" in result.stdout
    assert "1 other file(s) ignored" in result.stdout


def test_resuming_reports_the_verification(tmp_path: Path) -> None:
    root, store = make_root(tmp_path / "images"), tmp_path / "store"
    bad = root / "train" / "n00000001" / "bad.jpg"
    bad.write_text("text")
    command = ("data", "pack", root, store, "--size", "16", "--workers", "1")
    assert "verifying" not in invoke(*command).stdout
    bad.unlink()
    again = invoke(*command)
    assert again.exit_code == 0, again.output
    assert "packing was interrupted before: verifying the packed images" in again.stdout
    assert "resuming: 6 of 21 images are packed" in again.stdout


def test_check_of_class_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), "red").save(tmp_path / part / name / "1.png")
    result = invoke("data", "check", tmp_path)
    assert result.exit_code == 0, result.output
    assert "2" in result.stdout
    (tmp_path / "test" / "dog" / "1.png").write_bytes(b"no image")
    result = invoke("data", "check", tmp_path)
    assert result.exit_code == 1
    assert "1.png" in message(result)
    (tmp_path / "empty").mkdir()
    for text in (
        invoke("data", "check", "--help").stdout,
        message(invoke("data", "check", tmp_path / "empty")),
        message(invoke("data", "check", tmp_path / "absent")),
    ):
        assert "fgvc-aircraft-2013b/" in text


def test_checking_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, so that programs can read the report."""
    root = make_root(tmp_path / "images")
    monkeypatch.setattr(steps, "LINE_INTERVAL", 0.0)
    result = invoke("data", "check", root)
    assert result.exit_code == 0, result.output
    assert "checking: 21 of 21, 0 s left" in result.stderr
    assert "checking:" not in result.stdout


def test_upscaling_is_announced(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")  # 20 to 28 pixels wide, 20 to 22 high
    (root / "train" / "n00000000" / "000.png").write_text("no image")
    for size, upscaled in ((20, False), (32, True)):
        result = invoke("data", "pack", root, tmp_path / f"{size}", "--size", size, "--workers", "1")
        assert ("smaller (short side 21) and will be upscaled; --size 21" in result.stdout) == upscaled


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_packing_and_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: int) -> None:
    """Both signals: a message, an exit status, no incomplete file that counts as complete."""
    root, store = make_root(tmp_path / "images", classes=10), tmp_path / "store"
    command = ("data", "pack", root, store, "--size", "16", "--workers", "1")
    before = signal.getsignal(signal.SIGTERM)

    def kill(progress: data_commands.ImageProgress, done: int, total: int) -> None:
        signal.raise_signal(sign)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background shell
    try:
        with monkeypatch.context() as then:
            then.setattr(data_commands.ImageProgress, "__call__", kill)
            stopped = invoke(*command)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert stopped.exit_code == 130
    assert "Interrupted. Run the same command again to resume." in stopped.stderr
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (store / "store.json").exists()
    assert invoke(*command).exit_code == 0


METHODS = ("podnet", "mrfa", "pass", "fcs", "ssre", "lucir", "icarl")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dataset", "base", "tasks"), [("imagenet-subset", 50, 5), ("imagenet", 500, 10), ("tiny-imagenet-100", 50, 5)]
)
def test_presets_of_the_large_data_sets(method: str, dataset: str, base: int, tasks: int) -> None:
    assert dataset in load_presets(method).datasets
    config = resolve({"method": method, "addons": ["ivt"] if method in METHODS[:4] else [], "dataset": dataset})
    assert (config.base_classes, config.tasks, config.order_seed) == (base, tasks, 1993)
    for increments in (5, 10, 25):  # with and without IVT, the tasks have all classes
        given = [
            resolve({"method": method, "addons": a, "dataset": dataset, "tasks": increments}) for a in ([], ["ivt"])
        ]
        assert [(each.tasks, each.base_classes) for each in given] == [(increments, base)] * 2
        sizes = [task.last - task.first for task in split(2 * base, base, increments)]
        assert sizes == [base, *[base // increments] * increments]
    own = config.sections[method]
    kind = "resnet18-64" if dataset == "tiny-imagenet-100" else "resnet18"
    assert own["net"] == kind + {"podnet": "-podnet", "lucir": "-lucir"}.get(method, "")  # their missing ReLUs
    jitters = method == "podnet" or (method, dataset) == ("mrfa", "imagenet")  # as their authors have it
    assert own["brightness"] == (63 / 255 if jitters else 0.0)
    assert (own["batch_size"], own["memory"]) == (128, 20)
    exemplars = method in ("podnet", "mrfa", "lucir", "icarl")
    assert own["epochs"] == (90 if exemplars else 100)
    assert own["optimizer"] == ("sgd" if exemplars else "adam")
    assert own["lr"] == (0.1 if exemplars else 1e-3)
    if "ivt" in config.sections:
        assert config.sections["ivt"]["interval"] == 10


def test_a_finished_run_requires_the_images_it_was_trained_on(tmp_path: Path) -> None:
    """A store of other images is refused; without images nothing is compared."""
    stores = [
        make_store(make_root(tmp_path / str(n), classes=2, train=n, test=1), tmp_path / f"s{n}").root for n in (4, 5)
    ]
    command = ["run", "--method", "finetune", "--dataset", "packed", "--set", "finetune.net=tiny", "--tasks", "2"]
    command += ["--set", "base_classes=0", "--set", "finetune.epochs=1", "--set", "finetune.batch_size=4"]
    command += ["--out", str(tmp_path / "run"), "--data-root"]
    assert invoke(*command, stores[0]).exit_code == 0
    for root in (stores[0], tmp_path / "gone"):
        assert "already finished" in invoke(*command, root).stdout
    refused = invoke(*command, stores[1])
    assert refused.exit_code == 1
    told = " ".join(refused.stderr.split())
    given, expected = (open_store(store).fingerprint[:8] for store in reversed(stores))
    assert f"other images of packed (fingerprint {expected}) than the ones given ({given})" in told
    assert "choose another --out" in told


@pytest.mark.parametrize("method", [*METHODS, "finetune", "replay", "joint"])
def test_presets_of_custom_images(method: str) -> None:
    """Those of ImageNet-Subset; for a folder, whose images are 64 x 64, with a network for that size."""
    missing = {"podnet": "-podnet", "lucir": "-lucir"}.get(method, "")
    for dataset, net in (("packed", "resnet18"), ("folder", "resnet18-64")):
        own = resolve({"method": method, "dataset": dataset}).sections[method]
        assert (own["net"], own["normalization"]) == (net + missing, "default")
        assert own["epochs"] == (100 if method in ("pass", "fcs", "ssre") else 90)
        if method in METHODS:
            like = resolve({"method": method, "dataset": "imagenet-subset"}).sections[method]
            assert own == {**like, "net": own["net"]}


@pytest.mark.parametrize("addon", ["ivt", "eopc"])
def test_addon_presets_of_custom_images(addon: str) -> None:
    given = [
        {"method": "podnet", "addons": [addon], "dataset": name} for name in ("packed", "folder", "imagenet-subset")
    ]
    packed, folder, subset = (resolve(each).sections[addon] for each in given)
    assert packed == folder == subset


def test_sweeps_of_the_large_data_sets() -> None:
    assert {"imagenet-subset", "tiny-imagenet"} <= set(sweeps())
    assert len(plan("tiny-imagenet", [])) == 8
    assert len(plan("imagenet-subset", [])) == 24
    for name in ("imagenet-subset", "tiny-imagenet"):
        assert yaml.safe_load(sweeps()[name].read_text())["name"] == name


def test_data_options_are_recorded_if_they_are_set() -> None:
    plain = RunConfig(method="podnet")
    assert not {"class_list", "placement"} & set(plain.resolved())
    chosen = RunConfig(method="podnet", class_list="cmc", placement="streamed", image_size=64)
    assert chosen.resolved()["class_list"] == "cmc"
    assert chosen.resolved()["placement"] == "streamed"
    assert chosen.data_options() == {"image_size": 64, "class_list": "cmc", "placement": "streamed"}
