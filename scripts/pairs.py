"""Start two commands on one folder at almost the same time, repeatedly, and check the result.

    python scripts/pairs.py --pairs 100 --seed 0

Half of the pairs share a run folder (train, train --resume, train --overwrite, resume, eval,
generate, of two configs that differ in their seed), half share a data folder (`memtrain data` and
`train --data`, with one of two options). One command starts up to a few seconds after the other,
and in a quarter of the pairs one of them gets SIGKILL, SIGTERM or SIGINT at a random time.
In every case:

- a command ends with 0, or refuses with 2 and one line; no traceback, nothing hangs;
- the next command finds the folder unlocked and finishes the run: its weights equal those of the
  same config trained alone, bit-exact, and each step has one line of metrics, in order;
- an evaluation reports the loss of the same config trained alone at the same step;
- a run trained on the data that its own options make, and was evaluated on that data;
- no drafts and no foreign files remain.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pairs_checks as checks
import torch
from kill_test import lines, tiny, wait
from pairs_checks import Alone, Ended

from memtrain import cli
from memtrain.config import LogConfig, Stream
from memtrain.config.serialize import read_config, to_json
from memtrain.data.prepare import prepare_path
from memtrain.runs.processes import Interrupted
from memtrain.training.console import Reporter
from memtrain.training.run import Run

STEPS = 20
"""Steps per stage."""
PATIENCE = 120.0
"""Timeout of a command in seconds."""
OPTIONS = ("0.1", "0.3")
"""Fractions of a text that may be held out."""
LOG = LogConfig(every=1, evaluate_every=1, evaluate_sequences=4, checkpoint_every=4)
SMALL = f"""
--teacher.width 16 --teacher.heads 2 --teacher.head-dim 8 --teacher.context-length 8
--teacher.encoder-layers 1 --teacher.decoder-layers 1 --cell.width 16 --cell.layers 1
--cell.heads 2 --cell.head-dim 8 --cell.memory-tokens 2 --cell.memory-dim 8
--smt.steps {STEPS} --smt.batch-size 4 --smt.future-length 8 --data.evaluate-length 16
--dmt.steps {STEPS} --dmt.batch-size 4 --dmt.rollout-length 8 --engine.threads 1
--log.every 1 --log.evaluate-every 1 --log.evaluate-sequences 4 --log.checkpoint-every 4
--engine.device cpu""".split()


# ------------------------------------------------------------------------------- two at once


def start(words: list[str], place: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "memtrain", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=place, env=environment, **pipes)


def run_pair(pair: list[list[str]], folder: Path, rng: random.Random) -> list[Ended]:
    """Run both commands in the parent of the first one's run folder; perhaps signal one of them.

    The second starts at once, a little later, or when the first has trained a few steps.
    """
    place, target = folder.parent, lines(folder) + rng.randrange(1, STEPS)
    first = start(pair[0], place)
    if rng.random() < 0.4:
        wait(first, lambda: lines(folder) >= target)
    else:
        time.sleep(rng.choice([0.0, rng.uniform(0, 0.2), rng.uniform(0, 4)]))
    both = [first, start(pair[1], place)]
    hit = None
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0, 6))
        hit = rng.choice(both)
        if hit.poll() is None:
            hit.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
    ended = []
    for process, words in zip(both, pair, strict=True):
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\nTraceback: it hung"
        ended.append(Ended(words, process.returncode, out, err, process is hit))
    return ended


def here(place: Path, words: list[str]) -> tuple[int, str]:
    """Run a command in this process, in a folder; return its status and its stderr."""
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with contextlib.chdir(place), out, err as errors:
        status = cli.main(words)
    return status, errors.getvalue().strip()


class Runs:
    """Pairs on a run folder: configs of two seeds, with finished and half-finished runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        text = root / "book.txt"
        text.write_text("".join(f"line {n} of a book says {n * n % 97}\n" for n in range(300)))
        prepare_path(text, root / "store")
        self.alone = {seed: self._alone(seed) for seed in (0, 1)}
        self._stopped_half_way()

    def _alone(self, seed: int) -> Alone:
        data = Stream(path=str(self.root / "store"), evaluate_length=16)
        config = replace(tiny(STEPS), data=data, seed=seed, log=LOG)
        (self.root / f"{seed}.json").write_text(to_json(config))
        run = Run.create(config, self.root / f"alone-{seed}")
        before = run.evaluate(LOG.evaluate_sequences).rnn.nats
        alone = checks.result_of(run.train(Reporter()).folder)
        return alone._replace(nats=alone.nats | {0: before})

    def _stopped_half_way(self) -> None:
        class StopHalfWay(Reporter):
            def advance(self, step: int, metrics: dict[str, float]) -> None:
                if step == STEPS // 2:
                    signal.raise_signal(signal.SIGTERM)

        with contextlib.suppress(Interrupted):
            Run.create(read_config(self.root / "0.json"), self.root / "half").train(StopHalfWay())

    def one(self, rng: random.Random) -> tuple[str, list[str]]:
        """Run one pair; return its name and its problems."""
        place = self.root / "pair"
        folder, begun = place / "run", rng.choice(["", "half", "half", "alone-0"])
        place.mkdir()
        if begun:
            shutil.copytree(self.root / begun, folder)
        train = ["train", str(self.root / f"{rng.randrange(2)}.json"), "--folder", "run"]
        commands = {
            "train": train,
            "train --resume": [*train, "--resume"],
            "train --overwrite": [*train, "--overwrite"],
            "resume": ["resume", "run"],
            "eval": ["eval", "run", "--json", "--sequences", str(LOG.evaluate_sequences)],
            "generate": ["generate", "run", "--length", "20"],
        }
        chosen = [rng.choice(list(commands)[:4]), rng.choice(list(commands))]
        rng.shuffle(chosen)
        ended = run_pair([commands[name] for name in chosen], folder, rng)
        problems = [problem for one in ended for problem in checks.check_ending(one)]
        for one in ended:
            if one.words[0] == "eval" and one.status == 0:
                problems += checks.check_evaluation(one.out, self.alone)
        there = (folder / "config.json").exists()
        status, errors = here(place, commands["resume"] if there else train)
        if status:
            problems.append(f"the next command ended with {status}: {errors[-200:]}")
        else:
            problems += checks.check_run(folder, self.alone)
        shutil.rmtree(place)
        return " + ".join(sorted(chosen)), problems


