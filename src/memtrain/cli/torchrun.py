"""memtrain torchrun."""

import contextlib
import io
import logging
import sys

from memtrain.errors import MemtrainError
from memtrain.training.processes import end_process

GRACE = 120
"""Seconds that workers have to save a run that was stopped; torchrun alone gives them 30."""
USAGE = """\
usage: memtrain torchrun [OPTIONS OF TORCHRUN] train|resume ...

Train on several GPUs or machines: what `torchrun [OPTIONS] -m memtrain ...` does, but a run that is
stopped or fails ends in one line, with the status of its processes. For example
  memtrain torchrun --nproc-per-node 8 train mnist
  memtrain torchrun --nproc-per-node 8 --max-restarts 3 train mnist
  memtrain torchrun --nproc-per-node 8 resume runs/mnist
`torchrun --help` lists the options; those of memtrain's command come after its name.
"""


def torchrun(arguments: list[str]) -> int:
    """Start several processes of a memtrain command, with torchrun's options."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = parse_args(["--module", *arguments])
    except SystemExit:
        reason = (said.getvalue().splitlines() or [""])[-1]
        raise MemtrainError(f"torchrun {reason.partition('error: ')[2] or reason}") from None
    if options.training_script not in ("train", "resume"):
        raise MemtrainError(f"torchrun {options.training_script}: must be train or resume")
    options.training_script_args = [options.training_script, *options.training_script_args]
    options.training_script = "memtrain"
    if getattr(options, "shutdown_timeout", 0) is None:
        options.shutdown_timeout = GRACE
    # What it says of signals and failed workers, these and memtrain say in a line.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(options)
    except SignalException as stopped:
        end_process(128 + stopped.sigval)  # the main process has said what is saved
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
