"""Help and mistakes: every mistake is one line on stderr."""

import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from command_line import refused, save

from conftest import TINY
from memtrain.cli import COMMANDS, args, main
from memtrain.cli.train import FIRST
from memtrain.data.prepare import NOT_OPTIONS, prepare_images, prepare_text, prepare_tokens
from memtrain.paper import FIGURES, MORE
from memtrain.recipes import RECIPES, STREAMS


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "argument"),
    [("eval", "RUN"), ("generate", "RUN"), ("resume", "RUN"), ("reproduce", "FIGURE")],
)
def test_a_missing_argument_has_the_same_name_in_help_and_error(
    capsys, command: str, argument: str
):
    with pytest.raises(SystemExit):
        main([command, "joint", "--help"])
    assert argument in capsys.readouterr().out.split("options")[0]
    if argument == "RUN":
        assert f"{argument}: is missing; see memtrain {command}" in refused(capsys, command)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("eval x --length abc", "--length=abc: must be a whole number"),
        ("generate x --given abc", "--given=abc: must be a number"),
        ("train digits --smt.steps 1.5", "--smt.steps=1.5: must be a whole number"),
        ("train digits --smt.learning-rate fast", "--smt.learning-rate=fast: must be a number"),
        ("train digits --cell.kind foo", "memtrain: cell: kind='foo'"),
        ("train digits --cell.kind gru --cell.layers 4", "memtrain: cell.layers=4: must be left"),
        ("train text --cell.kind gru --cell.heads 9", "memtrain: cell.heads=9: must be left out"),
        ("train text --data x --option size", "takes pairs of a name and a value"),
        ("reproduce joint --scale huge", "--scale=huge: must be one of smoke, cpu, gpu, paper"),
        ("bench foo", "SUITE: must be one of smt, dmt, generate, bptt, all, growth"),
        ("train digits --smt.steps", "--smt.steps: needs a value"),
        ("train digits --smt.betas 0.9", "--smt.betas: needs 2 values"),
        ("train digits --smt.betas 0.9 x", "--smt.betas=x: must be a number"),
        ("train copy --smt.curriculum", "--smt.curriculum: needs a value"),
        ("train copy --smt.curriculum 4 9 8", "=4 9 8: takes pairs, here are 3 values"),
        ("train copy --smt.curriculum 4 x", "--smt.curriculum=x: must be a whole number"),
        ("train copy --smt.curriculum 8 9 4 9", "memtrain: smt: curriculum=8 9 4 9: its lengths"),
        ("train copy --smt.curriculum 5 9", "smt.curriculum=5: sequence_length=5: must be even"),
        ("train digits --smt.joint --smt.no-joint", "--smt.joint: given twice"),
        ("train digits --smt.joint 3", "'3': unexpected argument"),
        ("train digits --seed -1", "memtrain: seed=-1: must be at least 0"),
        ("eval one two", "'two': unexpected argument; see memtrain eval --help"),
        ("train text book.txt", "'book.txt': unexpected argument; did you mean --data book.txt?"),
        ("train text --data a b", "data=a: no such file or folder"),
        ("train text --data", "--data: needs a value"),
        ("train --data x", "RECIPE: is missing before --data"),
        ("train my.yaml", "my.yaml: a config is a config.json"),
        ("train text --config my.yaml", "memtrain train config.json"),
        ("train series --data a --data b", "data='b': series takes one file; leave one out"),
        ("train digits --smt.steps=1 --smt.steps 2", "--smt.steps: given twice"),
        ("train digits --smt.learning_rate 1 --smt.learning-rate 2", "--smt.learning-rate: given"),
        ("train images --data a --option size 8 --option levels 4", "all pairs go to one"),
        ("data a --option size 8 levels 4 size 9", "--option size: given twice; leave one out"),
        ("generate x --seed 1 --seed 1", "--seed: given twice"),
    ],
)
def test_invalid_values_are_refused_in_one_line(capsys, arguments: str, words: str):
    assert words in refused(capsys, *arguments.split())


@pytest.mark.parametrize("command", ["bench smt", "reproduce gradients"])
def test_an_unknown_device_is_refused(here: Path, capsys, command: str):
    assert "device='gpu': must be auto, cpu" in refused(capsys, *command.split(), "--device", "gpu")


def test_running_out_of_memory_is_one_line(capsys):
    assert "not enough memory" in refused(capsys, "data", "retrieval", "--count", str(10**14))
    assert "seed=" in refused(capsys, "data", "retrieval", "--seed", str(10**30))


def test_train_suggests_remedies_for_an_existing_run_and_unusable_data(here: Path, capsys):
    Path("runs/x").mkdir(parents=True)
    save(TINY, Path("runs/x/config.json"))
    assert "memtrain resume runs/x continues it" in refused(capsys, "train", "runs/x")
    line = refused(capsys, "train", "digits", "--data", "book.txt")
    assert "digits takes no data; mnist, " in line
    assert "takes --data.path" in refused(capsys, "train", "mnist-small", "--data", "photos")


