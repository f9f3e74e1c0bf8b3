"""The base configs of the figures at every scale, and the same run trained by BPTT."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memtrain.config import (
    BPTTConfig,
    DataConfig,
    DMTConfig,
    EngineConfig,
    LogConfig,
    PretrainConfig,
    RunConfig,
    SMTConfig,
    Stream,
    model_shapes,
)
from memtrain.config.stages import STREAM_ROLLOUT
from memtrain.paper.base import Experiment, Job, Result, Setup, Tag, jobs_over
from memtrain.paper.plots import best, where
from memtrain.paper.toy_data import store


def synthetic(
    setup: Setup,
    data: DataConfig,
    *,
    memory_tokens: int = 1,
    learning_rate: float = 3e-3,
    steps: int = 0,
    seed: int = 0,
) -> RunConfig:
    """A synthetic task: T_c = T_f = T, every timestep trained, as in the paper.

    `steps` is SMT's, 0 for the scale's default; DMT has half as many. DMT's gradients pass through
    the rollout, because one-step DMT is not robust here; except at the scale paper, it also has
    SMT's learning rate and a decode loss (docs/LOG.md). The paper's encoder reads one window per
    timestep, which needs a GPU; the small scales use the causal one. At the scale gpu heads have
    32 channels, the fewest that our kernels support, to halve the kernels per step of the cell.
    """
    width = setup.pick(smoke=16, cpu=64, gpu=64, paper=256)
    heads, head_dim = setup.pick(smoke=(2, 8), cpu=(4, 16), gpu=(2, 32), paper=(8, 64))
    layers = setup.pick(smoke=1, cpu=1, gpu=1, paper=4)
    steps = steps or setup.pick(smoke=12, cpu=900, gpu=2250, paper=20_000)
    return RunConfig(
        name=data.kind,
        seed=seed,
        data=data,
        **model_shapes(
            encoder=setup.pick(
                smoke="causal", cpu="causal", gpu="bidirectional", paper="bidirectional"
            ),
            width=width,
            layers=(2 * layers, layers, layers),
            heads=heads,
            head_dim=head_dim,
            memory_tokens=memory_tokens,
            **authors_details(setup),
        ),
        smt=SMTConfig(
            steps=steps,
            learning_rate=learning_rate,
            schedule="cosine",
            timesteps=0,
            decode_timesteps=setup.pick(smoke=2, cpu=8, gpu=8, paper=0),
            future_length=256,
        ),
        dmt=_through_time(setup, steps // 2, learning_rate),
        engine=EngineConfig(device=setup.device),
        log=_log(setup, steps, sequences=setup.pick(smoke=32, cpu=1024, gpu=2048, paper=4096)),
    )


def authors_details(setup: Setup) -> dict[str, Any]:
    """The authors' details of the models at the large scales: RoPE on half of each head, and a bias
    on the logits. The small scales keep the library's defaults, and so their earlier results."""
    if setup.scale not in ("gpu", "paper"):
        return {}
    return {"rotary_fraction": 0.5, "head_bias": True}


def _through_time(setup: Setup, steps: int, learning_rate: float) -> DMTConfig:
    stage = DMTConfig(steps=steps, learning_rate=learning_rate / 3, through_time=True)
    if setup.scale == "paper":
        return stage
    return replace(stage, learning_rate=learning_rate, dynamics_weight=1.0, decode_weight=1.0)


