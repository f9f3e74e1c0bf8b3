"""The command line: `memtrain --help` lists the commands, `memtrain COMMAND --help` explains one.

Each command imports only the modules it needs: help is quick, training imports torch.
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module

from memtrain import __version__
from memtrain.errors import FailedElsewhereError, MemtrainError, did_you_mean
from memtrain.runs.processes import (
    REQUEUE,
    Terminated,
    command_signals,
    end_if_one_of_several,
    end_process,
    exit_status,
)

OVERVIEW = f"""\
memtrain {__version__}: recurrent networks, trained without unrolling them.

usage: memtrain COMMAND [OPTIONS]

  demo              compare SMT -> DMT with BPTT on the same cell, in minutes
  train RECIPE      train a recipe, or a config.json, into a run folder
  resume RUN        continue a stopped run, or train a finished one longer
  label RUN         write the teacher's memories to a file, to train from them
  eval RUN          losses, accuracy, drift and cost of a run
  generate RUN      sample text, images as a PNG grid, or forecasts
  remember RUN FILE read any amount of text, write its memory to a file
  export RUN        write the network for Hugging Face, ONNX or a browser
  serve RUN         serve the network over HTTP, as OpenAI's completions
  runs [FOLDER]     list runs: data, method, steps, held-out loss, state
  compare RUN RUN   runs side by side: settings, losses, costs, a figure
  race DATA         which method is best for this data here, in minutes
  data [NAME]       list tasks and data sets, show samples, or prepare real data
  bench [SUITE]     time training steps and generation on this machine
  reproduce FIGURE  train the runs of a figure of the paper, check its claim
  report [FOLDER]   one HTML page about everything that was reproduced
  env               versions, hardware and fast paths here, for an issue report
  torchrun COMMAND  train or resume on several GPUs or machines

Start with
  memtrain demo
  memtrain train digits
  memtrain eval runs/digits
  memtrain generate runs/digits

`memtrain COMMAND --help` explains a command. `memtrain train RECIPE --help`
lists the options that people change first, `memtrain train RECIPE --help-all`
all of them.
"""

COMMANDS = {
    "demo": "paper:demo",
    "train": "train:train",
    "resume": "resume:resume",
    "label": "label:label",
    "eval": "evaluate:evaluate",
    "generate": "generate:generate",
    "remember": "remember:remember",
    "export": "export:export",
    "serve": "serve:serve",
    "runs": "runs:runs",
    "compare": "runs:compare",
    "race": "race:race",
    "data": "data:data",
    "bench": "bench:bench",
    "reproduce": "paper:reproduce",
    "report": "paper:report",
    "env": "env:env",
    "torchrun": "torchrun:torchrun",
}
"""Module of this package and function of each command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Without arguments it takes the process's own. Then a process that a signal ended, and each
    process of torchrun, exits here and skips Python's shutdown.
    """
    with command_signals() as signals:
        try:
            status = _run(list(sys.argv[1:] if arguments is None else arguments))
        except BaseException as error:
            # A signal during a call into a library may surface as another exception.
            if signals.first and not isinstance(error, KeyboardInterrupt):
                error = Terminated(signals.first)
            if not isinstance(error, KeyboardInterrupt):
                raise
            print("memtrain: stopped", file=sys.stderr)
            status = exit_status(error)
        if arguments is None and (status > 128 or status == REQUEUE):
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
    except BrokenPipeError:
        return 1
    except MemtrainError as error:
        message = error.command_line
    except OSError as error:
        message = f"{error.filename or 'file'}: {error.strerror}"
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch raises a plain RuntimeError when it runs out of memory.
        if not isinstance(error, MemoryError) and not re.search("(allocate|of) memory", str(error)):
            raise
        message = "not enough memory; reduce the batch size or the model"
    print(f"memtrain: {message}", file=sys.stderr)
    return 2
