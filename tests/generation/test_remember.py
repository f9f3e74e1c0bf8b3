"""Reading into a memory: the same in pieces as at once, and generation continues from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memtrain
from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.data.tokenizer import train_bpe
from memtrain.errors import MemtrainError
from memtrain.generation import sources
from memtrain.generation.sources import SourceReader
from model_testing import text_codec, tiny_model

TEXT = "a cab\nbac c a" * 70
MODEL = tiny_model("transformer", text_codec())
"""Of the text's bytes; 910 tokens are more than three blocks."""


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


def equal(one: memtrain.Memory, other: memtrain.Memory) -> bool:
    return torch.equal(one.values, other.values)


@pytest.mark.parametrize("kind", ["transformer", "mlp", "gru", "lstm", "attention", "torch"])
def test_the_memory_is_that_of_the_whole_text_at_once(kind: str):
    model = tiny_model(kind, text_codec())
    memory = memtrain.remember(model, TEXT)
    tokens = torch.tensor([list(TEXT.encode())])
    _, memories = model.read(tokens)
    torch.testing.assert_close(memory.values, memories[0, -1])
    assert memory.card.tokens == len(TEXT) and memory.card.kind == "text"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["transformer", "gru", "attention"])
def test_generation_goes_on_as_from_a_prompt(kind: str, count: int):
    model = tiny_model(kind, text_codec())
    memory = memtrain.remember(model, TEXT)
    options: dict[str, Any] = dict(length=40, seed=5, count=count)
    after = memtrain.generate(model, memory=memory, **options)
    prompted = memtrain.generate(model, prompt=TEXT, **options)
    assert after.tokens.shape == (count, 40) and after.given == 0
    assert after.tokens.tolist() == prompted.tokens[:, len(TEXT) :].tolist()


def test_a_prompt_is_read_after_the_memory():
    memory = memtrain.remember(MODEL, TEXT)
    after = memtrain.generate(MODEL, memory=memory, prompt="ab", length=20, seed=1)
    prompted = memtrain.generate(MODEL, prompt=TEXT + "ab", length=20, seed=1)
    assert after.given == 2
    assert after.tokens.tolist() == prompted.tokens[:, len(TEXT) :].tolist()


def test_a_special_start_token_is_read_once_and_first():
    codec = TokenCodec(vocab_size=6, start_token=5, start_written=False)
    model = tiny_model("gru", codec)
    first, then = np.array([1, 2, 3]), np.array([4, 0])
    memory = memtrain.remember(model, then, memory=memtrain.remember(model, first))
    assert memory.card.tokens == 6  # with the start token
    after = memtrain.generate(model, memory=memory, length=15, seed=2)
    prompted = memtrain.generate(model, prompt=np.array([1, 2, 3, 4, 0]), length=15, seed=2)
    assert after.tokens.tolist() == prompted.tokens[:, 5:].tolist()
    assert after.tokens.max() < 5


def test_a_file_in_small_pieces_gives_the_same_bits(book: Path, monkeypatch: pytest.MonkeyPatch):
    whole = memtrain.remember(MODEL, TEXT)
    assert equal(memtrain.remember(MODEL, book), whole)
    monkeypatch.setattr(sources, "PIECE", 7)
    calls: list[tuple[int, int]] = []
    memory = memtrain.remember(MODEL, book, report=lambda *one: calls.append(one))
    assert equal(memory, whole) and memory.card.source == "book.txt"
    assert calls == [(256, 910), (512, 910), (768, 910), (910, 910)]


def test_reading_goes_on_from_a_memory(book: Path):
    once = memtrain.remember(MODEL, [book, "ab", np.array([97])])
    first = memtrain.remember(MODEL, book)
    twice = memtrain.remember(MODEL, ["ab", np.array([97])], memory=first)
    torch.testing.assert_close(twice.values, once.values)
    assert twice.card.tokens == once.card.tokens == len(TEXT) + 3
    assert twice.card.source == once.card.source == "book.txt, a text, tokens"


# ---------------------------------------------------------------------------------- encoding


def joined(codec: TokenCodec, path: Path, **options: bool) -> list[int]:
    return np.concatenate(list(SourceReader(codec, **options).tokens(path))).tolist()


def test_unknown_characters_are_refused_or_counted(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("ab é caab")
    with pytest.raises(MemtrainError, match="'é' does not occur .* --skip-unknown"):
        memtrain.remember(MODEL, path)
    with pytest.raises(MemtrainError, match="'é' does not occur"):
        memtrain.remember(MODEL, "é")
    memory = memtrain.remember(MODEL, path, skip_unknown=True)
    assert equal(memory, memtrain.remember(MODEL, "ab  caab"))
    assert memory.card.left_out == 1
    further = memtrain.remember(MODEL, "bé", memory=memory, skip_unknown=True)
    assert further.card.left_out == 2
    with pytest.raises(MemtrainError, match="a text: holds nothing to read"):
        memtrain.remember(MODEL, "éé", skip_unknown=True)


def test_characters_of_several_bytes_are_whole_in_any_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sources, "PIECE", 3)
    text, path = "añ→b\r\na", tmp_path / "text.txt"
    path.write_bytes(text.encode() + b"\xff\x00")
    every = TokenCodec(vocab_size=256, start_token=10, text=True)
    assert joined(every, path) == [*text.encode(), 255, 0]
    known = replace(every, alphabet=tuple(sorted({*"añb\r\n".encode()})))
    assert joined(known, path, skip_unknown=True) == [*"añb\r\na".encode()]
    reader = SourceReader(known, skip_unknown=True)
    assert sum(map(len, reader.tokens(path))) and reader.left_out == 3


