"""Opened stores: what damage is seen when, subsets, and images that stay in their files."""

import json
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from incvec.data import check, load_dataset
from incvec.data.class_lists import find_class_list
from incvec.data.store.mapped import PackedImages
from incvec.data.store.open import open_store
from incvec.errors import ConfigError, DataError
from tests.data.pictures import make_root, make_store, photo, save


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("images"))


@pytest.fixture
def store(source, tmp_path):
    return make_store(source, tmp_path / "store", 16, shard_bytes=6 * 3 * 16 * 16).root


def test_opening_reads_no_image(store, monkeypatch):
    monkeypatch.setattr(PackedImages, "_map", lambda *_: pytest.fail("an image file was mapped"))
    data = load_dataset("packed", store)
    assert data.train_images.shape == (15, 3, 16, 16)
    assert data.n_classes == 3
    assert data.train_images.nbytes == 15 * 3 * 16 * 16


def test_images_are_gathered_across_shards(store):
    images, _ = open_store(store).images("train")
    everything = np.concatenate(
        [np.fromfile(store / f"train-{i:05d}.bin", np.uint8).reshape(-1, 3, 16, 16) for i in range(3)]
    )
    rows = np.array([14, 0, 6, 5, 5, 12, 7, 1, 13, 2])
    out = np.empty((10, 3, 16, 16), np.uint8)
    images.will_need(rows)
    images.gather(rows, out)
    assert np.array_equal(out, everything[rows])
    assert np.array_equal(images.resident(torch.device("cpu")).numpy(), everything)
    some = images.select(np.array([3, 9]))
    assert np.array_equal(some.resident(torch.device("cpu")).numpy(), everything[[3, 9]])


def test_placement(store):
    images, _ = open_store(store).images("train")
    assert isinstance(images.to("cpu"), torch.Tensor)  # small, so it fits
    images.placement = "streamed"
    assert images.to("cpu") is images
    images.placement = "resident"
    assert isinstance(images.to("cpu"), torch.Tensor)


def test_check_reports_what_is_there(store):
    report = "\n".join(check(store))
    assert "3 classes" in report
    assert "15 training images, 5 to 5 a class" in report
    assert "all 7 checksums right" in report  # two chunks of four in each of three shards, one of six is two; tests


def test_a_shard_cut_short_is_seen_at_opening(store):
    file = store / "train-00001.bin"
    file.write_bytes(file.read_bytes()[:-1])
    for look in (open_store, check, lambda root: load_dataset("packed", root)):
        with pytest.raises(DataError, match=r"train-00001.bin is cut short: 4607 bytes, expected 4608"):
            look(store)
    file.write_bytes(file.read_bytes() + b"12")
    with pytest.raises(DataError, match="too long"):
        open_store(store)
    file.unlink()
    with pytest.raises(DataError, match="missing"):
        open_store(store)


def test_a_flipped_bit_is_found_by_check(store):
    file = store / "test-00000.bin"
    content = bytearray(file.read_bytes())
    content[3 * 16 * 16 * 5] ^= 4
    file.write_bytes(content)
    open_store(store)
    with pytest.raises(DataError, match=r"altered in .*test-00000.bin, rows 4 to 5"):
        check(store)


@pytest.mark.parametrize("name", ["store.json", "train-labels.bin", "test-files.txt"])
def test_a_flipped_bit_in_an_index_is_found(store, name):
    file = store / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        check(store)


def test_a_store_of_a_later_format_is_refused(store):
    from incvec.data.store.open import sealed

    account = json.loads((store / "store.json").read_text())
    account.pop("hash")
    (store / "store.json").write_text(sealed({**account, "format": 99}))
    with pytest.raises(DataError, match="format 99"):
        open_store(store)


@pytest.mark.parametrize("content", ['"text"', "[1, 2]", "7", "null"])
def test_an_account_that_is_no_mapping_is_damaged(store, content):
    (store / "store.json").write_text(content)
    with pytest.raises(DataError, match=r"store\.json is damaged: it holds a .* Pack it again"):
        open_store(store)


