"""The command line. `memtrain --help` shows the commands, `memtrain COMMAND --help` teaches one.

Only what a command needs is imported when it runs: help is quick, training imports torch.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from memtrain import __version__
from memtrain.errors import FailedElsewhereError, MemtrainError, did_you_mean
from memtrain.training.processes import (
    Terminated,
    command_signals,
    end_if_one_of_several,
    end_process,
    exit_status,
)

OVERVIEW = f"""\
memtrain {__version__}: recurrent networks, trained without unrolling them.

usage: memtrain COMMAND [OPTIONS]

  demo              one minute each of SMT -> DMT and of BPTT on the same cell, a table, a page
  train RECIPE      train a recipe, or a config.json, into a run folder
  resume RUN        continue a run that was stopped
  eval RUN          losses, accuracy, drift and cost of a run
  generate RUN      sample from the recurrent network: text, or pictures as a PNG grid
  data [NAME]       list tasks and data sets, show samples, or prepare real data
  bench [SUITE]     time training steps and generation on this machine
  reproduce FIGURE  run the grid of a figure of the paper, draw it, say whether its claim holds
  report [FOLDER]   one page of all that was reproduced
  torchrun COMMAND  train or resume on several GPUs or machines; options are torchrun's

Start with
  memtrain demo
  memtrain train digits
  memtrain eval runs/digits
  memtrain generate runs/digits

Every command explains itself with --help; `memtrain train RECIPE --help` lists every knob.
"""

COMMANDS = {
    "demo": "paper:demo",
    "train": "train:train",
    "resume": "train:resume",
    "eval": "evaluate:evaluate",
    "generate": "generate:generate",
    "data": "data:data",
    "bench": "bench:bench",
    "reproduce": "paper:reproduce",
    "report": "paper:report",
    "torchrun": "torchrun:torchrun",
}
"""Where each command is: module of this package, and function."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Without arguments it is the process's own command. Then one that a signal ended, and one of
    several processes of torchrun, end here, and not through Python's own end.
    """
    with command_signals() as signals:
        try:
            status = _run(list(sys.argv[1:] if arguments is None else arguments))
        except BaseException as error:
            # Raised in the middle of a library's work, it may come out as another exception.
            if signals.first and not isinstance(error, KeyboardInterrupt):
                error = Terminated(signals.first)
            if not isinstance(error, KeyboardInterrupt):
                raise
            print("memtrain: stopped", file=sys.stderr)
            status = exit_status(error)
        if arguments is None and status > 128:
            end_process(status)
    end_if_one_of_several(status)
    return status


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(OVERVIEW, end="")
        return 0
    if arguments[0] in ("--version", "-V", "version"):
        print(__version__)
        return 0
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise MemtrainError(f"command {name!r}: {did_you_mean(name, COMMANDS)}")
        module, _, function = COMMANDS[name].partition(":")
        command = getattr(import_module(f"memtrain.cli.{module}"), function)
        return command(rest)
    except FailedElsewhereError:
        return 2
    except MemtrainError as error:
        print(f"memtrain: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except MemoryError:
        print("memtrain: not enough memory; take less at once", file=sys.stderr)
        return 2
    except RuntimeError as error:  # torch's: a CPU that has no more has no error of its own
        if "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        print("memtrain: not enough memory; take less at once", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"memtrain: {error.filename or 'file'}: {error.strerror}", file=sys.stderr)
        return 2
