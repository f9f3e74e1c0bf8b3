"""Which run of a sweep comes first: what others wait for, then the longest."""

from memtrain.config import RunConfig
from memtrain.data.synthetic import TASKS
from memtrain.objectives.dmt import STREAM_ROLLOUT
from memtrain.paper import load
from memtrain.paper.job import Work

FORTH, BACK = 1, 2
"""What a step of a rollout costs, and what its gradient costs beside it."""


def urgency(work: Work) -> tuple[bool, int]:
    """The larger, the sooner: a long run that begins last keeps all others waiting at the end."""
    awaited = any(load(asked.figure).follows_up for asked in work.asked)
    return awaited, rough_cost(work.config) if work.train else 0


def rough_cost(config: RunConfig) -> int:
    """About how many layers a run goes through one after another, which is what takes time in
    small models."""
    kind = type(config.data)
    own = TASKS[kind](config.data).sequence_length if kind in TASKS else 0
    cell = config.cell.memory_tokens if config.cell.kind == "gru" else config.cell.layers
    teacher = config.teacher.encoder_layers + config.teacher.decoder_layers
    rollout = own or config.dmt.rollout_length or STREAM_ROLLOUT
    through = rollout if config.dmt.through_time else min(config.dmt.segment, rollout)
    smt = (FORTH + BACK) * (teacher + cell)
    dmt = FORTH * (teacher + cell * rollout) + BACK * cell * through
    bptt = (FORTH + BACK) * cell * (own or config.bptt.sequence_length)
    return config.smt.steps * smt + config.dmt.steps * dmt + config.bptt.steps * bptt
