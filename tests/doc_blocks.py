"""The code blocks of a page of documentation, and how tests run them.

A page's blocks run in order in one folder that holds `sample_files`. ```python blocks share one
namespace; ```bash and ```console blocks are commands. Training ends each stage after a step or
two. A block after `<!-- not run: needs a GPU -->` only has to be well-formed.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import numpy as np
from PIL import Image

import memtrain
from memtrain.cli import COMMANDS, main
from memtrain.cli.args import check_names, options_of
from memtrain.recipes import recipe
from memtrain.recipes.sizes import SIZES
from memtrain.training.loop import StageLoop
from memtrain.training.run import Run
from memtrain.training.stages import Training

ROOT = Path(__file__).parents[1]
LANGUAGES = {
    "python",
    "bash",
    "sh",
    "console",
    "text",
    "json",
    "toml",
    "yaml",
    "html",
    "javascript",
}
"""Languages of blocks; those after console are data or output, and are not run."""
RUN = {"python", "bash", "sh", "console"}
REASON = re.compile(r"<!-- not run: ((?:needs|takes|shows|continues) [^>]+?) -->")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    reason: str
    """Why it is not run; empty if it is."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """The lines of a shell block, without output, with continued lines joined."""
        lines = self.code.replace("\\\n", " ").splitlines()
        if self.language == "console" and any(line.startswith("$ ") for line in lines):
            return [line[2:] for line in lines if line.startswith("$ ")]
        return lines


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, but for MyST directives such as {figure}."""
    found, reason, fence = [], "", None
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if fence is None and (match := re.match(r"(`{3,}|~{3,})(.*)", line)):
            fence, language, first = match[1], match[2].strip(), number
        elif fence is not None and line.strip() == fence:
            code = "\n".join(lines[first : number - 1]) + "\n"
            if not language.startswith("{"):
                found.append(Block(page, first, language, code, reason))
            fence, reason = None, ""
        elif fence is None and line.strip():
            match = REASON.fullmatch(line.strip())
            reason = match[1] if match else ""
    assert fence is None, f"{page}: a block is not closed"
    return found


def run_blocks(blocks: list[Block], folder: Path) -> None:
    """Run the blocks of a page in a folder, which is the working directory."""
    namespace: dict = {"__name__": "page"}
    for block in blocks:
        if block.reason or block.language not in RUN:
            continue
        try:
            if block.language == "python":
                exec(compile(block.code, str(block), "exec"), namespace)
            else:
                _run_shell(block, folder)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error


def _run_shell(block: Block, folder: Path) -> None:
    """In this process if all lines are plain memtrain commands, which saves their start."""
    plain = [_plain_command(line) for line in block.commands()]
    if all(words is not None and words[:1] in ([], ["memtrain"]) for words in plain):
        for words in plain:
            if words and (status := main(words[1:])):
                raise AssertionError(f"status {status} of {shlex.join(words)}")
        return
    path = f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}"
    code = "\n".join(block.commands())
    subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True, env=_environment(path))


def _environment(path: str) -> dict[str, str]:
    packages = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return {**os.environ, "PATH": path, "PYTHONPATH": packages}


def _plain_command(line: str) -> list[str] | None:
    """The words of a command; None if it needs a shell."""
    try:
        words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
        if any(re.fullmatch(r"[();<>|&]+", word) for word in words) or re.search(
            r"[$`]|^\w+=", line
        ):
            return None
        return shlex.split(line, comments=True)
    except ValueError:  # an open quote: the next lines belong to it
        return None


@contextmanager
def short_stages() -> Iterator[None]:
    """End each stage of every run after its first steps, and take the smallest models.

    Operations are not counted: under the checks of shapes that takes as long as the steps.
    """

    class Short(memtrain.Callback):
        def on_stage_start(self, stage: str, step: int, steps: int) -> None:
            raise memtrain.EndStage("only its first steps are trained here")

    train, evaluate, stage_loop = Run.train, Run.evaluate, Training._stage_loop

    def logged_at_once(training: Training, *arguments) -> StageLoop:
        loop = stage_loop(training, *arguments)
        return replace(loop, log=replace(loop.log, every=1))  # then the stage can end

    def train_shortly(run: Run, *arguments, callbacks=(), **options):
        return train(run, *arguments, callbacks=[*callbacks, Short()], **options)

    def evaluate_shortly(run: Run, sequences: int | None = 32, **options):
        return evaluate(run, min(sequences or 32, 32), **options)

    with (
        patch.object(Run, "train", train_shortly),
        patch.object(Run, "evaluate", evaluate_shortly),
        patch.object(Training, "_stage_loop", logged_at_once),
        patch("memtrain.training.stages.sequential_ops", lambda step: 1),
        patch.dict(SIZES, dict.fromkeys(SIZES, SIZES["tiny"])),
    ):
        yield


