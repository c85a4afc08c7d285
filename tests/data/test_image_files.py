"""Image files to stored pixels: the same for every data set, and those of torchvision."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

from incvec.data import load_dataset
from incvec.data import resize as resizing
from incvec.data.image_files import crop_square, load_square, open_image, quiet_pillow
from incvec.errors import DataError
from tests.data.pictures import make_store, photo, save


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def test_folder_and_packed_have_the_same_pixels(tmp_path: Path) -> None:
    """Several formats, odd sizes, gray, palette and CMYK images, EXIF rotation, large JPEGs (decoded at a reduced
    scale), and images smaller than the stored side."""
    files = {
        "a.png": (photo(0, 61, 47), {}),
        "b.jpg": (photo(1, 333, 97), {"quality": 90}),
        "c.webp": (photo(2, 40, 75), {}),
        "d.tif": (photo(3, 20, 20), {}),
        "e.bmp": (photo(4, 9, 7), {}),
        "f.jpg": (photo(5, 501, 403).convert("L"), {}),
        "g.png": (photo(6, 33, 80).quantize(32), {}),
        "h.jpg": (photo(7, 64, 90).convert("CMYK"), {"quality": 95}),
        "i.jpg": (photo(8, 90, 41), {"exif": exif(6)}),
        "j.png": (photo(9, 30, 51), {"exif": exif(3)}),
        "k.jpg": (photo(10, 700, 450), {"progressive": True, "exif": exif(8)}),
        "l.png": (photo(11, 2, 90), {}),
    }
    for part, classes in (("train", ("ant", "bee")), ("test", ("ant", "bee"))):
        for name in classes:
            for file, (image, options) in files.items():
                save(image, tmp_path / "images" / part / name / file, **options)
    store = make_store(tmp_path / "images", tmp_path / "store", 24).root
    folder = load_dataset("folder", tmp_path / "images", image_size=24)
    packed = load_dataset("packed", store)
    for part in ("train", "test"):
        ours, theirs = getattr(folder, f"{part}_images"), getattr(packed, f"{part}_images")
        assert len(ours) == 24
        assert torch.equal(ours, theirs.resident(torch.device("cpu")))
        assert torch.equal(getattr(folder, f"{part}_labels"), getattr(packed, f"{part}_labels"))


@pytest.mark.parametrize("shape", [(300, 211), (211, 300), (64, 64), (301, 64), (40, 57), (33, 90), (160, 40)])
def test_squares_are_torchvisions_resize_and_center_crop(shape: tuple[int, int]) -> None:
    image = photo(1, *shape)
    transform = v2.Compose([v2.Resize(64, v2.InterpolationMode.BICUBIC), v2.CenterCrop(64)])
    ours = crop_square(image, 64)
    assert torch.equal(ours, transform(v2.functional.pil_to_tensor(image)))
    difference = np.abs(ours.numpy().astype(int) - np.asarray(transform(image), int).transpose(2, 0, 1))
    assert difference.max() <= 1  # Pillow's arithmetic
    assert (difference > 0).mean() < 0.02


def test_squares_are_antialiased_and_show_the_center() -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 10:30] = 255
    square = crop_square(Image.fromarray(pixels), 10)
    assert square.shape == (3, 10, 10)
    assert (square[:, :, 2:8] == 255).all()
    board = np.indices((64, 64)).sum(0)[:, :, None] % 2 * np.full(3, 255)
    small = crop_square(Image.fromarray(board.astype(np.uint8)), 8)
    assert (small.int() - 127).abs().max() < 8  # gray, neither black nor white


@pytest.mark.parametrize("orientation", ["wide", "tall"])
def test_very_long_images_are_cut_before_resizing(orientation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resized whole, this one would be 16 million pixels long."""
    pixels = np.zeros((1, 60_000, 3), np.uint8)
    pixels[:, 29_999:30_001] = 200
    sizes = []
    interpolate = resizing.F.interpolate

    def record(images: torch.Tensor, size: tuple[int, int], **options: object) -> torch.Tensor:
        sizes.append(max(size))
        return interpolate(images, size, **options)

    monkeypatch.setattr(resizing.F, "interpolate", record)
    square = crop_square(Image.fromarray(pixels if orientation == "wide" else pixels.transpose(1, 0, 2)), 256)
    assert sizes == [16 * 256]
    assert square[:, 128, 128].min() >= 200  # its center


