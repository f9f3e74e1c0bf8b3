"""`memtrain remember` and `memtrain export` of a run of text, from end to end."""

import shutil
from pathlib import Path

import pytest
from command_line import refused

import memtrain
from memtrain.cli import main

FEW = "--size tiny --smt.steps 2 --dmt.steps 1 --log.evaluate-sequences 2 --smt.batch-size 2"
FEW += " --dmt.batch-size 2 --dmt.rollout-length 9 --data.evaluate-length 24"
BPE = "--option tokenizer bpe vocab 300 held_out 0.4"
BOOK = "".join(f"It was line {n} of a long book\n" for n in range(400))
CHAPTER = BOOK[:2000]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of bytes and of a BPE, and their data."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("book.txt").write_text(BOOK)
        assert main(f"train text --data book.txt {FEW} --folder bytes".split()) == 0
        assert main(f"train text --data book.txt {BPE} {FEW} --folder bpe".split()) == 0
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "copy"))
    Path("chapter.txt").write_text(CHAPTER)
    return Path.cwd()


@pytest.mark.parametrize("run", ["bytes", "bpe"])
def test_a_text_goes_on_from_its_memory_as_from_the_text(run: str, here: Path, capsys):
    assert main(["remember", run, "chapter.txt", "-o", "chapter.mem"]) == 0
    said = capsys.readouterr().out
    count = len(memtrain.load_rnn(run).spelling.encode_text(CHAPTER))  # type: ignore[union-attr]
    assert f"chapter.mem: {count:,} tokens read, memory " in said
    assert f"generate {run} --memory chapter.mem" in said
    assert main(["generate", run, "--memory", "chapter.mem", "--length", "30"]) == 0
    after = capsys.readouterr().out
    assert main(["generate", run, "--prompt", CHAPTER, "--length", "30"]) == 0
    whole = capsys.readouterr().out
    # A tokenizer's first token may begin with a space, which stands at the start of `after`.
    assert whole == CHAPTER + after
    assert main(["generate", run, "--memory", "chapter.mem", "--prompt", "It", "--count", "2"]) == 0
    assert "---- 2 of 2 ----\nIt" in capsys.readouterr().out


def test_a_memory_is_read_on_and_characters_left_out_are_counted(here: Path, capsys):
    Path("more.txt").write_text("It was é line\n")
    assert main(["remember", "bytes", "chapter.txt", "-o", "a.mem"]) == 0
    line = refused(capsys, "remember", "bytes", "more.txt", "--memory", "a.mem", "-o", "b.mem")
    assert "'é' does not occur" in line and not Path("b.mem").exists()
    arguments = "remember bytes more.txt --memory a.mem -o b.mem --skip-unknown"
    assert main(arguments.split()) == 0
    assert "left out  1 characters" in capsys.readouterr().out
    card = memtrain.Memory.load("b.mem").card
    assert (card.tokens, card.source) == (len(CHAPTER) + 13, "chapter.txt, more.txt")


def test_wrong_commands_are_one_line(here: Path, capsys):
    assert main(["remember", "bytes", "chapter.txt", "-o", "a.mem"]) == 0
    capsys.readouterr()
    cases = {
        "remember bytes": "FILES: name what to read",
        "remember": "RUN: is missing",
        "remember bytes chapter.txt": "out: name the memory file",
        "remember bytes chapter.txt -o data": "out=data: is a folder",
        "remember nothing chapter.txt -o x": "nothing: no run there",
        "remember bytes gone.txt -o x": "gone.txt: No such file",
        "remember bytes chapter.txt --memory book.txt -o x": "is not a memory file",
        "generate bpe --memory a.mem": "was written by text",
        "generate mnist-small --memory a.mem": "a memory holds no pixels",
        "export bytes": "no format is chosen; give at least one of --hf, --onnx, --pt2, --html",
        "export bytes --int8": "no format is chosen",
        "export bytes --onnx data": "onnx=data: is a folder; name a file in it",
        "export bytes --onnx x.txt": "onnx=x.txt: is another kind of file; end the name in .onnx",
        "export bytes --pt2 x.onnx": "pt2=x.onnx: is another kind of file; end the name in .pt2",
        "export bytes --html x": "html=x: is another kind of file; end the name in .html",
        "export bytes --pt2 x.pt2 --int8": "--int8: is an option of --onnx",
    }
    for command, message in cases.items():
        assert message in refused(capsys, *command.split()), command


def test_an_export_measures_what_8_bits_cost(here: Path, capsys, monkeypatch):
    monkeypatch.setattr("memtrain.deploy.int8.TOKENS", 500)
    arguments = ["export", "bytes", "--onnx", "step.onnx", "--int8", "--pt2", "step.pt2"]
    assert main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("8 bits change the loss per character from")]
    assert Path("step.onnx").is_file() and Path("step.pt2").is_file()