def test_a_folder_that_is_no_store_is_told_how_to_become_one(source, tmp_path):
    with pytest.raises(DataError, match=r"incvec data pack .* --size 256 --classes imagenet-subset"):
        load_dataset("imagenet-subset", source)
    (tmp_path / "my list.txt").write_text("n00000000\nn00000001\n")
    (tmp_path / "my images").mkdir()
    with pytest.raises(DataError) as caught:
        load_dataset("packed", tmp_path / "my images", class_list=str(tmp_path / "my list.txt"))
    words = shlex.split(str(caught.value).partition("once: ")[2].partition(";")[0])
    assert words[3] == str(tmp_path / "my images")
    assert words[-1] == str(tmp_path / "my list.txt")
    with pytest.raises(DataError, match="needs a data root"):
        load_dataset("imagenet")
    with pytest.raises(DataError, match="not a packed store"):
        open_store(tmp_path)
    with pytest.raises(DataError, match=r"nowhere does not exist.* incvec data pack IMAGES STORE --size 64"):
        load_dataset("tiny-imagenet-100", tmp_path / "nowhere")
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_store(tmp_path / "nowhere")


def test_named_data_sets_want_their_own_classes(source, store):
    with pytest.raises(DataError, match=r"holds 3 classes, 'imagenet' has 1000\. .*incvec data pack IMAGES STORE"):
        load_dataset("imagenet", store)
    remedy = r"\. Give a data root that holds {0}, or make its store, once: incvec data pack .* --classes {0}"
    with pytest.raises(DataError, match="lacks 100 of .* 'imagenet-subset'.*" + remedy.format("imagenet-subset")):
        load_dataset("imagenet-subset", store)
    with pytest.raises(
        DataError,
        match=r"100 of the 100 classes .*, \.\.\.\), which.*another list of classes"
        + remedy.format("tiny-imagenet-100"),
    ):
        load_dataset("tiny-imagenet-100", source)
    with pytest.raises(DataError, match=r"lacks 100 .* 'cmc'.*\. Give a data root that holds these classes, or .* cmc"):
        load_dataset("packed", store, class_list="cmc")
    with pytest.raises(ConfigError, match="has all its classes"):
        load_dataset("imagenet", store, class_list="cmc")
    with pytest.raises(ConfigError, match="for packed stores"):
        load_dataset("digits", placement="streamed")
    with pytest.raises(ConfigError, match="read as it was packed"):
        load_dataset("packed", store, test_every=3)


@pytest.mark.parametrize("name", ["n00000500", "cat"])
def test_imagenets_classes_are_told_by_their_names(tmp_path, name):
    """A thousand folders of other names are another data set."""
    from incvec.data.folder import Listing
    from incvec.data.layouts import Layout
    from incvec.data.store.write import pack

    file = save(photo(0, 4, 4), tmp_path / "images" / "0.png")
    classes = tuple(name if i == 500 else f"n{i:08d}" for i in range(1000))
    rows = tuple((file, label) for label in range(1000))
    layout = Layout("imagenet", Listing(file.parent, classes, rows, rows, 0, "made up"), None)
    store = pack(layout, tmp_path / "store", 2, workers=1).root
    if name == "cat":
        told = r"holds a class 'cat'; those of 'imagenet' have WordNet's numbers.*say --dataset packed\. .*data pack"
        with pytest.raises(DataError, match=told):
            load_dataset("imagenet", store, size=2)
    else:
        assert load_dataset("imagenet", store, size=2).n_classes == 1000