class Data:
    """Pairs on a data folder: one text, prepared with one of two options."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.alone: dict[str, Alone] = {}
        for option in OPTIONS:
            place = root / f"alone-{option}"
            self._place(place)
            status, errors = here(place, self._train(option, "run"))
            assert status == 0, errors
            self.alone[option] = checks.result_of(place / "run")

    def _place(self, place: Path) -> None:
        place.mkdir()
        story = (f"line {n} of a story says {n * n % 89}\n" for n in range(400))
        (place / "book.txt").write_text("".join(story))

    def _train(self, option: str, folder: str) -> list[str]:
        source = ["--data", "book.txt", "--option", "held_out", option]
        return ["train", "text", "--size", "tiny", "--folder", folder, *source, *SMALL]

    def one(self, rng: random.Random) -> tuple[str, list[str]]:
        place = self.root / "pair"
        self._place(place)
        if rng.random() < 0.5:
            assert here(place, ["data", "book.txt", "--option", "held_out", "0.1"])[0] == 0
        options = [rng.choice(OPTIONS) for _ in range(2)]
        commands, names = [], []
        for number, option in enumerate(options):
            trains = number == 0 or rng.random() < 0.6
            again = ["data", "book.txt", "--overwrite", "--option", "held_out", option]
            commands.append(self._train(option, f"run-{number}") if trains else again)
            names.append(f"{commands[-1][0]} {option}")
        ended = run_pair(commands, place / "run-0", rng)
        problems = [problem for one in ended for problem in checks.check_ending(one)]
        for number, (one, option) in enumerate(zip(ended, options, strict=True)):
            if one.words[0] == "train" and one.status == 0 and not one.signalled:
                problems += checks.check_run(place / f"run-{number}", {0: self.alone[option]})
        if options[0] == options[1] and not any(one.signalled for one in ended):
            problems += [f"needless refusal: {one.err.strip()}" for one in ended if one.status]
        for option in dict.fromkeys(options):
            status, errors = here(place, self._train(option, f"after-{option}"))
            if status:
                problems.append(f"the next command ended with {status}: {errors[-200:]}")
            else:
                problems += checks.check_run(place / f"after-{option}", {0: self.alone[option]})
        problems += checks.check_stores(place / "data")
        shutil.rmtree(place)
        return "data: " + " + ".join(sorted(names)), problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("runs", "data"), help="pairs on this kind of folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        kinds: list[Any] = []
        for kind, make in (("runs", Runs), ("data", Data)):
            if options.only in (None, kind):
                (Path(name) / kind).mkdir()
                kinds.append(make(Path(name).resolve() / kind))
        for number in range(options.pairs):
            rng = random.Random(options.seed * 1_000_003 + number)
            pair, problems = kinds[number % len(kinds)].one(rng)
            (wrong if problems else right)[pair] += 1
            if problems:
                print(f"pair {number}, {pair}:", *problems, sep="\n    ", flush=True)
            if (number + 1) % 10 == 0:
                print(f"{number + 1} pairs, {wrong.total()} wrong", flush=True)
    for pair in sorted(right | wrong):
        print(f"{right[pair]:4} right {wrong[pair]:4} wrong  {pair}")
    print(f"{options.pairs} pairs, {wrong.total()} wrong")
    return int(wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
