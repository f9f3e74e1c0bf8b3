"""memtrain torchrun."""

import contextlib
import io
import logging
import sys

from memtrain.errors import MemtrainError
from memtrain.runs.processes import end_process, status_of

GRACE = 120
"""Seconds for workers to save a stopped run; torchrun's default is 30."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""That it passes on to its workers: torchrun's own, and that of a scheduler before a time limit."""
USAGE = """\
usage: memtrain torchrun [OPTIONS OF TORCHRUN] train|resume ...

Train on several GPUs or machines. Same as `torchrun [OPTIONS] -m memtrain ...`,
except that a stopped or failed run prints one line and exits with the status of
its processes. For example
  memtrain torchrun --nproc-per-node 8 train mnist
  memtrain torchrun --nproc-per-node 8 --max-restarts 3 train mnist
  memtrain torchrun --nproc-per-node 8 resume runs/mnist
`torchrun --help` lists its options; those of train and resume come after the
command.
"""


def torchrun(arguments: list[str]) -> int:
    """Start a memtrain command in several processes, with torchrun's options."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            options = parse_args(["--module", *arguments])
    except SystemExit:
        reason = (report.getvalue().splitlines() or [""])[-1]
        raise MemtrainError(f"torchrun {reason.partition('error: ')[2] or reason}") from None
    if options.training_script not in ("train", "resume"):
        raise MemtrainError(f"torchrun {options.training_script}: must be train or resume")
    options.training_script_args = [options.training_script, *options.training_script_args]
    options.training_script = "memtrain"
    if getattr(options, "shutdown_timeout", 0) is None:
        options.shutdown_timeout = GRACE
    if not any(one.startswith(("--signals-to-handle", "--signals_to_handle")) for one in arguments):
        options.signals_to_handle = SIGNALS
    # Silence its reports of signals and failed workers: memtrain prints one line about them.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each logger has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(options)
    except SignalException as stopped:
        end_process(status_of(stopped.sigval))  # the main process has printed its message
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            name = failure.signal_name()
            print(f"memtrain: process {rank} was ended by {name}; resume the run", file=sys.stderr)
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        end_process(status)
    except (ValueError, RuntimeError, OSError) as error:  # its options, or its rendezvous
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MemtrainError(f"torchrun: {reason}") from None
    return 0
