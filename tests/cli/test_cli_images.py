"""Commands on images: colour, classes, arrays, and what is refused."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from command_line import refused
from PIL import Image

import memtrain
from memtrain.cli import main
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError

FEW = ["--size", "tiny", "--smt.steps", "2", "--dmt.steps", "1", "--log.evaluate-sequences", "2"]
FEW += ["--data.document-starts", "1", "--log.evaluate-every", "9"]
FEW += ["--smt.batch-size", "2", "--dmt.batch-size", "2", "--dmt.rollout-length", "9"]
NOISE = np.random.default_rng(0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_icons(folder: Path) -> None:
    """Three classes of coloured squares with a transparent corner."""
    for number in range(30):
        kind = ("red", "green", "blue")[number % 3]
        image = Image.new("RGBA", (6, 6), kind)
        image.putpixel((number % 6, number // 6), (9, 9, 9, 8 * number))
        (folder / kind).mkdir(parents=True, exist_ok=True)
        image.save(folder / kind / f"{number}.{('png', 'webp', 'gif')[number % 3]}")


def shown(path: str) -> np.ndarray:
    return np.asarray(Image.open(path))


def is_coloured(image: np.ndarray) -> bool:
    return image.ndim == 3 and int(np.ptp(image.astype(int), axis=-1).max()) > 100


def test_icons_are_learned_and_drawn_in_colour_by_class(here: Path, capsys):
    make_icons(here / "icons")
    options = ["--option", "colour", "true", "size", "5", "levels", "8", "labels", "true"]
    assert main(["train", "images", "--data", "icons", *options, *FEW]) == 0
    err = capsys.readouterr().err
    assert "palette of 8 colours" in err and "begins with its class, one of 3: blue, green" in err
    config = json.loads(Path("runs/images/config.json").read_text())
    assert config["data"]["evaluate_length"] == 25
    store = open_store(Path(config["data"]["path"]))
    assert (store.meta.vocab_size, store.meta.document_length) == (11, 26)

    assert main(["eval", "runs/images", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["targets"] == 25 * result["sequences"] and result["unit"] == "pixel"
    assert result["baselines"][2]["name"] == "counts, left and three above"
    assert result["baselines"][0]["fitted_tokens"] == 25 * store.splits["train"].documents

    image = str(next((here / "icons" / "red").iterdir()))
    assert main(["generate", "runs/images", "--count", "4"]) == 0
    assert main(["generate", "runs/images", "--label", "red", "1", "--count", "3"]) == 0
    assert main(["generate", "runs/images", "--given", "0.5", "--count", "2"]) == 0
    assert main(["generate", "runs/images", "--image", image, "--label", "blue", "red"]) == 0
    free, by_class, given, completed = capsys.readouterr().out.split()
    assert all(is_coloured(shown(path)) for path in (free, by_class, given, completed))
    assert by_class == "runs/images/samples/label-2-1-6-seed0.png"
    height, width, _ = shown(by_class).shape  # two rows of three
    assert (width - 9) // 3 == (height - 9) // 2
    assert completed == "runs/images/samples/image-label-0-2-16-seed0.png"

    model = memtrain.load_rnn("runs/images")
    drawn = memtrain.generate(model, label=["red", 1], count=3)
    assert drawn.classes == ("red",) * 3 + ("green",) * 3 and drawn.tokens.shape == (6, 25)
    assert drawn.pictures().shape == (6, 5, 5, 3)
    for options, message in {
        ("--label", "rde"): "label='rde': did you mean red? (one of blue, green, red), or 0..2",
        ("--label", "3"): "label='3': must be one of blue, green, red, or 0..2",
        ("--label", "red", "--given", "0.5"): "held-out images have their own classes; leave --lab",
        ("--label",): "--label: needs a value",
        ("--image", "icons"): "icons: is not a regular file",
        ("--image", "gone.webp"): "gone.webp: no such image",
    }.items():
        assert message in refused(capsys, "generate", "runs/images", *options), options
    Path("notes.txt").write_text("no image")
    line = refused(capsys, "generate", "runs/images", "--image", "notes.txt")
    assert "cannot be read as an image; must be PNG, JPEG, WebP, BMP or GIF" in line


def test_arrays_are_learned_with_the_labels_beside_them(here: Path, capsys):
    np.save("digits.npy", NOISE.random((40, 4, 4), np.float32))
    np.save("digits-labels.npy", np.arange(40) % 2)
    options = ["--option", "levels", "4", "labels", "true", "--folder", "run"]
    assert main(["train", "images", "--data", "digits.npy", *options, *FEW]) == 0
    assert main(["generate", "run", "--label", "0", "--count", "2", "--out", "zeros.png"]) == 0
    assert Path("zeros.png").is_file()
    assert main(["label", "run", "--out", "labels.safetensors", "--sequences", "4"]) == 0
    assert main(["data", "digits.npy", "--option", "levels", "2"]) == 0
    assert "memtrain train images --data data/digits-" in capsys.readouterr().out


def write_mnist(folder: Path) -> None:
    """Twelve digits of noise to train and six to test."""
    folder.mkdir()
    for split, count in (("train", 12), ("t10k", 6)):
        images = NOISE.integers(0, 256, (count, 28, 28), np.uint8)
        header = struct.pack(">4I", 0x803, count, 28, 28)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = struct.pack(">2I", 0x801, count) + bytes(n % 10 for n in range(count))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(labels)


def test_mnist_recipes_draw_digits_by_class(here: Path, capsys):
    write_mnist(here / "files")
    options = ["--option", "size", "4", "levels", "4", "labels", "true"]
    assert main(["train", "mnist", "--data", "files", *options, *FEW]) == 0
    assert main(["generate", "runs/mnist", "--label", "7", "--count", "2"]) == 0
    options = ["--option", "levels", "4", "patch", "2", "labels", "true"]
    prepare = ["data", "mnist", "--data-dir", "files", "--out", "data/mnist-small", *options]
    assert main(prepare) == 0
    small = [*FEW[2:], "--engine.no-compile", "--teacher.context-length", "8"]
    for name in ("smt.future-length", "dmt.future-length"):
        small += [f"--{name}", "4"]
    for name in ("teacher.encoder-layers", "teacher.decoder-layers", "cell.layers"):
        small += [f"--{name}", "1"]
    assert main(["train", "mnist-small", *small]) == 0
    assert main(["generate", "runs/mnist-small", "--label", "0", "9", "--count", "1"]) == 0
    assert "label-0-9-2-seed0.png" in capsys.readouterr().out
    Path("files/train-labels-idx1-ubyte").unlink()
    line = refused(capsys, "train", "mnist", "--data", "files", *options)
    assert "labels=true: needs train-labels-idx1-ubyte.gz and t10k-labels-idx1-ubyte.gz in" in line


def test_a_model_without_classes_names_how_to_get_them(here: Path, capsys):
    line = refused(capsys, "generate", "mnist-small", "--label", "7")
    assert "label='7': this model has no classes; train on images with --option labels true" in line
    with pytest.raises(MemtrainError, match="label='7': this model has no classes"):
        memtrain.generate(memtrain.load_pretrained("mnist-small"), label=7)


BAD = {
    "color true": "color: images has no such option; did you mean colour?",
    "colour maybe": "colour=maybe: must be true or false",
    "colour true patch 2": "patch=2 with colour: a colour token is one pixel; leave patch out",
    "colour true threshold 9": "threshold=9 with colour: is for grey; leave it out",
    "colour true levels 300": "levels=300 with colour: must be 2..256 colours; 64 is usual",
    "colour true": "mixed sizes, a.png is 2x2 and b.png is 2x3 (height x width); resize them",
    "size 4 labels true": "4 of 4 images are in no folder of a class (a.png, b.png); put",
    "size 4 labels gone.csv": "labels=gone.csv: no such file; true takes the names of folders",
    "size 4 labels 3": "labels=3: no such file; true takes the names",
    "size 4 labels some.csv": "2 of 4 images have no class (c.png, d.png); add lines of FILE,CLASS",
}


@pytest.mark.parametrize("options", BAD)
def test_wrong_options_of_images_are_one_line_with_the_remedy(here: Path, capsys, options: str):
    Path("photos").mkdir()
    for number, name in enumerate("abcd"):
        Image.fromarray(NOISE.integers(0, 256, (2, 2 + number), np.uint8)).save(
            f"photos/{name}.png"
        )
    Path("some.csv").write_text("a.png,x\nb.png,y\n")
    line = refused(capsys, "train", "images", "--data", "photos", "--option", *options.split())
    assert BAD[options] in line
    assert not Path("runs").exists()


WRONG_FILES = {
    ("images", "photo.webp", ""): "is a WebP image; memtrain train images --data FOLDER reads a f",
    ("tokens", "bytes.npy", ""): "three or four dimensions; memtrain train images --data bytes.npy",
    ("images", "flat.npy", ""): "is a NumPy array; memtrain train tokens --data flat.npy",
    ("images", "whole.npy", ""): "images are uint8, or floats in 0..1; array.astype(np.uint8)",
    ("images", "large.npy", ""): "floats must be 0..1: divide by the largest, or save uint8",
    ("images", "first.npy", ""): "np.moveaxis(array, 1, -1) puts the colours last",
    ("images", "bytes.npy", "colour true"): "holds grey images, (9, 4, 4); leave colour out",
    ("images", "bytes.npy", "labels true"): "there is no bytes-labels.npy beside bytes.npy; save",
    ("images", "bytes.npy", "labels flat.npy"): "must be whole numbers or strings of shape (9,)",
    ("mnist", ".", "labels true"): "has no train-images-idx3-ubyte.gz",
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_files_of_images_are_one_line_with_the_remedy(here: Path, capsys, case):
    recipe, name, options = case
    images = NOISE.integers(0, 256, (9, 4, 4), np.uint8)
    Image.fromarray(images[0]).save("photo.webp")
    np.save("bytes.npy", images)
    np.save("flat.npy", images[0, 0])
    np.save("whole.npy", images.astype(np.int64))
    np.save("large.npy", images.astype(np.float32))
    np.save("first.npy", np.zeros((9, 3, 4, 4), np.uint8))
    option = ["--option", *options.split()] if options else []
    assert WRONG_FILES[case] in refused(capsys, "train", recipe, "--data", name, *option)