def test_each_recipe_is_listed_with_a_description(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out.split("Recipes:\n")[1].split("\n\n")[0]
    listed = re.sub(r"\n {4,}", " ", text).splitlines()  # a long description takes two lines
    assert len(listed) == len(RECIPES) and all(line.endswith(".") for line in listed)


def test_data_help_lists_the_options_of_each_kind_of_data(capsys):
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    output = capsys.readouterr().out
    for function in (prepare_text, prepare_images, prepare_tokens):
        for option in get_type_hints(function).keys() - NOT_OPTIONS:
            assert re.search(rf"\b{option}\b", output), option


def test_the_help_of_an_option_is_one_paragraph(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train", "tinystories", "--help-all"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    # The source breaks the lines after "bptt: the same" and "--bptt.seconds limits".
    assert "the cell, in runs/NAME-smt; bptt: the same data," in lines
    assert "runs/NAME-pieces. --bptt.seconds limits them to the" in lines


def test_a_curriculum_is_pairs_in_one_option_or_several(capsys):
    from memtrain.cli.train import _parse_train

    for arguments in ("8 20 12 30", "8 20 --smt.curriculum 12 30"):
        words = ["--smt.curriculum", *arguments.split(), "--bptt.curriculum=2", "1"]
        _, default, configure = _parse_train("copy", [*words, "--bptt.steps", "5"])
        config = configure(default)
        assert config.smt.curriculum == ((8, 20), (12, 30))
        assert config.bptt.curriculum == ((2, 1),)
    with pytest.raises(SystemExit):
        main(["train", "copy", "--help-all"])
    assert "--smt.curriculum N N ..." in capsys.readouterr().out


PROMISED = """
--data --size --method --cell.kind --smt.steps --dmt.steps --bptt.steps --smt.learning-rate
--dmt.learning-rate --bptt.learning-rate --smt.batch-size --dmt.batch-size --bptt.batch-size --seed
--folder --overwrite --resume --engine.device --engine.precision
"""


@pytest.mark.parametrize("name", RECIPES)
def test_the_help_of_a_recipe_is_one_screen_and_help_all_has_every_option(
    name: str, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    shown = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            main(["train", name, option])
        assert stop.value.code == 0
        shown.append(capsys.readouterr().out)
    assert len(shown[0].splitlines()) <= 45
    assert all(len(line) <= 80 for line in shown[0].splitlines())
    short, long = ({*re.findall(r"(?m)^  (--[\w.-]+)", text)} for text in shown)
    assert short == {*re.findall("(?m)^(--[^:]+): ", FIRST)} & long  # none is misspelled
    real = {"--data", "--size", "--method"}
    assert {*PROMISED.split()} - (set() if name in STREAMS else real) <= short
    config = RECIPES[name]()
    for group in fields(config):
        value = getattr(config, group.name)
        if not is_dataclass(value):
            option = {"initial": "from"}.get(group.name, group.name.replace("_", "-"))
            assert f"--{option}" in long
            continue
        for field in fields(value):
            if field.name != "kind" or group.name == "cell":
                assert f"--{group.name}.{field.name.replace('_', '-')}" in long
    assert f"memtrain train {name} --help-all" in shown[0] and f"[{config.seed}]" in shown[0]


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)
    assert "RECIPE --help`" in text and "RECIPE --help-all`" in text


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "digits", "--help"], ["data"]]
)
def test_help_imports_no_torch(arguments: list[str]):
    code = (
        "import sys\nfrom memtrain.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"train", "reproduce", "torchrun"}))
def test_every_command_has_help(command: str, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: memtrain {command}" in capsys.readouterr().out


def test_reproduce_help_lists_the_figures(capsys):
    assert main(["reproduce", "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in [*FIGURES, *MORE])
    with pytest.raises(SystemExit):
        main(["reproduce", "joint", "--help"])
    assert "--launcher" in capsys.readouterr().out


def test_train_help_lists_the_recipes_and_help_all_the_options(capsys):
    assert main(["train", "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in RECIPES)
    with pytest.raises(SystemExit):
        main(["train", "digits", "--help-all"])
    knobs = capsys.readouterr().out
    for knob in ("--smt.future-length", "--dmt.label-stride", "--cell.kind", "--overwrite"):
        assert knob in knobs


def test_mistakes_are_one_line_with_the_nearest_name(here: Path, capsys):
    assert "did you mean train?" in refused(capsys, "trian")
    assert "did you mean digits?" in refused(capsys, "train", "digit")
    assert "did you mean --smt.steps?" in refused(capsys, "train", "digits", "--smt.step", "4")
    assert "--smt.steps" in refused(capsys, "train", "digits", "--smt.steps", "many")
    line = refused(capsys, "train", "digits", "--teacher.context-length", "0")
    assert "context_length=0: must be at least 1; the paper uses 256" in line
    assert "must be one of bidirectional, causal" in refused(
        capsys, "train", "digits", "--teacher.encoder", "x"
    )
    assert "did you mean gru?" in refused(capsys, "train", "digits", "--cell.kind", "grU")
    assert "did you mean stack?" in refused(capsys, "data", "stak")
    assert "no run there" in refused(capsys, "eval", "nowhere")
    assert "no pretrained model of that name" in refused(capsys, "generate", "nowhere")
    assert "did you mean tiny?" in refused(capsys, "train", "text", "--size", "tny")
    assert "has one size" in refused(capsys, "train", "digits", "--size", "tiny")
    assert "no such file or folder" in refused(capsys, "train", "text", "--data", "gone.txt")
    assert "no run there" in refused(capsys, "resume", "nowhere")
    assert "nothing.json: No such file" in refused(capsys, "train", "nothing.json")
    assert "nobody" in refused(capsys, "train", "digits", "--cell.kind", "nobody:Cell")
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        ("train digits --lr 0.001", "--smt.learning-rate"),
        ("train digits --smt.lr 0.001", "--smt.learning-rate"),
        ("train retrieval-bptt --lr 0.001", "--bptt.learning-rate"),
        ("train digits --dmt.lr=0.001", "--dmt.learning-rate"),
        ("train digits --epochs 3", "--smt.steps"),
        ("generate x --max-tokens 5", "--length"),
        ("generate x --temp 0.5", "--temperature"),
        ("generate x -n 4", "--count"),
        ("train digits --batch 3", "--smt.batch-size"),
        ("train digits --batch-size 3", "--smt.batch-size"),
        ("train digits --cell.hidden 3", "--cell.width"),
        ("train digits --device cpu", "--engine.device"),
        ("train text --dataset x", "--data"),
        ("train text -d x", "--data"),
        ("eval x --lenght 4", "--length"),
        ("train digits --smt.lerning-rate 4", "--smt.learning-rate"),
        ("train digits --wandb", "--track"),
        ("train digits --smt.optim muon", "--smt.optimizer"),
        ("train digits --optimizer muon", "--smt.optimizer"),
        ("train digits --initial runs/a", "--from"),
        ("train digits -d x", ""),
        ("train digits --bf16", ""),
        ("train digits --smt.foo 1", ""),
        ("eval x --lr 1", ""),
    ],
)
def test_only_similar_options_are_suggested(capsys, arguments: str, suggestion: str):
    line = refused(capsys, *arguments.split())
    if suggestion:
        assert f"no such option; did you mean {suggestion}?" in line
    else:
        assert "no such option; see memtrain " in line and "did you mean" not in line


def test_the_bare_name_of_a_run_suggests_its_folder(here: Path, capsys):
    Path("runs/digits").mkdir(parents=True)
    save(TINY, Path("runs/digits/config.json"))
    for command in ("eval", "resume", "generate"):
        line = refused(capsys, command, "digits")
        assert "digits: no run there; did you mean runs/digits?" in line
    assert "did you mean" not in refused(capsys, "eval", "digit")


def test_what_a_run_keeps_and_a_pretrained_model_lacks_is_said(here: Path, capsys):
    line = refused(capsys, "resume", "runs/x", "--size", "small")
    assert "--size: no such option; a run keeps its recipe; memtrain train makes another" in line
    line = refused(capsys, "eval", "mnist-small")
    assert "mnist-small: is a pretrained model without data or teacher; memtrain generate" in line


def test_every_spelling_of_version_prints_it(capsys):
    for word in ("--version", "-V", "version"):
        assert main([word]) == 0
    assert len(set(capsys.readouterr().out.split())) == 1
    assert "did you mean" not in refused(capsys, "vision")


def test_command_name_works_as_typed(here: Path, monkeypatch):
    monkeypatch.setattr(args.shutil, "which", lambda name: "/usr/bin/memtrain")
    assert args.command_name() == "memtrain"
    monkeypatch.setattr(args.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(here / ".venv/bin/python"))
    assert args.command_name() == f"{here}/.venv/bin/python -m memtrain"
    (here / ".venv/bin").mkdir(parents=True)
    (here / ".venv/bin/memtrain").touch()
    assert args.command_name() == ".venv/bin/memtrain"
    monkeypatch.chdir(here / ".venv")
    assert args.command_name() == "bin/memtrain"
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert args.command_name() == str(here / ".venv/bin/memtrain")


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS), ["train", "text"]])
@pytest.mark.parametrize("columns", [20, 80])
def test_help_fits_the_terminal(arguments: list[str], columns: int, monkeypatch, capsys):
    """A terminal of fewer than 60 columns gets the help of one of 60, or what is fixed."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with suppress(SystemExit):
        main([*arguments, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("command", ["bench", "eval", "generate", "resume", "report"])
def test_an_unknown_option_is_reported_first(command: str, capsys):
    assert refused(capsys, command, "--foo", "3").startswith("memtrain: --foo: no such option")


def test_a_colour_terminal_gets_the_same_error(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    message = refused(capsys, "train", "retrieval", "--smt.steps", "abc")
    assert message.startswith("memtrain: --smt.steps=abc: must be a whole number")


def test_a_home_folder_is_expanded(here: Path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(here / "home"))
    assert "home/runs/x: no run there" in refused(capsys, "eval", "~/runs/x")
    (here / "home/x").mkdir(parents=True)
    assert "home/x: is a folder" in refused(capsys, "label", "runs/x", "--out=~/x")
    assert not Path("~").exists()