def natural(
    setup: Setup,
    name: str,
    *,
    context_length: int = 0,
    memory_tokens: int = 0,
    width: int = 0,
    layers: int = 0,
    cell: str = "transformer",
    one_step: bool = False,
    seed: int = 0,
) -> RunConfig:
    """mnist, tinystories or sketchy: one random timestep per window, the paper's encoder.

    A size of 0 is the scale's default. All cells have a memory of the same shape. `one_step`
    selects the paper's DMT, as at the scale paper; otherwise gradients pass through the last steps
    before each label, and DMT has a decode loss, as in the recipes.
    """
    context = context_length or setup.pick(smoke=16, cpu=64, gpu=128, paper=256)
    width = width or setup.pick(smoke=16, cpu=64, gpu=128, paper=256)
    layers = layers or setup.pick(smoke=1, cpu=2, gpu=4, paper=8)
    tokens = memory_tokens or setup.pick(smoke=2, cpu=4, gpu=8, paper=16)
    heads, head_dim = setup.pick(smoke=(2, 8), cpu=(4, 16), gpu=(4, 32), paper=(8, 64))
    steps = setup.pick(smoke=10, cpu=1000, gpu=2500, paper=150_000)
    path, evaluate_length = store(setup, name)
    models = model_shapes(
        context_length=context,
        padding="void",
        width=width,
        layers=(layers, max(1, layers // 2), layers),
        heads=heads,
        head_dim=head_dim,
        memory_tokens=tokens,
        normalize_memory=cell not in ("gru", "lstm"),  # their states stay below RMS 1
        **authors_details(setup),
    )
    if cell != "transformer":
        models["cell"] = replace(models["cell"], kind=cell, width=4 * width, layers=2)
    return RunConfig(
        name=name,
        seed=seed,
        data=Stream(path=path, evaluate_length=evaluate_length),
        **models,
        smt=SMTConfig(
            steps=steps,
            batch_size=setup.pick(smoke=8, cpu=32, gpu=128, paper=128),
            learning_rate=setup.pick(smoke=1e-3, cpu=1e-3, gpu=1e-3, paper=3e-4),
            future_length=setup.pick(smoke=8, cpu=16, gpu=32, paper=64),
        ),
        dmt=_dmt(setup, one_step or setup.scale == "paper"),
        engine=EngineConfig(device=setup.device, compile=setup.scale == "paper"),
        log=_log(setup, steps, sequences=setup.pick(smoke=8, cpu=32, gpu=64, paper=64)),
    )


def _dmt(setup: Setup, one_step: bool) -> DMTConfig:
    """DMT on a stream: the paper's, or through segments with fewer labels (docs/LOG.md)."""
    stage = DMTConfig(
        steps=setup.pick(smoke=4, cpu=150, gpu=250, paper=1500),
        batch_size=setup.pick(smoke=4, cpu=16, gpu=64, paper=64),
        learning_rate=setup.pick(smoke=3e-4, cpu=3e-4, gpu=3e-4, paper=1e-4),
        rollout_length=setup.pick(smoke=16, cpu=64, gpu=256, paper=256),
        empty_start=0.5,
        label_stride=setup.pick(smoke=2, cpu=2, gpu=8, paper=8),
    )
    if one_step:
        return stage
    return replace(
        stage,
        label_stride=setup.pick(smoke=4, cpu=8, gpu=16, paper=16),
        segment=setup.pick(smoke=2, cpu=8, gpu=8, paper=8),
        dynamics_weight=1.0,
        decode_weight=1.0,
        future_length=setup.pick(smoke=8, cpu=16, gpu=32, paper=64),
    )


def bptt_twin(
    setup: Setup, config: RunConfig, learning_rate: float, *, steps: int = 0, length: int = 0
) -> RunConfig:
    """The same data and cell trained by BPTT.

    Args:
        setup: the scale.
        config: a run of SMT and DMT.
        learning_rate: of BPTT.
        steps: 0 for as many as the stages before have together.
        length: tokens per sequence of a stream; 0 for the length of DMT's rollouts.
    """
    steps = steps or config.pretrain.steps + config.smt.steps + config.dmt.steps
    return replace(
        config,
        pretrain=PretrainConfig(),
        smt=replace(config.smt, steps=0, seconds=0.0),
        dmt=replace(config.dmt, steps=0, seconds=0.0),
        bptt=BPTTConfig(
            steps=steps,
            batch_size=config.dmt.batch_size,
            learning_rate=learning_rate,
            sequence_length=length or config.dmt.rollout_length or STREAM_ROLLOUT,
        ),
        log=_log(setup, steps, sequences=config.log.evaluate_sequences),
    )


class Method(NamedTuple):
    """A way to train a cell on a data set: "SMT → DMT" or "BPTT"."""

    tags: dict[str, Tag]
    data: str
    way: str
    cell: str

    def job(self, setup: Setup, rate: float, seed: int) -> Job:
        """A run at SMT's or BPTT's learning rate. BPTT's steps are slower, so it has fewer."""
        config = natural(setup, self.data, cell=self.cell.lower(), seed=seed)
        factor = config.dmt.learning_rate / config.smt.learning_rate
        smt = replace(config.smt, learning_rate=rate)
        config = replace(config, smt=smt, dmt=replace(config.dmt, learning_rate=rate * factor))
        if self.way == "BPTT":
            longest = 784 if self.data == "mnist" else 256
            length = setup.pick(smoke=16, cpu=64, gpu=256, paper=longest)
            steps = setup.pick(smoke=6, cpu=300, gpu=200, paper=20_000)
            config = replace(config, dmt=replace(config.dmt, batch_size=smt.batch_size))
            config = bptt_twin(setup, config, rate, steps=steps, length=length)
        return Job(config=config, tags=self.tags | {"rate": rate, "seed": seed})


class TunedExperiment(Experiment):
    """A figure that runs each method at its best learning rate, which seed 0 finds.

    All methods have the same number of rates.
    """

    methods: Sequence[Method]

    def grid(self, setup: Setup) -> list[Job]:
        rates = setup.pick(
            smoke=(1e-3,), cpu=(1e-3, 3e-3), gpu=(3e-4, 1e-3), paper=(1e-4, 3e-4, 1e-3)
        )
        return [method.job(setup, rate, 0) for method in self.methods for rate in rates]

    def follow_up(self, setup: Setup, results: Sequence[Result]) -> list[Job]:
        return [
            method.job(setup, tuned(results, **method.tags)[0]["rate"], seed)
            for method in self.methods
            for seed in setup.seeds[1:]
        ]


def tuned(results: Sequence[Result], **method: Tag) -> list[Result]:
    """The runs of a method at its best learning rate."""
    runs = where(results, **method)
    return where(runs, rate=best(where(runs, seed=0), "rnn_nats")["rate"])


def loss_weight_jobs(setup: Setup) -> list[Job]:
    """Runs over the weights of the dynamics and the uniformity loss, with the paper's DMT."""
    dynamics = setup.pick(
        smoke=(0.1, 1.0), cpu=(0.01, 0.1, 1.0), gpu=(0.01, 0.1, 1.0), paper=(0.001, 0.01, 0.1, 1.0)
    )
    uniformity = setup.pick(
        smoke=(0.0, 0.001),
        cpu=(0.0, 0.001, 0.1),
        gpu=(0.0, 0.001, 0.1),
        paper=(0.0, 0.0001, 0.001, 0.01, 0.1),
    )

    def config(dynamics: float, uniformity_weight: float, seed: int) -> RunConfig:
        return weighted_losses(setup, dynamics, uniformity_weight, seed)

    return jobs_over(config, dynamics=dynamics, uniformity_weight=uniformity, seed=setup.seeds)


def weighted_losses(setup: Setup, dynamics: float, uniformity: float, seed: int) -> RunConfig:
    """A short run on stories with these weights of SMT's losses, and the paper's DMT."""
    base = natural(setup, "tinystories", one_step=True, seed=seed)
    smt = replace(base.smt, dynamics_weight=dynamics, uniformity_weight=uniformity)
    return replace(base, smt=replace(smt, steps=max(10, smt.steps // 2)))


def _log(setup: Setup, steps: int, *, sequences: int) -> LogConfig:
    """Few evaluations and checkpoints: compared with small runs, both are slow."""
    evaluations = setup.pick(smoke=1, cpu=8, gpu=5, paper=50)
    return LogConfig(
        every=max(1, steps // 50),
        evaluate_every=max(1, steps // evaluations),
        evaluate_sequences=sequences,
        checkpoint_every=max(1, steps // setup.pick(smoke=1, cpu=4, gpu=1, paper=50)),
    )
