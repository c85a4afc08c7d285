"""Open stores: damage, subsets, image sizes, and images that stay in their files."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from incvec.data import check, load_dataset
from incvec.data.class_lists import CLASS_LISTS, find_class_list
from incvec.data.layouts import list_images
from incvec.data.listing import Listing
from incvec.data.store.mapped import PackedImages
from incvec.data.store.open import open_store, sha256
from incvec.data.store.write import pack
from incvec.errors import ConfigError, DataError
from tests.data.pictures import make_root, make_store, photo, save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("images"))


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Path:
    return make_store(source, tmp_path / "store", 16, shard_bytes=6 * 3 * 16 * 16).root


def test_opening_reads_no_image(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedImages, "_map", lambda *_: pytest.fail("a file was mapped"))
    data = load_dataset("packed", store)
    assert data.train_images.shape == (15, 3, 16, 16)
    assert data.n_classes == 3
    assert data.train_images.nbytes == 15 * 3 * 16 * 16


def test_images_are_gathered_across_shards(store: Path) -> None:
    images, _ = open_store(store).images("train")
    everything = np.concatenate(
        [np.fromfile(store / f"train-{i:05d}.bin", np.uint8).reshape(-1, 3, 16, 16) for i in range(3)]
    )
    rows = np.array([14, 0, 6, 5, 5, 12, 7, 1, 13, 2])
    out = np.empty((10, 3, 16, 16), np.uint8)
    images.will_need(rows)
    images.gather(rows, out)
    assert np.array_equal(out, everything[rows])
    assert np.array_equal(images.resident(CPU).numpy(), everything)
    some = images.select(np.array([3, 9]))
    assert np.array_equal(some.resident(CPU).numpy(), everything[[3, 9]])


def test_placement(store: Path) -> None:
    images, _ = open_store(store).images("train")
    assert isinstance(images.to("cpu"), torch.Tensor)  # small, so it fits
    images.placement = "streamed"
    assert images.to("cpu") is images
    images.placement = "resident"
    assert isinstance(images.to("cpu"), torch.Tensor)


def test_check_reports_the_contents_and_its_progress(store: Path) -> None:
    progress: list[tuple[int, int]] = []
    report = check(store, lambda done, total: progress.append((done, total)))
    assert report[0].startswith("a packed store of 3 classes")
    assert report[2].startswith("15 training images, 5 to 5 per class")
    assert "all 7 checksums are correct" in report
    assert len(progress) == 7
    assert progress[-1] == (21, 21)


@pytest.mark.parametrize(
    ("damage", "state", "images"),
    [
        ("shorter", "4600 bytes long, expected 4608", "11 to 11 (class 'n00000002')"),
        ("longer", "4610 bytes long, expected 4608", "6 to 11 (classes 'n00000001' to 'n00000002')"),
        ("missing", "missing", "6 to 11 (classes 'n00000001' to 'n00000002')"),
    ],
)
def test_shards_of_the_wrong_size_are_found_at_opening(store: Path, damage: str, state: str, images: str) -> None:
    file = store / "train-00001.bin"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:4600] if damage == "shorter" else content + b"12")
    message = f"{file} is {state}. Damaged: train images {images}. Remove the store and pack the images again"
    for function in (open_store, check, lambda root: load_dataset("packed", root)):
        with pytest.raises(DataError, match=re.escape(message)):
            function(store)


def test_check_names_the_images_whose_bytes_changed(store: Path) -> None:
    for name, offset in (("test-00000.bin", 5), ("train-00002.bin", 0)):
        content = bytearray((store / name).read_bytes())
        content[3 * 16 * 16 * offset] ^= 4
        (store / name).write_bytes(content)
    open_store(store)
    with pytest.raises(DataError, match=r"(?s)is damaged:\n.*Remove the store and pack") as caught:
        check(store)
    assert f"{store / 'train-00002.bin'}: train images 12 to 14 (class 'n00000002')" in str(caught.value)
    assert f"{store / 'test-00000.bin'}: test images 4 to 5 (class 'n00000002')" in str(caught.value)


@pytest.mark.parametrize("name", ["store.json", "train-labels.bin", "test-files.txt"])
def test_a_changed_bit_in_another_file_is_found(store: Path, name: str) -> None:
    content = bytearray((store / name).read_bytes())
    content[len(content) // 2] ^= 1
    (store / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(name) + " is damaged.*Remove the store and pack"):
        check(store)


@pytest.mark.parametrize(("number", "age"), [(2, "an earlier"), (99, "a later")])
def test_stores_of_another_format_are_refused(store: Path, number: int, age: str) -> None:
    metadata = json.loads((store / "store.json").read_text()) | {"format": number}
    del metadata["hash"]
    metadata["hash"] = sha256(json.dumps(metadata, sort_keys=True).encode())
    (store / "store.json").write_text(json.dumps(metadata))
    with pytest.raises(DataError, match=rf"packed by {age} version .*\(format {number}, .*pack the images again"):
        open_store(store)


@pytest.mark.parametrize("content", ['"text"', "[1, 2]", "7", "null"])
def test_metadata_must_be_a_mapping(store: Path, content: str) -> None:
    (store / "store.json").write_text(content)
    with pytest.raises(DataError, match=r"store\.json is damaged: it contains a .*pack the images again"):
        open_store(store)


def test_other_folders_get_the_command_that_packs_them(source: Path, tmp_path: Path) -> None:
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


def test_named_data_sets_require_their_classes(source: Path, store: Path) -> None:
    with pytest.raises(DataError, match=r"has 3 classes, 'imagenet' has 1000\. .*incvec data pack IMAGES STORE"):
        load_dataset("imagenet", store)
    remedy = r"\. Give a data root with {0}, or pack it, once: incvec data pack .* --classes {0}"
    with pytest.raises(DataError, match="lacks 100 of .* 'imagenet-subset'.*" + remedy.format("imagenet-subset")):
        load_dataset("imagenet-subset", store)
    with pytest.raises(
        DataError,
        match=r"100 of the 100 classes .*, \.\.\.\), which.*another list of classes"
        + remedy.format("tiny-imagenet-100"),
    ):
        load_dataset("tiny-imagenet-100", source)
    with pytest.raises(DataError, match=r"lacks 100 .* 'cmc'.*\. Give a data root with these classes, or .* cmc"):
        load_dataset("packed", store, class_list="cmc")


@pytest.mark.parametrize("name", ["n00000500", "cat"])
def test_imagenets_classes_are_wnids(tmp_path: Path, name: str) -> None:
    """A thousand folders with other names are another data set."""
    file = save(photo(0, 4, 4), tmp_path / "images" / "0.png")
    classes = tuple(name if i == 500 else f"n{i:08d}" for i in range(1000))
    rows = tuple((file, label) for label in range(1000))
    listing = Listing(file.parent, classes, rows, rows, 0, "synthetic", "imagenet")
    store = pack(listing, tmp_path / "store", 2, workers=1).root
    if name == "cat":
        message = r"has a class 'cat'; the classes of 'imagenet' are WNIDs.*give --dataset packed\. .*data pack"
        with pytest.raises(DataError, match=message):
            load_dataset("imagenet", store, image_size=2)
    else:
        assert load_dataset("imagenet", store, image_size=2).n_classes == 1000


def test_a_subset_of_a_store_is_that_subset_packed(source: Path, store: Path, tmp_path: Path) -> None:
    """The same images and labels as a store that was packed with the list."""
    names = tmp_path / "two.txt"
    names.write_text("n00000002\nn00000000\n")
    part = load_dataset("packed", store, class_list=str(names))
    alone = load_dataset("packed", make_store(source, tmp_path / "two", class_list=find_class_list(names)).root)
    assert part.class_names == alone.class_names == ("n00000000", "n00000002")
    for half in ("train", "test"):
        assert torch.equal(getattr(part, f"{half}_labels"), getattr(alone, f"{half}_labels"))
        mine, other = (getattr(data, f"{half}_images").resident(CPU) for data in (part, alone))
        assert torch.equal(mine, other)
    assert part.about["class_list"] == alone.about["class_list"] == find_class_list(names).name
    assert part.fingerprint != load_dataset("packed", store).fingerprint


def test_left_out_images_are_counted_for_the_selected_classes(source: Path, tmp_path: Path) -> None:
    root = shutil.copytree(source, tmp_path / "images")
    for place in ("train/n00000000/x.png", "train/n00000001/x.png", "val/n00000001/x.png"):
        (root / place).write_text("no image")
    store = make_store(root, tmp_path / "store", unreadable="leave-out").root
    names = tmp_path / "two.txt"
    for classes, count in ((("n00000000", "n00000002"), 1), (("n00000001", "n00000002"), 2)):
        names.write_text("\n".join(classes))
        assert load_dataset("packed", store, class_list=str(names)).about["left_out"] == count
    assert load_dataset("packed", store).about["left_out"] == 3


def test_images_held_out_of_a_store(store: Path) -> None:
    """The same images as of a data set in memory: every third training image of a class."""
    whole, part = (load_dataset("packed", store, held_out=n) for n in (None, 3))
    held_out = [row for row in range(15) if row % 5 == 2]  # five images per class
    rows = [row for row in range(15) if row not in held_out]
    for images, labels, wanted in (
        (part.train_images, part.train_labels, rows),
        (part.test_images, part.test_labels, held_out),
    ):
        assert labels.tolist() == whole.train_labels[wanted].tolist()
        assert all(torch.equal(images[i], whole.train_images[row]) for i, row in enumerate(wanted))
    assert part.fingerprint != whole.fingerprint
    assert len(load_dataset("packed", store, held_out=5).test_labels) == 3
    with pytest.raises(ConfigError, match=r"held_out is 6, but class 'n00000000' has only 5 .*expected 5 or less"):
        load_dataset("packed", store, held_out=6)


def test_the_input_size_of_the_network(source: Path, store: Path, tmp_path: Path) -> None:
    small = load_dataset("packed", store)
    assert (small.side, small.image_shape, small.pad) == (None, (3, 16, 16), 2)
    with pytest.raises(ConfigError, match="side of 16"):
        load_dataset("packed", store, image_size=8)
    large = make_store(source, tmp_path / "large", 128).root
    assert load_dataset("packed", large).image_shape == (3, 112, 112)
    assert load_dataset("packed", large, image_size=64).image_shape == (3, 64, 64)
    with pytest.raises(ConfigError, match="pack them again with a larger --size"):
        load_dataset("packed", large, image_size=200)


def test_tiny_imagenet_is_read_packed_or_as_files(tmp_path: Path) -> None:
    class_list = CLASS_LISTS["tiny-imagenet-100"]
    image = photo(0, 64, 64)
    for name in (*class_list.classes, "n00000001"):  # and one other class
        for part in ("train", "val"):
            save(image, tmp_path / "files" / part / name / "0.png")
    listing = list_images(tmp_path / "files", class_list=class_list)
    pack(listing, tmp_path / "root" / "tiny-imagenet-100", 64, workers=1)
    files = load_dataset("tiny-imagenet-100", tmp_path / "files")
    packed = load_dataset("tiny-imagenet-100", tmp_path / "root")  # the store is below the data root
    assert files.class_names == packed.class_names == class_list.classes
    assert torch.equal(files.train_images, packed.train_images.resident(CPU))
    assert files.about["class_list"] == packed.about["class_list"] == "tiny-imagenet-100"
    assert (files.side, files.pad) == (packed.side, packed.pad) == (None, 8)
    assert (files.about["side"], files.about["seen"]) == (packed.about["side"], packed.about["seen"]) == (64, 64)
    large = pack(listing, tmp_path / "large", 128, workers=1).root
    with pytest.raises(DataError, match=r"side of 128; .* 64: incvec data pack .*--size 64 --classes tiny"):
        load_dataset("tiny-imagenet-100", large)
    asked = load_dataset("tiny-imagenet-100", large, image_size=112)
    assert (asked.image_shape, asked.about["side"], asked.about["seen"]) == ((3, 112, 112), 128, 112)


LIMITED = """
import resource, sys
import torch
from incvec.data import load_dataset, make_source, make_views
torch.set_num_threads(1)
data = load_dataset("packed", sys.argv[1], image_size=8)
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
views = make_views(data, 0.0, *data.normalizations["default"])
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
threading.stack_size(1 << 20)  # on a machine with many cores, stacks would need more memory than images
data = load_dataset("packed", sys.argv[1], image_size=8, placement="streamed")
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
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """192 MB of training and 77 MB of test images, four classes in shades of gray."""
    folder = tmp_path_factory.mktemp("large")
    for label in range(4):
        for part, count in (("train", 25), ("val", 10)):
            for i in range(count):
                gray = Image.new("L", (2, 2), 50 * label + 2 * i)
                save(gray, folder / "images" / part / f"n{label:08d}" / f"{i:03d}.png")
    store = make_store(folder / "images", folder / "store", 800, shard_bytes=1 << 26)
    assert store.images("train")[0].nbytes > 190e6
    return store.root


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA needs Linux")
@pytest.mark.parametrize(
    ("program", "output"),
    [
        pytest.param(LIMITED, [2 * i for i in range(100)], id="read"),
        pytest.param(TRAINED, [20, 20], id="trained", marks=pytest.mark.slow),  # with herding and evaluation
    ],
)
def test_a_store_larger_than_memory(large_store: Path, tmp_path: Path, program: str, output: list[int]) -> None:
    """The process may use only a part of the store's size in addition to its own memory."""
    words = [sys.executable, "-c", program, str(large_store), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(output)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("side", -1), ("side", "x"), ("classes", []), ("classes", [1]), ("classes", ["a", "a"]), ("about", {}),
        ("about", None), ("parts", {}), ("parts", []), ("fingerprint", 5), ("format", None), ("format", "x"),
    ],
)  # fmt: skip
def test_metadata_with_odd_values_and_a_right_hash_is_refused(store: Path, key: str, value: object) -> None:
    metadata = json.loads((store / "store.json").read_text())
    del metadata["hash"]
    metadata[key] = value
    write_with_hash(store, metadata)
    with pytest.raises(DataError, match=r"store\.json is damaged: "):
        open_store(store)


def write_with_hash(store: Path, metadata: dict[str, object]) -> None:
    hash_ = sha256(json.dumps(metadata, sort_keys=True).encode())
    (store / "store.json").write_text(json.dumps({**metadata, "hash": hash_}))


def test_shard_outside_of_the_store_is_refused(store: Path) -> None:
    metadata = json.loads((store / "store.json").read_text())
    del metadata["hash"]
    metadata["parts"]["train"]["shards"][0][0] = "../train-00000.bin"
    write_with_hash(store, metadata)
    with pytest.raises(DataError, match=r"shards.0.0 is '../train-00000.bin'"):
        open_store(store)


def test_labels_beyond_the_classes_are_refused(store: Path) -> None:
    labels = np.fromfile(store / "train-labels.bin", dtype="<i4")
    labels[0] = 999
    labels.tofile(store / "train-labels.bin")
    metadata = json.loads((store / "store.json").read_text())
    del metadata["hash"]
    metadata["parts"]["train"]["labels_hash"] = sha256(labels.tobytes())
    write_with_hash(store, metadata)
    with pytest.raises(DataError, match="has labels beyond"):
        check(store)
