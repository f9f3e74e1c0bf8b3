"""Commands about texts and tokens: BPE from end to end, several texts, enwik8, wrong commands."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import refused

import memtrain
from memtrain.cli import main
from memtrain.cli.data import OPTIONS
from memtrain.data.prepare import DATA_SETS, NOT_OPTIONS, USER_FILES
from memtrain.data.store_reader import open_store
from memtrain.data.tokenizer import train_bpe

FEW = "--size tiny --smt.steps 2 --dmt.steps 1 --log.evaluate-sequences 2 --smt.batch-size 2"
FEW += " --dmt.batch-size 2 --dmt.rollout-length 9 --data.evaluate-length 24"
BPE = "--option tokenizer bpe vocab 300 held_out 0.4"
BOOK = "".join(f"It was line {n} of a long café book\n" for n in range(400))


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)
    return tmp_path


def run(capsys, command: str) -> str:
    """Run a command that must succeed; returns its output."""
    assert main(command.split()) == 0
    return capsys.readouterr().out


def test_a_bpe_run_generates_text_without_its_data(here: Path, capsys):
    run(capsys, f"train text --data book.txt {BPE} {FEW} --folder bpe")
    folder = Path(json.loads(Path("bpe/config.json").read_text())["data"]["path"])
    assert (folder / "tokenizer.json").is_file() and open_store(folder).meta.vocab_size <= 300
    table = run(capsys, "eval bpe --sequences 3")
    assert "nats per token" in table and "bits per byte" in table
    shutil.rmtree("data")
    Path("bpe/metrics.jsonl").unlink()
    assert main(["generate", "bpe", "--length", "9", "--prompt", "It was line"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("It was line")
    model = memtrain.load_rnn("bpe")
    assert model.spelling is not None
    samples = memtrain.generate(model, prompt="It was line", length=9)
    assert samples.texts() == [shown.removesuffix("\n")]
    assert samples.given == len(model.spelling.encode_text("It was line")) < len("It was line")
    assert main(["generate", "bpe", "--length", "5", "--count", "2", "--out", "a.txt"]) == 0
    assert "---- 2 of 2 ----" in capsys.readouterr().out
    line = refused(capsys, "generate", "bpe", "--prompt", "Жук")
    assert "'Ж' does not occur in the training text" in line


def test_bits_per_byte_of_bytes_and_tokens_are_of_the_same_text(here: Path, capsys):
    run(capsys, f"train text --data book.txt --option held_out 0.4 {FEW} --folder bytes")
    run(capsys, f"train text --data book.txt {BPE} {FEW} --folder bpe")
    ratios = {}
    for name in ("bytes", "bpe"):
        result = json.loads(run(capsys, f"eval {name} --sequences 4 --json"))
        parts = ("teacher", "rnn", "rnn_from_teacher", "rnn_after_start")
        scores = [*(result[part] for part in parts), *result["baselines"]]
        ratios[name] = [score["bits"] / score["bits_per_byte"] for score in scores]
    assert ratios["bytes"] == pytest.approx([1] * 7)
    assert min(ratios["bpe"]) > 2 and max(ratios["bpe"]) < 5  # bytes per token
    sizes = [
        {name: info.text_bytes for name, info in open_store(folder).splits.items()}
        for folder in Path("data").glob("book-????????")
    ]
    assert sizes[0] == sizes[1] and sum(size or 0 for size in sizes[0].values()) == len(
        BOOK.encode()
    )


def test_several_texts_are_named_once_or_again(here: Path, capsys):
    Path("other.md").write_text("Another text\n" * 300)
    run(capsys, f"train text --data book.txt other.md {FEW} --folder a")
    run(capsys, f"train text --data=book.txt {FEW} --data other.md --folder b")
    out = run(capsys, "data book.txt other.md")
    paths = {json.loads(Path(f"{name}/config.json").read_text())["data"]["path"] for name in "ab"}
    assert len(paths) == 1 and f"memtrain train text --data {paths.pop()}" in out
    assert "in 2 documents" in out and "note  book.txt: kept" in out


def test_enwik8_has_its_usual_split_and_all_bytes(here: Path, capsys):
    raw = np.random.default_rng(0).integers(0, 256, 2000, np.uint8)
    Path("enwik8.gz").write_bytes(gzip.compress(raw.tobytes()))
    out = run(capsys, "data enwik8 --data-dir enwik8.gz")
    assert "held out: the validation part, bytes 1,800 to 1,900" in out
    assert "not enwik8: 2,000 bytes instead of 100,000,000; split 90 : 5 : 5" in out
    run(capsys, "data enwik8 --data-dir . --option held_out test --out data/enwik8-test")
    stores = [open_store(Path("data") / name) for name in ("enwik8", "enwik8-test")]
    for store, begin in zip(stores, (1800, 1900), strict=True):
        assert store.tokens("train").tobytes() == raw[:1800].tobytes()
        assert store.tokens("test").tobytes() == raw[begin : begin + 100].tobytes()
        assert store.splits["test"].text_bytes == 100 and store.meta.vocab_size == 256
    run(capsys, f"train enwik8 --data enwik8.gz {FEW}")
    results = [
        json.loads(run(capsys, f"eval runs/enwik8 --sequences 4 --json {data}"))
        for data in ("", "--data data/enwik8-test")
    ]
    assert results[0]["rnn"] != results[1]["rnn"]
    assert results[1]["data"] == "data/enwik8-test"
    assert Path("runs/enwik8/figures/evaluation-24-enwik8-test.json").is_file()


def test_a_bpe_run_is_evaluated_on_another_text_with_its_own_tokenizer(here: Path, capsys):
    run(capsys, f"train text --data book.txt {BPE} {FEW} --folder bpe")
    Path("other.txt").write_text("It was another book\n" * 200)
    result = json.loads(run(capsys, "eval bpe --sequences 4 --json --data other.txt"))
    assert result["data"] == "other.txt" and result["rnn"]["bits_per_byte"] > 0
    run(capsys, "data other.txt --out own --option tokenizer bpe vocab 270")
    assert "data=own: has 270 tokens, the run learned" in refused(
        capsys, "eval", "bpe", "--data", "own"
    )


def test_a_line_of_dashes_may_be_the_divider(here: Path, capsys):
    Path("a.txt").write_text("one one\n---\ntwo two\n---\nthree\n")
    run(capsys, "data a.txt --out out --option divider ---")
    assert open_store(Path("out")).splits["train"].documents == 2


def test_help_and_docs_list_every_option_of_texts_and_tokens(capsys):
    with pytest.raises(SystemExit):
        main(["data", "book.txt", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    page = (Path(__file__).parents[2] / "docs/DATA.md").read_text()
    for kind, described in OPTIONS.items():
        function = {**USER_FILES, **DATA_SETS}[kind]
        names = {usage.split()[0] for usage in described}
        assert names == function.__annotations__.keys() - NOT_OPTIONS - {"overwrite"}
        for usage, text in described.items():
            assert usage in shown and "--option" in text and " ".join(text.split()) in shown
            assert f"`{usage.split()[0]}`" in page


# --------------------------------------------------------------------------------- wrong commands


@pytest.fixture
def files(here: Path) -> Path:
    Path("latin.txt").write_bytes("café\n".encode("latin-1") * 99)
    Path("rows.jsonl").write_text('{"body": "a row"}\n' * 9)
    Path("x.json").write_text("{}")
    Path("tokens.npy").write_bytes(b"")
    np.save("tokens.npy", np.arange(300) % 7)
    np.save("big.npy", np.array([0, 2**40, 1, 2]))
    Path("good.json").write_text(train_bpe([BOOK], 280).text)
    Path("nano").mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(100, dtype=np.uint16).tofile(Path("nano") / name)
    Path("odd").mkdir()
    for name in ("train.bin", "val.bin"):
        (Path("odd") / name).write_bytes(b"abc")
    Path("zip.zip").write_bytes(b"PK\x03\x04")
    Path("pngs").mkdir()
    Path("pngs/a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return here


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("data book.txt --option tokenizer gpt2", "tokenizer=gpt2: no such file; name a tokeni"),
        ("data book.txt --option tokenizer x.json", "tokenizer=x.json: is not the tokenizer.json"),
        ("data book.txt --option tokenizer bpe vocab 100", "vocab=100: must be 257..1,048,576"),
        ("data book.txt --option vocab 4096", "--option tokenizer bpe vocab 4096, or leave it out"),
        ("data book.txt --option tokenizer good.json vocab 300", "vocab=300: is for a BPE that is"),
        ("data book.txt --option tokenizer bpe vocab many", "vocab=many: must be a whole number"),
        (
            "data book.txt --option tokeniser bpe",
            "tokeniser: text has no such option; did you mean",
        ),
        ("data latin.txt --option tokenizer bpe", "latin.txt is not UTF-8, so its characters are"),
        ("data rows.jsonl", "column=text: does not exist; choose one with --option column NAME"),
        ("data book.txt --option column body", "column=body: plain text has no columns; JSONL"),
        ("data book.txt --option split test", "only Hugging Face datasets have a split; leave it"),
        ("data book.txt --option subset a", "only Hugging Face datasets have a subset; leave it"),
        ("data nano --option held_out 0.2", "val.bin is the held-out part; leave it out"),
        ("data nano --option vocab_size 5", "vocab_size=5: nano holds the token 99"),
        ("data odd", "train.bin: has 3 bytes, which are no tokens of two bytes (uint16), as nan"),
        ("data big.npy", "holds the token 1,099,511,627,776; tokens are below"),
        ("data tokens.npy --option tokenizer bpe", "tokenizer=bpe: no such file; name a tokenizer"),
        ("data tokens.npy book.txt", "several paths are joined only if they are texts"),
        ("data book.txt tokens.npy", "tokens.npy: is a NumPy array; memtrain train tokens --data"),
        ("data book.txt missing.txt", "data=missing.txt: no such file or folder"),
        ("data enwik8", "enwik8: has no direct download; get enwik8.zip from"),
        ("data enwik8 --data-dir zip.zip", "zip.zip: is a zip; unpack it first"),
        ("data enwik8 --data-dir pngs", "enwik8: pngs has no enwik8 and no enwik8.gz"),
        ("data enwik8 --data-dir book.txt --option held_out 0.1", "held_out='0.1': must be one of"),
        (
            "data enwik8 --data-dir book.txt --option held_out all",
            "must be one of test, validation",
        ),
        ("data mnist book.txt", "'book.txt': only paths are joined; name mnist alone"),
        ("train text --data pngs book.txt", "pngs: is a folder of images; memtrain train images"),
        ("train text --option tokenizer bpe", "--option: is for the preparation of data, and none"),
        (
            "train text --data tokens.npy",
            "is a NumPy array; memtrain train tokens --data tokens.npy",
        ),
        ("train series --data a.csv --data b.csv", "series takes one file; leave one out"),
        ("train images --data pngs pngs", "several paths are joined only if they are texts, and"),
    ],
)
def test_a_wrong_command_is_answered_in_one_line(files: Path, capsys, command: str, answer: str):
    line = refused(capsys, *command.split())
    assert answer in line
    assert not list(Path(".").glob("data/[a-z]*"))


def test_an_option_of_other_values_is_still_given_once(files: Path, capsys):
    line = refused(
        capsys, *["train", "text", "--data", "book.txt", "--size", "tiny", "--size", "small"]
    )
    assert "--size: given twice; leave one out" in line
    assert "--data: needs a value" in refused(capsys, "train", "text", "--data")
    line = refused(capsys, "train", "text", "--data", "hf:nobody/nothing", "--option", "column")
    assert "takes pairs of a name and a value" in line


def test_prepared_data_is_not_joined_and_a_run_keeps_its_data(files: Path, capsys):
    run(capsys, "data book.txt --out ready")
    line = refused(capsys, *["train", "text", "--data", "ready", "rows.jsonl"])
    assert "ready: is prepared already, and prepared data is not joined" in line
    run(capsys, "train retrieval --smt.steps 1 --dmt.steps 0 --folder task")
    line = refused(capsys, *["eval", "task", "--data", "book.txt"])
    assert "only runs of text, images and tokens are evaluated on other data" in line