def check_form(block: Block) -> None:
    """A block that is not run: Python compiles, commands and scripts exist, options are known."""
    if block.language == "python":
        ast.parse(block.code)
    elif block.language in RUN:
        for line in block.commands():
            for part in re.split(r"(?:;|&&|\|)(?= )", line):
                check_command(part)


def check_command(line: str) -> None:
    """Check one command of a shell without running it."""
    words = shlex.split(re.sub(r" > \S+", "", line), comments=True)
    words = [word for word in words if word != "..."]  # options that are left out
    if not words:
        return
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    for script in [word for word in words if word.startswith("scripts/")]:
        assert (ROOT / script).is_file(), f"{script}: no such file"
    if words[0] == "memtrain" and len(words) > 1:
        _check_options(words[1], words[2:])


class _ParsedError(Exception):
    """Raised instead of doing what was parsed."""


def _check_options(name: str, arguments: list[str]) -> None:
    """Parse the arguments of a command; raises what its user would see."""
    assert name in COMMANDS, f"memtrain {name}: no such command"
    if name == "torchrun":
        inner = next(i for i, word in enumerate(arguments) if word in ("train", "resume"))
        return _check_options(arguments[inner], arguments[inner + 1 :])
    place, _, function = COMMANDS[name].partition(":")
    module = import_module(f"memtrain.cli.{place}")
    if name == "train":
        module._parse_train(arguments[0], arguments[1:])
    elif name == "resume":
        options = options_of(module._ResumeOptions) + options_of(
            memtrain.RunConfig, recipe("digits")
        )
        check_names(arguments, options, "memtrain resume")
    else:
        parse = module.parse

        def parse_only(*given, **options):
            parse(*given, **options)
            raise _ParsedError

        with patch.object(module, "parse", parse_only), suppress(_ParsedError):
            getattr(module, function)(arguments)


def sample_files(folder: Path) -> None:
    """Small files with the names that the pages use for the reader's data."""
    sentence = "In the beginning was the word, and it was long ago. It was late.\n"
    for name in ("book.txt", "poems.txt", "notes/one.txt", "src/code.py", "README.md"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{number}: {sentence}" for number in range(400)))
    draw = np.random.default_rng(0)
    for name in ("photos", "icons", "animals/cat", "animals/dog"):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            pixels = draw.integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / "mine.png")
    np.save(folder / "digits.npy", draw.integers(0, 256, (60, 8, 8), np.uint8))
    np.save(folder / "digits-labels.npy", np.arange(60) % 10)
    rows = [f"{t},{t % 24},{t % 7 > 4:d},{t % 24 + draw.normal():.3f}" for t in range(600)]
    (folder / "demand.csv").write_text("\n".join(["time,temperature,promo,y", *rows]))
    (folder / "sales.csv").write_text((folder / "demand.csv").read_text())
    (folder / ".bin").mkdir()
    for name, call in (("memtrain", "from doc_blocks import shell; shell()"), ("python", "")):
        command = f"-c {shlex.quote(call)} " if call else ""
        script = folder / ".bin" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command}"$@"\n')
        script.chmod(0o755)


def shell() -> None:
    """`memtrain` in a shell that a test starts."""
    with short_stages():
        sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    pages = sorted((ROOT / "docs").rglob("*.md"))
    every = [block for page in pages for block in blocks_of(page) if block.language in RUN]
    skipped = [f"{block}: {block.reason}" for block in every if block.reason]
    print(json.dumps({"run": len(every) - len(skipped), "not run": skipped}, indent=1))
