"""Whole commands: results on stdout, exit status, files."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import refused, save
from matplotlib.image import imread
from PIL import Image

from conftest import TINY
from memtrain.cli import main
from memtrain.config import Digits
from memtrain.config.serialize import to_json
from memtrain.generation import pretrained
from memtrain.generation.generate import generate
from memtrain.generation.pretrained import export
from memtrain.runs.processes import cores
from memtrain.runs.progress import StageProgress
from memtrain.training.run import Run


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_generate_imports_no_compiler_no_figures_and_no_training(tmp_path: Path):
    """Each takes longer than sampling a digit."""
    code = (
        "import sys\nfrom memtrain.cli import main\n"
        f"main(['generate', 'mnist-small', '--count', '1', '--out', {str(tmp_path / 'x.png')!r}])\n"
        "found = {'torch._dynamo', 'torch._inductor', 'matplotlib', 'sklearn'} & {*sys.modules}\n"
        "assert not found, found\n"
        "training = [f'memtrain.objectives.{name}' for name in ('smt', 'dmt', 'bptt', 'losses')]\n"
        "training += [f'memtrain.training.{name}' for name in ('run', 'loop', 'step')]\n"
        "found = {*training} & {*sys.modules}\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_reproduce_takes_several_figures_and_a_time_limit(here: Path, capsys):
    assert main(["reproduce", "joint", "length", "--minutes", "0", "--folder", "some"]) == 0
    captured = capsys.readouterr()
    assert "joint" in captured.out and "length" in captured.out
    assert "7 runs are missing after 0 minutes; the same command continues" in captured.err
    for arguments, message in (
        (["joint", "lenght"], "did you mean length"),
        (["joint", "--minutes", "-1"], "minutes=-1.0: must be at least 0"),
        (["--minutes", "1"], "name at least one"),
    ):
        assert main(["reproduce", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_train_eval_resume_from_a_config_file(here: Path, capsys):
    assert main(["train", save(TINY), "--smt.steps", "6", "--folder", "mine"]) == 0
    out = capsys.readouterr().out
    assert "teacher" in out and "RNN, empty memory" in out and "sequential operations" in out
    assert json.loads(Path("mine/config.json").read_text())["smt"]["steps"] == 6

    assert main(["eval", "mine"]) == 0
    assert "nats per target" in capsys.readouterr().out
    assert main(["eval", "mine", "--json", "--sequences", "16"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["sequences"] == 16
    taken = sum(stage["steps"] for stage in result["stages"])
    assert (result["seed"], result["best"], result["step"]) == (TINY.seed, False, taken)
    assert set(result["rnn"]) == {"nats", "bits", "accuracy"}
    assert result["by_position"]["edges"] == [0, 1, 2, 3, 4, 5, 6]
    assert json.loads(Path("mine/figures/evaluation-6.json").read_text()) == result
    assert imread("mine/figures/evaluation-6.png").ndim == 3
    assert imread("mine/figures/training.png").ndim == 3
    assert [stage["name"] for stage in result["stages"]] == ["smt", "dmt", "bptt"]
    assert len(result["drift"]["unexplained"]) == 6

    assert main(["resume", "mine"]) == 0
    assert "finished already" in capsys.readouterr().out
    assert main(["train", "tiny.json", "--folder", "mine", "--resume"]) == 0


def test_digits_are_sampled_as_a_png(here: Path, capsys):
    config = replace(TINY, data=Digits(), smt=replace(TINY.smt, steps=2), bptt=TINY.bptt)
    config = replace(config, dmt=replace(TINY.dmt, steps=1), name="digits")
    config = replace(config, bptt=replace(TINY.bptt, steps=0))
    assert main(["train", save(config)]) == 0
    assert "memtrain generate runs/digits" in capsys.readouterr().out
    assert main(["eval", "runs/digits"]) == 0
    assert "bits per pixel" in capsys.readouterr().out
    assert main(["generate", "runs/digits", "--count", "4", "--out", "a.png"]) == 0
    assert main(["generate", "runs/digits", "--count", "4", "--out", "b.png"]) == 0
    assert main(["generate", "runs/digits", "--count", "4", "--seed", "1", "--out", "c.png"]) == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert Path("a.png").read_bytes() != Path("c.png").read_bytes()
    assert imread("a.png").ndim == 3
    assert main(["generate", "runs/digits", "--count", "1"]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1]).is_file()


TASKS = ["retrieval", "copy", "stack", "recall", "arithmetic", "parity", "modular-arithmetic", "s5"]


@pytest.mark.parametrize("name", [*TASKS, "digits"])
def test_data_shows_samples(name: str, capsys):
    assert main(["data", name, "--count", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--count 3", "--count: is for a task, and none is named"),
        ("retrieval --out x", "--out: is for data that is prepared, and retrieval is none"),
        ("retrieval --option size 8", "--option: is for data that is prepared, and retrieval"),
        ("mnist --seed 3", "--seed: is for a task, and mnist is none"),
        ("book.txt --count 3", "--count: is for a task, and book.txt is none; leave it out"),
        ("book.txt --data-dir here", "--data-dir: is for a data set, and book.txt is none"),
        ("retreival --count 3", "did you mean retrieval?"),
    ],
)
def test_data_refuses_options_of_something_else(arguments: str, said: str, here: Path, capsys):
    (here / "book.txt").write_text("It was late.\n" * 99)
    assert said in refused(capsys, "data", *arguments.split())
    assert not Path("data").exists()


def test_data_lists_every_task_with_what_it_is(capsys):
    assert main(["data"]) == 0
    shown = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    listed = {line[0]: line[1] for line in shown if len(line) == 2}
    assert listed["modular-arithmetic"].startswith("Output the value of an expression modulo m")
    assert set(TASKS) <= set(listed)


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_saves_and_resuming_gives_the_same_weights(here: Path, monkeypatch):
    """The real thing: a process, its signal, its exit status, and the same weights at the end."""
    config = replace(TINY, smt=replace(TINY.smt, steps=150), log=replace(TINY.log, every=1))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "memtrain"]
    whole = [*command, "train", save(config), "--folder", "whole"]
    subprocess.run(whole, check=True, capture_output=True)
    child = subprocess.Popen(
        [*command, "train", "tiny.json", "--folder", "cut"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics = Path("cut/metrics.jsonl")
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGINT)
    _, output = child.communicate()
    assert child.returncode == 130
    assert "continue with: memtrain resume cut" in output and "Traceback" not in output
    subprocess.run([*command, "resume", "cut"], check=True, capture_output=True)
    ends = [sorted(Path(name, "checkpoints").iterdir())[-1] for name in ("whole", "cut")]
    assert ends[0].name == ends[1].name
    one, other = ((end / "weights.safetensors").read_bytes() for end in ends)
    assert one == other


@pytest.mark.usefixtures("default_signals")
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.skipif(cores() < 2, reason="on one core the demo starts its process after a minute")
@pytest.mark.parametrize("delay", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("command", ["demo", "reproduce synthetic --processes 2"])
def test_ctrl_c_while_processes_start_prints_no_traceback(
    here: Path, monkeypatch, command: str, delay: float
):
    """As a terminal sends it: to the command and to every process that it has started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nor where it would share a GPU
    parent = subprocess.Popen(
        [sys.executable, "-m", "memtrain", *command.split()],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not any("spawn_main" in line for line in command_lines_below(parent.pid)):
        assert parent.poll() is None, parent.communicate()
        time.sleep(0.02)
    time.sleep(delay)
    os.killpg(parent.pid, signal.SIGINT)
    _, output = parent.communicate()
    assert parent.returncode == 130
    assert "memtrain: stopped" in output and "Traceback" not in output


def test_ctrl_c_in_generated_code_is_one_line(tmp_path: Path):
    """Dataclasses are made so: an import is full of it, and Python treats it differently."""
    (tmp_path / "pressed.py").write_text(
        "import runpy, sys\n"
        "from types import SimpleNamespace\n"
        "import memtrain.cli as cli\n"
        "def press(arguments):\n"
        "    exec('raise KeyboardInterrupt')\n"
        "cli.import_module = lambda name: SimpleNamespace(demo=press)\n"
        "sys.argv = ['memtrain', 'demo']\n"
        "runpy.run_module('memtrain', run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "pressed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "memtrain: stopped\n")


def test_a_torchrun_process_skips_pythons_shutdown(monkeypatch):
    """Not through Python's own end, in which torch's threads may abort."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    code = "import atexit, os; from memtrain.cli import main; atexit.register(os.abort)"
    command = [sys.executable, "-c", f"{code}; main(['trian'])"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean train?" in done.stderr


def command_lines_below(process: int) -> list[str]:
    """How the processes were started that this one has started."""
    children = Path(f"/proc/{process}/task/{process}/children")
    lines = []
    for child in children.read_text().split() if children.exists() else []:
        with suppress(OSError):  # it has ended
            lines.append(Path(f"/proc/{child}/cmdline").read_text())
    return lines


def test_an_unknown_field_of_a_config_is_refused_by_name(here: Path, capsys):
    Path("bad.json").write_text(to_json(TINY).replace('"joint"', '"jiont"'))
    assert "jiont: SMTConfig has no such field; did you mean joint?" in refused(
        capsys, "train", "bad.json"
    )


def test_existing_run_folder_is_not_overwritten(here: Path, capsys):
    assert main(["train", save(TINY), "--smt.steps", "2"]) == 0
    before = Path("runs/tiny/metrics.jsonl").read_text()
    capsys.readouterr()
    line = refused(capsys, "train", "tiny.json")
    assert "runs/tiny: a run is there already; memtrain resume runs/tiny continues it" in line
    assert line.endswith(", --overwrite replaces it, --folder takes another place\n")
    assert "Run.open" not in line
    assert Path("runs/tiny/metrics.jsonl").read_text() == before
    assert "choose one" in refused(capsys, "train", "tiny.json", "--resume", "--overwrite")
    assert main(["train", "tiny.json", "--smt.steps", "3", "--overwrite"]) == 0


def test_generate_refuses_a_task_without_sequences(here: Path, capsys):
    assert main(["train", save(TINY), "--smt.steps", "2"]) == 0
    capsys.readouterr()
    assert "asks for answers" in refused(capsys, "generate", "runs/tiny")
    assert "count=0" in refused(capsys, "generate", "runs/tiny", "--count", "0")
    assert "sequences=0" in refused(capsys, "eval", "runs/tiny", "--sequences", "0")
    line = refused(capsys, "eval", "runs/tiny", "--length", "9")
    assert "length=9: sequences of retrieval have 6 tokens" in line


SPLIT = ["--option", "held_out", "0.4"]


FEW = ["--size", "tiny", "--smt.steps", "2", "--dmt.steps", "1", "--log.evaluate-sequences", "2"]


FEW += ["--smt.batch-size", "2", "--dmt.batch-size", "2", "--dmt.rollout-length", "9"]


def test_data_prepares_a_text_and_prints_the_next_command(here: Path, capsys):
    Path("book.txt").write_text("a line of a book\n" * 99)
    assert main(["data", "book.txt"]) == 0
    out = capsys.readouterr().out
    assert "tokens" in out and "memtrain train text --data data/book-" in out
    folder = out.split()[-1]
    assert main(["data", "book.txt"]) == 0  # the same again
    assert capsys.readouterr().out == out
    assert main(["data", "book.txt", "--option", "held_out", "0.5"]) == 0
    assert folder not in capsys.readouterr().out
    assert main(["data", "book.txt", "--out", "here"]) == 0
    assert (
        "prepared here; learn it with: memtrain train text --data here" in capsys.readouterr().out
    )
    assert "here: is prepared already" in refused(capsys, "data", "book.txt", "--out", "here")
    assert main(["data", "book.txt", "--out", "here", "--overwrite"]) == 0
    line = refused(capsys, "data", "https://example.org/a.txt")
    assert "data=https://example.org/a.txt: URLs are not read" in line


def readme_commands(recipe: str) -> list[list[str]]:
    """The commands of README for your own data, and eval."""
    section = (
        (Path(__file__).parents[2] / "README.md")
        .read_text()
        .split("## Your data")[1]
        .split("\n## ")[0]
    )
    lines = re.findall(r"^    memtrain (\w+ (?:runs/)?(\w+).*)$", section, flags=re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line, name in lines if name == recipe]
    assert [command[0] for command in commands] == ["train", "generate"]
    return [commands[0], ["eval", f"runs/{recipe}"], commands[1]]


def test_readme_commands_for_your_text_run(here: Path, capsys):
    train, evaluate, write = readme_commands("text")
    book = "".join(f"It was line {n} of a long café book\r\n" for n in range(900))
    Path("book.txt").write_bytes(book.encode())
    assert main([*train, *FEW, "--data.evaluate-length", "24"]) == 0
    captured = capsys.readouterr()
    assert "prepared data/book" in captured.err and "memtrain generate runs/text" in captured.out
    config = json.loads(Path("runs/text/config.json").read_text())
    assert re.fullmatch(r"data/book-[0-9a-f]{8}", config["data"]["path"])
    assert config["data"]["evaluate_length"] == 24
    assert config["cell"]["width"] == 32

    assert main([*evaluate, "--sequences", "2"]) == 0
    table = capsys.readouterr().out
    assert "bits per byte" in table and "counts, previous three" in table
    assert main(["eval", "runs/text", "--sequences", "2", "--length", "60", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["length"] == 60 and len(result["by_position"]["rnn"]) == 30
    assert [row["name"] for row in result["baselines"]][-1] == "counts, previous three"
    assert Path("runs/text/figures/evaluation-60.png").is_file()

    assert main([*write, "--length", "20"]) == 0
    assert capsys.readouterr().out.startswith("It was")
    assert main(["generate", "runs/text", "--prompt", "café", "--length", "20"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("café") and len(first) > 10
    assert main(["generate", "runs/text", "--prompt", "café", "--length", "20"]) == 0
    assert capsys.readouterr().out == first
    assert main(["generate", "runs/text", "--count", "2", "--length", "9", "--out", "x.txt"]) == 0
    assert "---- 2 of 2 ----" in capsys.readouterr().out and Path("x.txt").is_file()
    for options, message in {
        ("--prompt", ""): "prompt='': must hold a character",
        ("--prompt", "Zebra"): "'Z' does not occur in the training text",
        ("--prompt", "a", "--given", "0.5"): "--prompt is for text",
        ("--given", "0.5"): "--given: this model generates text",
        ("--image", "x.png"): "--image: this model generates text",
        ("--temperature", "-1"): "temperature=-1.0: must be at least 0",
        ("--top-p", "0"): "top_p=0.0: must be above 0",
        ("--top-k", "-1"): "top_k=-1: must be at least 0",
        ("--length", "0"): "length=0: must be at least 1",
        ("--count", "0"): "count=0: must be at least 1",
        ("--seed", "-1"): "seed=-1: must be at least 0",
    }.items():
        assert message in refused(capsys, "generate", "runs/text", *options), options
    with_prompt = ["generate", "runs/text", "--prompt", "café", "--top-p", "2"]
    assert main(with_prompt) == 2 and not capsys.readouterr().out
    assert "length=1: must be at least 2" in refused(capsys, "eval", "runs/text", "--length", "1")
    line = refused(capsys, "eval", "runs/text", "--length", "99999")
    assert "at least 100,000 are needed" in line


def test_run_uses_its_own_data_only(here: Path, capsys):
    book = "".join(f"It was line {n} of a long book\n" for n in range(300))
    Path("book.txt").write_text(book)
    assert main(["train", "text", "--data", "book.txt", *FEW, "--data.evaluate-length", "24"]) == 0
    capsys.readouterr()
    assert main(["eval", "runs/text", "--sequences", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["unit"] == "character"  # all of it is ASCII
    scores = result["rnn"]
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")  # the data is found next to the run
    again = ["eval", "../runs/text", "--sequences", "2", "--json"]
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out)["rnn"] == scores
    shutil.copytree("../data", "data")
    path = json.loads(Path("../runs/text/config.json").read_text())["data"]["path"]
    assert main(["data", "../book.txt", "--out", path, "--overwrite", *SPLIT]) == 0
    capsys.readouterr()
    assert main(again) == 0  # other data of that name is here
    assert json.loads(capsys.readouterr().out)["rnn"] == scores
    shutil.rmtree("../data")
    for command in ("eval", "resume"):
        assert main([command, "../runs/text"]) == 2
        output = capsys.readouterr().err
        assert f"{path}: is not the data that ../runs/text learned from; prepare that" in output
    shutil.rmtree("data")
    assert main(again) == 2
    output = capsys.readouterr().err
    assert "is neither here nor next to the runs; go to the folder" in output
    assert f"prepare it again: memtrain data SOURCE --out {path}" in output
    assert main(["data", "../book.txt", "--out", path]) == 0  # as it says
    capsys.readouterr()
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out)["rnn"] == scores


def test_preparing_a_source_with_other_options_keeps_the_data_of_earlier_runs(here: Path, capsys):
    Path("book.txt").write_text("".join(f"It was line {n} of a long book\n" for n in range(300)))
    train = ["train", "text", "--data", "book.txt", *FEW, "--data.evaluate-length", "24"]
    assert main([*train, "--folder", "first"]) == 0
    evaluate = ["eval", "first", "--sequences", "2", "--json"]
    capsys.readouterr()
    assert main(evaluate) == 0
    scores = json.loads(capsys.readouterr().out)["rnn"]
    assert main([*train, *SPLIT, "--folder", "second"]) == 0
    with Path("book.txt").open("a") as file:
        file.write("one more line\n")
    assert main([*train, "--folder", "third"]) == 0
    paths = {
        json.loads(Path(name, "config.json").read_text())["data"]["path"]
        for name in ("first", "second", "third")
    }
    assert len(paths) == 3
    capsys.readouterr()
    assert main(evaluate) == 0
    assert json.loads(capsys.readouterr().out)["rnn"] == scores
    assert main(["resume", "second"]) == 0
    assert main([*train, "--folder", "third", "--resume"]) == 0  # the same data, named again
    for folder, options in (("first", []), ("third", SPLIT)):  # the source changed; the options did
        assert main([*train, *options, "--folder", folder, "--resume"]) == 2
        *_, output = capsys.readouterr().err.splitlines()
        assert "data=book.txt: is prepared as data/book-" in output and "keeps its data" in output


def test_resuming_with_another_size_or_method_is_refused(here: Path, capsys):
    Path("book.txt").write_text("".join(f"It was line {n} of a long book\n" for n in range(300)))
    train = ["train", "text", "--data", "book.txt", *FEW, "--data.evaluate-length", "24"]
    assert main([*train, "--folder", "run"]) == 0
    again = ["train", "text", "--data", "book.txt", "--folder", "run", "--resume"]
    assert main([*again, "--size", "tiny"]) == 0
    for options, message in {
        ("--size", "small"): "size=small: the run's models have other sizes",
        ("--method", "bptt", "--size", "tiny"): "method=bptt: the run's stages are smt, dmt",
        ("--seed", "3"): "seed=3: the run has seed=",
    }.items():
        assert main([*again, *options]) == 2
        assert message in capsys.readouterr().err


def test_a_finished_run_is_lengthened_through_its_config(here: Path, capsys):
    assert main(["train", "retrieval", *FEW[2:], "--folder", "run"]) == 0
    path = Path("run", "config.json")
    plain = json.loads(path.read_text())
    steps = plain["dmt"]["steps"] = plain["dmt"]["steps"] + 5
    path.write_text(json.dumps(plain))
    assert main(["resume", "run"]) == 0
    assert Run.open("run").progress.stages[-1].steps == steps


def test_generate_works_without_the_data(here: Path, capsys):
    Path("book.txt").write_text("".join(f"It was line {n} of a long book\n" for n in range(300)))
    assert main(["train", "text", "--data", "book.txt", *FEW, "--data.evaluate-length", "24"]) == 0
    write = ["generate", "runs/text", "--prompt", "It", "--length", "20"]
    capsys.readouterr()
    written = generate(Run.open("runs/text"), prompt="It", length=20)
    for name in ("book.txt", "data", "runs/text/metrics.jsonl"):
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    assert main(write) == 0
    assert capsys.readouterr().out == written.texts()[0] + "\n"
    line = refused(capsys, "generate", "runs/text", "--prompt", "~")
    assert "'~' does not occur in the training text" in line


def test_scores_are_printed_even_if_figures_cannot_be_saved(here: Path, capsys):
    assert main(["train", save(TINY), "--folder", "mine"]) == 0
    shutil.rmtree("mine/figures", ignore_errors=True)
    Path("mine/figures").write_text("in the way")
    capsys.readouterr()
    assert main(["eval", "mine", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rnn"]["nats"] > 0
    assert "no figures: mine/figures: " in captured.err


def test_method_bptt_refuses_steps_of_other_stages(here: Path, capsys):
    Path("book.txt").write_text("it was a dark and stormy night\n" * 50)
    assert (
        main(["train", "text", "--data", "book.txt", "--method", "bptt", "--smt.steps", "3"]) == 2
    )
    assert "smt.steps=3 with --method bptt, which is BPTT alone" in capsys.readouterr().err
    assert main(["train", "retrieval", "--method", "bptt"]) == 2
    assert "retrieval has one method; memtrain train retrieval-bptt;" in capsys.readouterr().err


@pytest.mark.parametrize("cell", ["transformer", "gru", "lstm", "torch.nn:LSTMCell"])
def test_method_bptt_trains_and_reports_its_cost(here: Path, capsys, cell: str):
    Path("book.txt").write_text("".join(f"line {n} of a long book\n" for n in range(900)))
    few = ["--size", "tiny", "--log.evaluate-sequences", "2", "--data.evaluate-length", "24"]
    few += ["--bptt.batch-size", "2", "--bptt.sequence-length", "9", "--bptt.seconds", "0.3"]
    train = ["train", "text", "--method", "bptt", "--cell.kind", cell, "--data", "book.txt"]
    assert main([*train, *few]) == 0
    assert "memtrain generate runs/text-bptt" in capsys.readouterr().out
    assert main(["eval", "runs/text-bptt", "--sequences", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (stage,) = result["stages"]
    assert stage["name"] == "bptt" and stage["steps"] == result["total_steps"] > 0
    assert result["total_tokens"] == 18 * stage["steps"]
    assert result["total_sequential_ops"] == stage["steps"] * stage["sequential_ops_a_step"] > 0
    assert 0.3 <= result["total_seconds"] < 30
    assert result["teacher"] is None and 0 < result["rnn"]["nats"] < 10
    assert main(["generate", "runs/text-bptt", "--length", "9"]) == 0
    assert "did you mean bptt" in refused(capsys, "train", "text", "--method", "bpt")


def test_readme_commands_for_your_images_run(here: Path, capsys):
    train, evaluate, write = readme_commands("images")
    Path("photos").mkdir()
    for number in range(30):
        image = Image.new("RGBA", (6, 6), (0, 0, 0, 255))
        image.putpixel((number % 6, number // 6), (255, 255, 255, number))
        image.save(f"photos/{number}.png")
    train[train.index("size") + 1] = "5"  # for a quicker test
    assert main([*train, *FEW]) == 0
    capsys.readouterr()
    config = json.loads(Path("runs/images/config.json").read_text())
    data = config["data"]["path"]
    expected = {"kind": "stream", "evaluate_length": 25}
    assert config["data"].items() >= expected.items() and data.startswith("data/photos-")
    assert main(evaluate) == 0
    assert "counts, left and three above" in capsys.readouterr().out
    assert main(["generate", "runs/images", "--count", "3"]) == 0
    assert main(write) == 0
    assert main(["generate", "runs/images", "--image", "photos/7.png", "--count", "2"]) == 0
    for path in capsys.readouterr().out.splitlines():
        assert imread(path).ndim == 3
    for options, message in {
        ("--prompt", "a"): "this model generates images; complete one with --image FILE",
        ("--given", "1.5"): "given=1.5: must be above 0 and below 1",
        ("--given", "0"): "given=0.0: must be above 0 and below 1",
        ("--length", "9"): "images have 25 tokens",
        ("--image", "gone.png"): "gone.png: no such image",
        ("--out", "photos"): "out=photos: is a folder",
        ("--out", "digits"): "out=digits: images are saved as PNG",
    }.items():
        assert message in refused(capsys, "generate", "runs/images", *options), options
    line = refused(capsys, "train", "text", "--data", data, "--folder", "other")
    assert f"holds images; memtrain train images --data {data}" in line
    Path("data").rename("away")  # a file to complete is enough
    assert main(["generate", "runs/images", "--image", "photos/7.png", "--seed", "1"]) == 0
    assert imread(capsys.readouterr().out.strip()).ndim == 3
    line = refused(capsys, "generate", "runs/images", "--given", "0.5")
    assert f"its data, {data}, is neither here nor next to the runs" in line


def test_a_pretrained_model_is_found_by_name(here: Path, capsys, monkeypatch):
    config = replace(TINY, name="digits", data=Digits())
    run = Run.create(config, here / "run")
    run.progress.stages.append(StageProgress("smt", 7, steps=1))
    export(run, "small-one", here / "package")
    monkeypatch.setattr(pretrained, "HOME", here / "package")
    assert main(["generate", "small-one", "--count", "4"]) == 0
    assert imread(capsys.readouterr().out.strip()).ndim == 3
    assert "small-one" in refused(capsys, "generate", "smal-one")
    line = refused(capsys, "generate", "small-one", "--given", "0.5")
    assert "a pretrained model holds no images" in line


def test_a_recipe_without_its_data_names_the_command_that_prepares_it(here: Path, capsys):
    line = refused(capsys, "train", "mnist")
    assert "memtrain data mnist --out data/mnist prepares it" in line
    assert "memtrain train text --data PATH" in refused(capsys, "train", "text")


def test_missing_or_unusable_data_is_one_line(here: Path, capsys):
    assert "did you mean mnist?" in refused(capsys, "data", "mnits")
    line = refused(capsys, "data", "mnist", "--data-dir", "empty")
    assert "empty" in line
    Path("data.npy").write_bytes(b"nonsense")
    assert "data.npy" in refused(capsys, "data", "data.npy")
    Path("t.txt").write_text("abc" * 99)
    assert "no such option" in refused(capsys, "data", "t.txt", "--option", "levels", "3")
    assert not Path("data").exists() or not list(Path("data").iterdir())


def test_code_that_a_run_folder_names_is_not_imported_without_allow_code(here: Path, capsys):
    """Neither by eval nor by train --resume: the folder may be someone else's."""
    assert main(["train", save(TINY), "--smt.steps", "2"]) == 0
    path = Path("runs/tiny/config.json")
    path.write_text(path.read_text().replace('"kind": "transformer"', '"kind": "evil:Cell"'))
    Path("evil.py").write_text("open('imported', 'w').close()\n")
    capsys.readouterr()
    for command in (["eval", "runs/tiny"], ["train", "tiny.json", "--resume"]):
        assert "evil:Cell; pass --allow-code" in refused(capsys, *command)
    assert not Path("imported").exists()