def test_large_jpegs_are_decoded_at_a_reduced_scale(tmp_path: Path) -> None:
    file = save(photo(2, 1000, 700), tmp_path / "a.jpg", quality=95)
    assert open_image(file).size == (1000, 700)
    assert open_image(file, min_side=100).size == (250, 175)
    full = crop_square(open_image(file), 50)
    difference = (load_square(file, 50).int() - full.int()).abs()
    assert difference.max() <= 8
    assert difference.float().mean() < 1


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.webp"])
@pytest.mark.parametrize("orientation", range(10))
def test_images_are_rotated_by_their_exif_orientation(tmp_path: Path, name: str, orientation: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9, 3), np.uint8)
    file = save(Image.fromarray(pixels), tmp_path / name, exif=exif(orientation))
    with Image.open(file) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert np.array_equal(np.asarray(open_image(file)), expected)
    assert expected.shape == ((9, 5, 3) if 5 <= orientation <= 8 else (5, 9, 3))


def test_an_invalid_tag_beside_the_orientation_is_ignored(tmp_path: Path) -> None:
    """A negative number in an unsigned field, which cannot be written again."""
    fields = ((0x0100, 9, struct.pack("<i", -5)), (0x0112, 3, struct.pack("<HH", 6, 0)))
    entries = b"".join(struct.pack("<HHI", tag, kind, 1) + value for tag, kind, value in fields)
    tags = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + entries + bytes(4)
    file = save(Image.new("RGB", (12, 8)), tmp_path / "a.jpg", exif=tags)
    assert open_image(file).size == (8, 12)


def test_gray_palette_and_cmyk_images_become_rgb(tmp_path: Path) -> None:
    for name, image, color, tolerance in (
        ("gray.png", Image.new("L", (8, 8), 77), [77, 77, 77], 0),
        ("palette.png", Image.new("RGB", (8, 8), (1, 2, 3)).quantize(4), [1, 2, 3], 0),
        ("cmyk.jpg", Image.new("CMYK", (8, 8), (0, 255, 255, 0)), [255, 0, 0], 3),
    ):
        square = load_square(save(image, tmp_path / name), 8)
        assert (square[:, 0, 0].int() - torch.tensor(color)).abs().max() <= tolerance


def test_truncated_files_and_deep_pixels_are_refused(tmp_path: Path) -> None:
    whole = save(photo(4, 64, 64), tmp_path / "a.jpg").read_bytes()
    for end in (0, 2, 100, len(whole) // 2, len(whole) - 300):
        (tmp_path / "cut.jpg").write_bytes(whole[:end])
        with pytest.raises(DataError, match=r"cut.jpg cannot be read as an image"):
            load_square(tmp_path / "cut.jpg", 16)
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"deep.png .* more than 8 bits .* convert it to 8 bits"):
        open_image(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"gone.jpg cannot be read as an image: .*No such file"):
        load_square(tmp_path / "gone.jpg", 16)


@pytest.mark.parametrize("error", [MemoryError("out of memory"), RuntimeError("not enough memory")])
def test_an_image_that_cannot_be_resized_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(resizing.F, "interpolate", fail)
    with pytest.raises(DataError, match=r"strange.png cannot be resized to 16 x 16: .*memory"):
        load_square(save(photo(0, 20, 99), tmp_path / "strange.png"), 16)


def test_pillow_warnings_are_suppressed(tmp_path: Path) -> None:
    file = save(photo(0, 9, 9), tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0")  # a field is missing
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        open_image(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet_pillow():
            assert open_image(file).size == (9, 9)
