"""`generate`, and the presentation of samples by `memtrain generate`."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memtrain.generation.generate
from conftest import random_tokens, seeded, tiny_rnn
from memtrain.cli.generate import Generate, generate_images, generate_text
from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.errors import MemtrainError, printable
from memtrain.generation.generate import Samples, _given, generate
from memtrain.generation.sampling import sample
from model_testing import PICTURE, TEXT, decided_model

MARKED = TokenCodec(
    vocab_size=5,
    start_token=4,
    start_written=False,
    picture=ImageFormat(height=2, width=3, levels=4),
)


def test_text_starts_with_the_start_token_or_continues_a_prompt():
    author = decided_model(TEXT)
    free = generate(author, count=3, length=20, seed=4)
    assert free.tokens.shape == (3, 21) and (free.tokens[:, 0] == 10).all() and free.given == 1
    after = generate(author, prompt="héllo", count=2, length=7, temperature=0.0)
    assert after.given == 6 and after.tokens.shape == (2, 13)
    assert all(text.startswith("héllo") for text in after.texts())
    prompt = torch.tensor([list("héllo".encode())])
    by_hand = sample(author.rnn, prompt, 7, seeded(), temperature=0.0)
    assert after.tokens[0, 6:].tolist() == by_hand[0].tolist()


@pytest.mark.parametrize("warn_only", [False, True])
def test_sampling_restores_deterministic_algorithms(warn_only: bool):
    seen = []

    def listen(_: np.ndarray) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        generate(decided_model(TEXT), length=2, listen=listen)
        assert seen == [False]
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_same_seed_gives_the_same_samples_and_chunks_add_up():
    author, heard = decided_model(TEXT), []
    written = generate(author, prompt="a", length=40, seed=1, listen=heard.append)
    assert len(heard) > 1
    assert np.array_equal(np.concatenate(heard, axis=1), written.tokens[:, 1:])
    assert np.array_equal(generate(author, prompt="a", length=40, seed=1).tokens, written.tokens)
    assert not np.array_equal(
        generate(author, prompt="a", length=40, seed=2).tokens, written.tokens
    )


def test_images_are_completed_from_any_prompt(tmp_path: Path):
    author = decided_model(PICTURE)
    free = generate(author, count=5)
    assert free.tokens.shape == (5, 6) and (free.tokens[:, 0] == 3).all()
    assert free.pictures().shape == (5, 4, 6)
    halves = random_tokens(4, 3).numpy() % 16
    done = generate(author, prompt=halves)
    assert done.tokens.shape == (4, 6) and done.given == 3
    assert np.array_equal(done.tokens[:, :3], halves)
    done.save(tmp_path / "grid.png", originals=done.tokens)
    assert (tmp_path / "grid.png").is_file()


def test_a_start_mark_is_read_before_the_prompt_and_never_sampled():
    author = decided_model(MARKED)
    free = generate(author, count=40, temperature=5.0)
    assert free.tokens.shape == (40, 6) and free.given == 0
    assert set(free.tokens.flatten()) == {0, 1, 2, 3}
    given = np.array([1, 2])
    done = generate(author, prompt=given, count=3, temperature=0.0)
    assert done.tokens.shape == (3, 6) and done.tokens[:, :2].tolist() == [[1, 2]] * 3
    marked = torch.tensor([[4, 1, 2]])
    by_hand = sample(author.rnn, marked, 4, seeded(), temperature=0.0, allowed=4)
    assert done.tokens[0, 2:].tolist() == by_hand[0].tolist()


CLASSES = TokenCodec(
    vocab_size=7,
    start_token=4,
    start_written=False,
    picture=ImageFormat(height=2, width=3, levels=4),
    classes=("cat", "dog", "eel"),
    class_counts=(5, 0, 5),
)


def test_a_class_is_read_first_and_is_no_part_of_the_image():
    author = decided_model(CLASSES)
    drawn = generate(author, label=["dog", 0], count=2, temperature=0.0)
    assert drawn.classes == ("dog", "dog", "cat", "cat")
    assert drawn.tokens.shape == (4, 6) and drawn.given == 0 and drawn.tokens.max() < 4
    for row, first in ((0, 5), (2, 4)):
        by_hand = sample(
            author.rnn, torch.tensor([[first]]), 6, seeded(), temperature=0.0, allowed=4
        )
        assert drawn.tokens[row].tolist() == by_hand[0].tolist()
    for label in ("eel", 2, np.int64(2), [2], np.array(["eel"])):
        assert generate(author, label=label).classes == ("eel",)


def test_without_a_label_classes_have_their_training_frequencies():
    drawn = generate(decided_model(CLASSES), count=200, seed=3)
    assert set(drawn.classes) == {"cat", "eel"} and 60 < drawn.classes.count("cat") < 140
    assert drawn.classes == generate(decided_model(CLASSES), count=200, seed=3).classes


def test_prompts_may_begin_with_their_classes_or_have_labels():
    author, halves = decided_model(CLASSES), np.array([[1, 2], [3, 3]])
    own = np.concatenate([[[6], [4]], halves], axis=1)
    begun = generate(author, prompt=own, temperature=0.0)
    assert begun.classes == ("eel", "cat") and begun.given == 2
    assert np.array_equal(begun.tokens[:, :2], halves)
    labelled = generate(author, prompt=halves, label=["eel", "cat"], temperature=0.0)
    assert np.array_equal(labelled.tokens, begun.tokens)
    shared = generate(author, prompt=halves[0], label=["eel", "cat"], count=3, temperature=0.0)
    assert shared.classes == ("eel",) * 3 + ("cat",) * 3
    assert np.array_equal(shared.tokens[0], begun.tokens[0])
    alone = generate(author, prompt=np.array([6]), temperature=0.0)
    assert alone.classes == ("eel",) and alone.tokens.shape == (1, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "cta"}, "label='cta': did you mean cat? (one of cat, dog, eel), or 0..2"),
        ({"label": 3}, "label='3': must be one of cat, dog, eel, or 0..2"),
        ({"label": "cat", "prompt": np.array([5, 0])}, "begin with their classes; leave label out"),
        (
            {"label": ["cat", "dog"], "prompt": np.zeros((3, 2), int)},
            "label: 2 classes for 3 prompts; give one, or one for each",
        ),
        ({"prompt": np.array([0, 5])}, "prompt: 5 is not a token, must be 0..3"),
    ],
)
def test_wrong_labels_are_refused_in_one_line(options: dict[str, Any], message: str):
    with pytest.raises(MemtrainError) as caught:
        generate(decided_model(CLASSES), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("codec", [TEXT, PICTURE])
def test_labels_of_a_model_without_classes_are_refused(codec: TokenCodec):
    with pytest.raises(MemtrainError, match="label='7': this model has no classes; train on im"):
        generate(decided_model(codec), label=7)


def test_a_row_of_the_grid_is_a_class(tmp_path: Path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        memtrain.generation.generate,
        "save_grid",
        lambda path, pictures, columns=0, **_: asked.append(columns),
    )
    for options in ({"label": ["cat", "eel"], "count": 5}, {"label": "cat", "count": 5}, {}):
        generate(decided_model(CLASSES), **options).save(tmp_path / "grid.png")
    assert asked == [5, 0, 0]


def test_colour_images_are_saved_in_colour(tmp_path: Path):
    image = ImageFormat(height=2, width=3, levels=2, palette=((200, 0, 0), (0, 0, 200)))
    drawn = generate(decided_model(TokenCodec(vocab_size=2, start_token=0, picture=image)), count=4)
    assert drawn.pictures().shape == (4, 2, 3, 3)
    drawn.save(tmp_path / "a.png")
    drawn.save(tmp_path / "b.png", originals=drawn.tokens)
    for name in ("a.png", "b.png"):
        pixels = np.asarray(Image.open(tmp_path / name)).reshape(-1, 3)
        colours = {tuple(map(int, pixel)) for pixel in pixels} - {(128, 128, 128)}
        assert colours and colours <= {(200, 0, 0), (0, 0, 200)}


def test_sampling_restores_training_mode():
    author = decided_model(TEXT)
    author.rnn.train()
    author.rnn.cell.eval()
    generate(author, length=1)
    assert author.rnn.training and not author.rnn.cell.training


@pytest.mark.parametrize(
    ("spelling", "options", "message"),
    [
        (TEXT, {"count": 0}, "count=0: must be at least 1"),
        (TEXT, {"length": 0}, "length=0: must be at least 1"),
        (TEXT, {"prompt": ""}, "prompt='': must hold a character"),
        (TEXT, {"prompt": np.zeros((2, 0), np.int64)}, "prompt: must hold at least one token"),
        (TEXT, {"prompt": np.array([256])}, "prompt: 256 is not a token, must be 0..255"),
        (TEXT, {"temperature": -1.0}, "temperature=-1.0: must be at least 0"),
        (TEXT, {"top_p": 0.0}, "top_p=0.0: must be above 0"),
        (TEXT, {"seed": -1}, "seed=-1: must be at least 0"),
        (TEXT, {"seed": 10**30}, "must be at least 0 and below 2**63"),
        (TEXT, {"top_k": -2}, "top_k=-2: must be at least 0"),
        (PICTURE, {"length": 9}, "length=9: this model's images have 6 tokens"),
        (PICTURE, {"prompt": "a"}, "prompt='a': this model generates images"),
        (PICTURE, {"prompt": np.zeros(6, np.int64)}, "6 tokens leave nothing to complete"),
        (MARKED, {"prompt": np.array([4])}, "prompt: 4 is not a token, must be 0..3"),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    spelling: TokenCodec, options: dict[str, Any], message: str
):
    with pytest.raises(MemtrainError) as caught:
        generate(decided_model(spelling), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [np.array([1.5]), np.zeros((2, 2, 2), np.int64)])
def test_a_prompt_of_another_shape_or_type_is_refused(prompt: np.ndarray):
    with pytest.raises(MemtrainError, match="must be a text, or whole numbers"):
        _given(TEXT, prompt, 1)


def test_images_are_saved_as_png_only_and_a_path_may_be_a_string(tmp_path: Path):
    drawn = Samples(np.zeros((2, 6), np.int64), 0, PICTURE)
    drawn.save(str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").is_file()
    with pytest.raises(MemtrainError, match=r"end the name in \.png"):
        drawn.save(tmp_path / "a")


def test_saved_texts_are_separated(tmp_path: Path):
    tokens = np.array([list(b"one"), list(b"two")])
    Samples(tokens, 0, TEXT).save(tmp_path / "deep" / "out.txt")
    assert (tmp_path / "deep" / "out.txt").read_text() == "one\n\n----\n\ntwo"


@pytest.mark.parametrize("name", ["x.png", "x.JPG", "x.svg"])
def test_text_is_not_saved_under_the_name_of_an_image(tmp_path: Path, name: str):
    with pytest.raises(MemtrainError, match="generates text; end the name in .txt"):
        Samples(np.array([list(b"one")]), 0, TEXT).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("mnist-small", "load_pretrained('mnist-small')"),
        (Path("runs/x"), "load_rnn('runs/x')"),
        (3, "model=int: must be a Run"),
    ],
)
def test_a_name_instead_of_a_model_explains_how_to_load_it(wrong: Any, message: str):
    with pytest.raises(MemtrainError) as caught:
        generate(wrong)
    assert message in str(caught.value)


def test_a_text_prompt_for_images_names_the_argument_and_the_option():
    with pytest.raises(
        MemtrainError, match="complete one with its first tokens, an array"
    ) as caught:
        generate(decided_model(PICTURE), prompt="a")
    assert caught.value.command_line.endswith("complete one with --image FILE")


def test_a_model_that_samples_no_tokens_names_what_it_does_instead():
    wrong = SimpleNamespace(rnn=tiny_rnn(), spelling=None)
    with pytest.raises(MemtrainError, match=r"asks for answers .* model.rnn\(tokens\)") as caught:
        generate(wrong)
    assert caught.value.command_line.endswith("to sample; memtrain eval scores its answers")


@pytest.mark.parametrize("part", ["readout", "cell"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_is_sampled_from_nan(part: str, value: float):
    author, heard = decided_model(TEXT), []
    weight = next(p for p in getattr(author.rnn, part).parameters() if p.ndim == 2)
    with torch.no_grad():
        weight.fill_(value)
    with pytest.raises(MemtrainError, match="not finite, there is nothing to sample from"):
        generate(author, length=40, listen=heard.append)
    assert not heard


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("count", [1, 2])
def test_control_characters_are_escaped_on_a_terminal_only(monkeypatch, count: int, tmp_path):
    text = "a\x1b]0;x\x07é\u202eb\n"
    tokens = np.tile(np.frombuffer(text.encode(), np.uint8).astype(np.int64), (count, 1))

    def generate_with(model, options, prompt=None, listen=None, memory=None):
        for piece in np.split(tokens, tokens.shape[1], axis=1):
            if listen is not None:
                listen(piece)  # byte by byte: characters are split
        return Samples(tokens, 0, TEXT)

    monkeypatch.setattr(memtrain.generation.generate, "generate_with", generate_with)
    out = tmp_path / "out.txt"
    for stream, shown in ((Terminal(), printable(text)), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        generate_text(decided_model(TEXT), Generate(run="tiny", count=count, out=out))
        assert shown in stream.getvalue()
        assert ("\x1b" in stream.getvalue()) is (not stream.isatty())
        assert out.read_text() == "\n\n----\n\n".join([text] * count)


def test_images_are_not_saved_through_a_symbolic_link(tmp_path: Path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "run" / "samples").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MemtrainError, match="symbolic link"):
        generate_images(decided_model(PICTURE), Generate(run=str(tmp_path / "run"), count=1))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_text_for_an_image_file_is_refused_before_sampling(tmp_path: Path, capsys):
    with pytest.raises(MemtrainError, match=r"end the name in \.txt"):
        generate_text(decided_model(TEXT), Generate(run="tiny", out=tmp_path / "x.png"))
    assert capsys.readouterr().out == ""


def test_samples_have_a_short_repr_and_images_are_shown_in_notebooks():
    pictures = Samples(np.zeros((2, 6), np.int64), 1, PICTURE)
    assert repr(pictures) == "<Samples: 2 images of 6 tokens, 1 of them given>"
    shown = pictures._repr_png_()
    assert shown is not None and shown.startswith(b"\x89PNG")
    texts = Samples(np.array([list(b"one")]), 0, TEXT)
    assert repr(texts) == "<Samples: 1 text of 3 tokens, 0 of them given>"
    assert texts._repr_png_() is None
    assert re.fullmatch(
        r"<Pretrained tiny: [\d,]+ parameters, transformer cell>", repr(decided_model(TEXT))
    )