def test_a_tokenizer_encodes_pieces_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "PIECE", 64)
    text = "the cat sat\non the mat\n\nand that was that\n" * 40
    tokenizer = train_bpe([text], 300)
    codec = TokenCodec(
        vocab_size=tokenizer.vocab_size, start_token=0, text=True, tokenizer=tokenizer.text
    )
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert joined(codec, path) == tokenizer.encode([text])[0].tolist()
    path.write_bytes(b"the \xff cat")
    with pytest.raises(MemtrainError, match="is not UTF-8 text"):
        joined(codec, path)


def test_token_numbers_come_as_text_or_npy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "PIECE", 5)
    codec = TokenCodec(vocab_size=1000, start_token=0)
    text, array = tmp_path / "tokens.txt", tmp_path / "tokens.npy"
    tokens = [3, 999, 12, 0, 345, 7, 800]
    text.write_text(" 3 999\n12 0  345 7\n800")
    np.save(array, np.array(tokens, np.uint16))
    assert joined(codec, text) == joined(codec, array) == tokens
    for wrong in ("3 1000", "3 x", "1 123456789012", "4 -1"):
        text.write_text(wrong)
        with pytest.raises(MemtrainError, match=r"must be numbers 0..999"):
            joined(codec, text)
    np.save(array, np.array([[1.5]]))
    with pytest.raises(MemtrainError, match="must be whole numbers, 1-D"):
        joined(codec, array)
    np.save(array, np.array([3, 1000]))
    with pytest.raises(MemtrainError, match="1000 is not a token"):
        joined(codec, array)
    array.write_bytes(b"not an array")
    with pytest.raises(MemtrainError, match=r"tokens.npy: not a .npy file"):
        joined(codec, array)


def test_an_image_is_read_with_its_class(tmp_path: Path):
    from PIL import Image

    picture = ImageFormat(height=4, width=4, levels=2, patch=1)
    codec = TokenCodec(
        vocab_size=5,
        start_token=2,
        start_written=False,
        picture=picture,
        classes=("cat", "dog"),
        class_counts=(1, 1),
    )
    model = tiny_model("gru", codec)
    path = tmp_path / "image.png"
    Image.fromarray(np.eye(4, dtype=np.uint8) * 255).save(path)
    memory = memtrain.remember(model, path, label="dog")
    tokens = torch.tensor([[4, *codec.encode_image(path)]])
    torch.testing.assert_close(memory.values, model.read(tokens)[1][0, -1])
    assert memory.card.kind == "image"
    assert memory.distance(memtrain.remember(model, path, label=0)) > 0
    with pytest.raises(MemtrainError, match="label: .* one of cat, dog"):
        memtrain.remember(model, path)
    with pytest.raises(MemtrainError, match="reads one image"):
        memtrain.remember(model, [path, path], label=0)
    with pytest.raises(MemtrainError, match="a memory holds no pixels"):
        memtrain.generate(model, memory=memory)


# ------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path):
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(given=tmp_path / "gone.txt"), "gone.txt: No such file"),
        (dict(given=tmp_path), "is not a regular file"),
        (dict(given=[]), "must hold at least one"),
        (dict(given=""), "prompt='': must hold a character"),
        (dict(given="ab", label=3), "this model has no classes"),
        (dict(given=np.array([200])), "200 is not a token"),
    )
    for arguments, message in cases:
        with pytest.raises(MemtrainError, match=message):
            memtrain.remember(MODEL, **arguments)
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(MemtrainError, match="empty.txt: holds nothing to read"):
        memtrain.remember(MODEL, empty)


def test_a_network_of_numbers_or_answers_keeps_no_memory():
    with pytest.raises(MemtrainError, match="reads numbers"):
        memtrain.remember(tiny_model("values"), "a")
    with pytest.raises(MemtrainError, match="asks for answers"):
        memtrain.remember(tiny_model("gru"), "a")


def test_a_damaged_network_writes_no_memory():
    model = tiny_model("gru", text_codec())
    torch.nn.init.constant_(model.cell.embedding.weight, torch.nan)  # type: ignore[union-attr]
    with pytest.raises(MemtrainError, match="the memory is not finite after 2 tokens"):
        memtrain.remember(model, "ab")