def test_a_subset_of_a_store_is_that_subset_packed(source, store, tmp_path):
    """By a list, from the store of all classes, or packed with the list: the same images and labels."""
    names = tmp_path / "two.txt"
    names.write_text("n00000002\nn00000000\n")
    part = load_dataset("packed", store, class_list=str(names))
    alone = load_dataset("packed", make_store(source, tmp_path / "two", chosen=find_class_list(names)).root)
    assert part.class_names == alone.class_names == ("n00000000", "n00000002")
    for half in ("train", "test"):
        assert torch.equal(getattr(part, f"{half}_labels"), getattr(alone, f"{half}_labels"))
        mine, other = (getattr(data, f"{half}_images").resident(torch.device("cpu")) for data in (part, alone))
        assert torch.equal(mine, other)
    assert part.about["class_list"] == alone.about["class_list"] == find_class_list(names).name
    assert part.fingerprint != load_dataset("packed", store).fingerprint


def test_left_out_images_are_told_of_the_chosen_classes(source, tmp_path):
    root = shutil.copytree(source, tmp_path / "images")
    for place in ("train/n00000000/x.png", "train/n00000001/x.png", "val/n00000001/x.png"):
        (root / place).write_text("no image")
    store = make_store(root, tmp_path / "store", unreadable="leave-out").root
    names = tmp_path / "two.txt"
    for chosen, count in ((("n00000000", "n00000002"), 1), (("n00000001", "n00000002"), 2)):
        names.write_text("\n".join(chosen))
        assert load_dataset("packed", store, class_list=str(names)).about["left_out"] == count
    assert load_dataset("packed", store).about["left_out"] == 3


def test_checking_a_store_tells_how_far_it_is(store):
    told = []
    check(store, lambda done, total: told.append((done, total)))
    assert told[-1] == (21, 21)
    assert len(told) > 2


def test_images_held_out_of_a_store(store):
    """Every third training image of a class: those a data set in memory would put aside."""
    whole, part = (load_dataset("packed", store, held_out=n) for n in (None, 3))
    aside = [row for row in range(15) if row % 5 == 2]  # five images a class
    rows = [row for row in range(15) if row not in aside]
    for images, labels, wanted in (
        (part.train_images, part.train_labels, rows),
        (part.test_images, part.test_labels, aside),
    ):
        assert labels.tolist() == whole.train_labels[wanted].tolist()
        assert all(torch.equal(images[i], whole.train_images[row]) for i, row in enumerate(wanted))
    assert part.fingerprint != whole.fingerprint
    assert len(load_dataset("packed", store, held_out=5).test_labels) == 3
    with pytest.raises(ConfigError, match=r"held_out is 6, but class 'n00000000' has only 5 .*expected 5 or less"):
        load_dataset("packed", store, held_out=6)


def test_what_the_network_sees(source, store, tmp_path):
    small = load_dataset("packed", store)
    assert (small.side, small.image_shape, small.pad) == (None, (3, 16, 16), 2)
    with pytest.raises(ConfigError, match="side of 16"):
        load_dataset("packed", store, size=8)
    large = make_store(source, tmp_path / "large", 128).root
    assert load_dataset("packed", large).image_shape == (3, 112, 112)
    assert load_dataset("packed", large, size=64).image_shape == (3, 64, 64)
    with pytest.raises(ConfigError, match="pack them larger"):
        load_dataset("packed", large, size=200)


def test_tiny_imagenet_is_read_packed_or_as_files(tmp_path):
    from incvec.data.class_lists import CLASS_LISTS
    from incvec.data.layouts import list_images
    from incvec.data.store.write import pack

    chosen = CLASS_LISTS["tiny-imagenet-100"]
    image = photo(0, 64, 64)
    for name in (*chosen.classes, "n00000001"):  # one class that is not of the hundred
        for part in ("train", "val"):
            save(image, tmp_path / "files" / part / name / "0.png")
    layout = list_images(tmp_path / "files", chosen=chosen)
    pack(layout, tmp_path / "root" / "tiny-imagenet-100", 64, workers=1)
    files = load_dataset("tiny-imagenet-100", tmp_path / "files")
    packed = load_dataset("tiny-imagenet-100", tmp_path / "root")  # the store lies below the data root
    assert files.class_names == packed.class_names == chosen.classes
    assert torch.equal(files.train_images, packed.train_images.resident(torch.device("cpu")))
    assert files.about["class_list"] == packed.about["class_list"] == "tiny-imagenet-100"
    assert (files.side, files.pad) == (packed.side, packed.pad) == (None, 8)
    assert (files.about["side"], files.about["seen"]) == (packed.about["side"], packed.about["seen"]) == (64, 64)
    large = pack(layout, tmp_path / "large", 128, workers=1).root
    with pytest.raises(DataError, match=r"side of 128; .* 64: incvec data pack .*--size 64 --classes tiny"):
        load_dataset("tiny-imagenet-100", large)
    asked = load_dataset("tiny-imagenet-100", large, size=112)
    assert (asked.image_shape, asked.about["side"], asked.about["seen"]) == ((3, 112, 112), 128, 112)


LIMITED = """
import resource, sys
import torch
from incvec.data import load_dataset
from incvec.data.streamed import make_source, make_views
torch.set_num_threads(1)
data = load_dataset("packed", sys.argv[1], size=8)
size = data.train_images.nbytes
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:")) * 1024
limit = used + size // 2
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    data.train_images.resident(torch.device("cpu"))
    print("it fits")
except (MemoryError, RuntimeError):
    pass
data.train_images.placement = "streamed"
views = make_views(data, 0.0, *data.normalization())
source = make_source(data.train_images, data.train_labels, views, torch.device("cpu"))
order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).view(-1, 2)
source.ahead(order)
means = torch.zeros(len(source))
for rows in order:
    source.next()
    means[rows] = source.staged(rows, None, ("raw",)).images.mean((1, 2, 3))
print((means * 255).round().int().tolist())
"""


TRAINED = """
import json, resource, sys, threading
from pathlib import Path
import torch
from incvec.data import StreamedSource, load_dataset
from incvec.engine.run import Run, finish
from incvec.presets import resolve
torch.set_num_threads(1)
threading.stack_size(1 << 20)  # else a machine of many cores has more stacks than images
data = load_dataset("packed", sys.argv[1], size=8, placement="streamed")
own = {"net": "tiny", "epochs": 1, "balance_epochs": 1, "batch_size": 2, "memory": 10, "proxies": 2}
tasks = {"base_classes": 2, "tasks": 1, "image_size": 8, "placement": "streamed", "device": "cpu"}
run = Run(resolve({"method": "podnet", "dataset": "packed", "podnet": own, **tasks}), data, Path(sys.argv[2]))
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:")) * 1024
limit = used + data.train_images.nbytes
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
record = finish(run)
assert isinstance(run.parts.world.train, StreamedSource) and isinstance(run.parts.test, StreamedSource)
print(json.dumps(record["test_counts"]))
"""


@pytest.fixture(scope="module")
def great(tmp_path_factory):
    """A store of 192 MB to train on and 77 MB to test on, four classes in shades of gray."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("great")
    for label in range(4):
        for part, count in (("train", 25), ("val", 10)):
            for i in range(count):
                gray = Image.new("L", (2, 2), 50 * label + 2 * i)
                save(gray, folder / "images" / part / f"n{label:08d}" / f"{i:03d}.png")
    store = make_store(folder / "images", folder / "store", 800, shard_bytes=1 << 26)
    assert store.images("train")[0].nbytes > 190e6
    return store.root


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param(LIMITED, [2 * i for i in range(100)], id="read"),
        pytest.param(TRAINED, [20, 20], id="trained", marks=pytest.mark.slow),  # herded and evaluated, too
    ],
)
def test_a_store_larger_than_memory(great, tmp_path, program, said):
    """The process may have a part of the store's size in memory beside what it needs to be there at all."""
    words = [sys.executable, "-c", program, str(great), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(said)
