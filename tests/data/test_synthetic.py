from collections import Counter
from functools import partial
from itertools import pairwise, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain.config import (
    S5,
    Arithmetic,
    Copy,
    ModularArithmetic,
    Parity,
    Recall,
    Retrieval,
    Stack,
)
from memtrain.data import synthetic
from memtrain.data.synthetic import (
    TASKS,
    ModularArithmeticTask,
    RecallTask,
    arithmetic_batch,
    copy_batch,
    draw_distinct_keys,
    modular_targets,
    recall_batch,
    retrieval_targets,
    s5_targets,
    stack_targets,
)
from memtrain.data.task import check_task
from memtrain.shapes import IGNORE_INDEX, Batch

NONE = IGNORE_INDEX
A, B, D = 1, 2, 4  # the paper's letters as tokens


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def draw(config, count, seed):
    return TASKS[type(config)](config).sample(count, seeded(seed))


def rows(batch: Batch):
    return zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)


# ------------------------------------------------------------------- solvers, one sequence each


def solve_retrieval(x, config):
    return [NONE] * (len(x) - 1) + [x[x.index(0) + 1]]


def solve_copy(x, config):
    string = x[: x.index(0)]
    assert x[len(string) :] == [0] * len(string)
    return [NONE] * len(string) + string[::-1]


def solve_stack(x, config):
    stack, answers = [], []
    for token in x:
        if token == 0:
            answers.append(stack.pop())
        else:
            stack.append(token)
            answers.append(NONE)
        assert len(stack) <= config.depth
    return answers


def split_recall(x, config):
    """The pairs, the queried key and the rest of a sequence, everything as tuples."""
    tokens = iter(x)

    def take(length):
        return tuple(next(tokens) for _ in range(length))

    pairs = [(take(config.key_length), take(config.value_length)) for _ in range(config.pairs)]
    return pairs, take(config.key_length), tuple(tokens)


def solve_recall(x, config):
    pairs, query, blanks = split_recall(x, config)
    assert blanks == (0,) * (config.value_length - 1)
    for key, value in pairs:
        assert all(1 <= token <= config.key_symbols for token in key)
        assert all(0 < token - config.key_symbols <= config.value_symbols for token in value)
    return [NONE] * (len(x) - config.value_length) + list(dict(pairs)[query])


def fitting_rules(seen, config):
    """Every (a, b) that explains the examples."""
    rules = product(range(config.difficulty), repeat=2)
    return [(a, b) for a, b in rules if all((a * x + b) % config.vocab_size == y for x, y in seen)]


def solve_parity(x, config):
    return [x[: end + 1].count(1) % 2 for end in range(len(x))]


def solve_modular_arithmetic(x, config):
    """Spell the expression with brackets from the left, and let Python evaluate it."""
    text, answers = "0", []
    for token in x:
        operation, number = divmod(token, config.modulus)
        text = f"({text}){config.operations[operation]}{number}"
        answers.append(eval(text) % config.modulus)
    return answers


ORDERS = sorted(permutations(range(5)))


def solve_s5(x, config):
    items, answers = [0, 1, 2, 3, 4], []
    for token in x:
        if token == 0:
            items[0], items[1] = items[1], items[0]
        else:
            items.append(items.pop(0))
        answers.append(ORDERS.index(tuple(items)))
    return answers


SOLVERS = {
    Retrieval: solve_retrieval,
    Copy: solve_copy,
    Stack: solve_stack,
    Recall: solve_recall,
    Parity: solve_parity,
    ModularArithmetic: solve_modular_arithmetic,
    S5: solve_s5,
}

# -------------------------------------------------------------------------------------- configs

vocabularies = st.integers(3, 12)


def retrievals(noise):
    lengths = st.integers(3, 20)
    return st.builds(Retrieval, sequence_length=lengths, vocab_size=vocabularies, noise=noise)


copies = st.builds(
    Copy, sequence_length=st.integers(1, 10).map(lambda half: 2 * half), vocab_size=vocabularies
)
stacks = st.builds(
    Stack, sequence_length=st.integers(2, 20), vocab_size=vocabularies, depth=st.integers(1, 6)
)
arithmetics = st.integers(2, 11).flatmap(
    lambda vocab_size: st.builds(
        Arithmetic,
        vocab_size=st.just(vocab_size),
        examples=st.integers(1, 8),
        difficulty=st.integers(1, vocab_size),
    )
)


@st.composite
def recalls(draw):
    key_symbols, key_length = draw(st.integers(2, 30)), draw(st.integers(1, 20))
    return Recall(
        pairs=draw(st.integers(1, min(6, key_symbols**key_length))),
        key_length=key_length,
        value_length=draw(st.integers(1, 3)),
        key_symbols=key_symbols,
        value_symbols=draw(st.integers(2, 6)),
    )


automata = st.one_of(
    st.builds(Parity, sequence_length=st.integers(1, 20)),
    st.builds(
        ModularArithmetic,
        sequence_length=st.integers(1, 20),
        modulus=st.integers(2, 9),
        operations=st.sampled_from(["+", "*", "-+", "+-*"]),
    ),
    st.builds(S5, sequence_length=st.integers(1, 20)),
)
solvable = st.one_of(retrievals(st.just(0.0)), copies, stacks, recalls(), automata)
configs = st.one_of(retrievals(st.floats(0, 1)), copies, stacks, recalls(), arithmetics, automata)
seeds = st.integers(0, 2**31 - 1)
counts = st.integers(1, 9)

DEFAULTS = [Retrieval(noise=0.5), Copy(), Stack(), Recall(), Arithmetic(), Parity(), S5()]
DEFAULTS.append(ModularArithmetic())
every_default = pytest.mark.parametrize("config", DEFAULTS, ids=lambda config: config.kind)

# -------------------------------------------------------------------------- the paper's examples


def test_retrieval_gives_the_papers_example():
    inputs = torch.tensor([[3, 4, 0, 2, 1, 3, 1, 0]])
    assert retrieval_targets(inputs).tolist() == [[NONE] * 7 + [2]]


def test_copy_gives_the_papers_example():
    batch = copy_batch(torch.tensor([[3, 4, 1, 2]]))
    assert batch.inputs.tolist() == [[3, 4, 1, 2, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [[NONE, NONE, NONE, NONE, 2, 1, 4, 3]]


def test_stack_gives_the_papers_example():
    inputs = torch.tensor([[1, 0, 2, 3, 0, 1, 0, 0]])
    assert stack_targets(inputs).tolist() == [[NONE, 1, NONE, NONE, 3, NONE, 1, 2]]


def test_recall_gives_the_papers_example():
    one, two, three = 5, 6, 7  # values come behind the four letters a..d
    keys, values = torch.tensor([[[B], [A], [D]]]), torch.tensor([[[one], [three], [two]]])
    batch = recall_batch(keys, values, query=torch.tensor([1]))
    assert batch.inputs.tolist() == [[B, one, A, three, D, two, A]]
    assert batch.targets.tolist() == [[NONE] * 6 + [three]]


def test_recall_predicts_a_long_value_from_the_last_symbol_of_the_query():
    keys, values = torch.tensor([[[A, B], [B, B]]]), torch.tensor([[[5, 6, 7], [7, 6, 5]]])
    batch = recall_batch(keys, values, query=torch.tensor([0]))
    assert batch.inputs.tolist() == [[A, B, 5, 6, 7, B, B, 7, 6, 5, A, B, 0, 0]]
    assert batch.targets.tolist() == [[NONE] * 11 + [5, 6, 7]]


def test_arithmetic_gives_the_papers_form():
    x, a, b = torch.tensor([[0, 1, 2, 4]]), torch.tensor([3]), torch.tensor([2])
    batch = arithmetic_batch(x, a, b, vocab_size=5)
    assert batch.inputs.tolist() == [[0, 2, 1, 0, 2, 3, 4, 4]]
    assert batch.targets.tolist() == [[2, NONE, 0, NONE, 3, NONE, 4, NONE]]


def test_parity_by_hand():
    task = TASKS[Parity](Parity(sequence_length=5))
    batch = task.sample(64, seeded(0))
    wanted = {(1, 0, 1, 1, 0): [1, 1, 0, 1, 1], (0, 0, 1, 0, 1): [0, 0, 1, 1, 0]}
    found = {tuple(x): y for x, y in rows(batch) if tuple(x) in wanted}
    assert found == wanted


def test_modular_arithmetic_by_hand():
    # ((0 + 3) * 4 - 1 - 4) * 0 + 2 modulo 5; -4 and *0 are the tokens 5 + 4 and 10 + 0
    inputs = torch.tensor([[3, 14, 6, 9, 10, 2]])
    assert modular_targets(inputs, 5, "+-*").tolist() == [[3, 2, 1, 2, 0, 2]]
    # In another order the numbers of the operations change: +2 is now 5 + 2.
    assert modular_targets(torch.tensor([[7, 4]]), 5, "*+").tolist() == [[2, 3]]


def test_modular_arithmetic_is_described_as_an_expression():
    task = ModularArithmeticTask(ModularArithmetic(modulus=12))
    assert task.describe([11, 25, 13], [11, 11, 10]) == "x  +11 *1 -1\ny   11 11 10"


def test_a_running_sum_modulo_2_is_parity():
    sums = draw(ModularArithmetic(modulus=2, operations="+", sequence_length=9), 64, seed=3)
    parities = draw(Parity(sequence_length=9), 64, seed=3)
    assert torch.equal(sums.inputs, parities.inputs)
    assert torch.equal(sums.targets, parities.targets)


def test_every_operation_and_value_occurs():
    batch = draw(ModularArithmetic(modulus=3), 200, seed=0)
    assert batch.inputs.unique().tolist() == list(range(9))
    assert batch.targets.unique().tolist() == [0, 1, 2]


def test_s5_by_hand():
    # 01234 -swap-> 10234 -rotate-> 02341 -swap-> 20341 -rotate-> 03412 -rotate-> 34120
    inputs = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
    first = [24, 6 + 2 + 1, 48 + 2 + 1, 2 * 6 + 2 * 2, 3 * 24 + 3 * 6 + 2 + 1]
    # five rotations: 12340, 23401, 34012, 40123, 01234
    second = [24 + 6 + 2 + 1, 2 * 24 + 2 * 6 + 2 * 2, 3 * 24 + 3 * 6, 4 * 24, 0]
    assert s5_targets(inputs).tolist() == [first, second]


def test_swaps_and_rotations_reach_all_orders():
    reached = draw(S5(sequence_length=16), 4000, seed=0).targets.unique()
    assert reached.tolist() == list(range(120))


def test_recall_is_described_as_in_the_paper():
    task = RecallTask(Recall(pairs=3, key_symbols=4, value_length=2, value_symbols=3))
    text = task.describe([B, 5, 5, A, 7, 6, D, 6, 5, A, 0], [NONE] * 9 + [7, 6])
    assert text == "x  b 1 1 a 3 2 d 2 1 a _\ny  · · · · · · · · · 3 2"


def test_recall_is_described_in_tokens_when_letters_run_out():
    task = RecallTask(Recall(pairs=1, key_symbols=53))
    assert task.describe([53, 54, 53], [NONE, NONE, 54]) == "x  53 54 53\ny  · · 54"


# ----------------------------------------------------------------------------------- properties


@settings(deadline=None)
@given(config=solvable, seed=seeds, count=counts)
def test_every_target_follows_from_the_inputs(config, seed, count):
    for x, y in rows(draw(config, count, seed)):
        assert y == SOLVERS[type(config)](x, config)


@settings(deadline=None)
@given(config=arithmetics, seed=seeds, count=counts)
def test_every_arithmetic_target_fits_a_rule_that_explains_the_sequence(config, seed, count):
    for x, y in rows(draw(config, count, seed)):
        seen = list(zip(x[::2], x[1::2], strict=True))
        assert y[1::2] == [NONE] * config.examples
        (a, b), *_ = fitting_rules(seen, config)
        assert y[::2] == [(a * token + b) % config.vocab_size for token in x[::2]]


@settings(deadline=None)
@given(config=configs, seed=seeds, count=counts)
def test_every_task_keeps_the_contract(config, seed, count):
    task = check_task(TASKS[type(config)](config))
    batch = task.sample(count, seeded(seed))
    assert batch.inputs.shape == batch.targets.shape == (count, task.sequence_length)
    assert batch.inputs.dtype == batch.targets.dtype == torch.long
    tokens = set(range(task.vocab_size))
    assert set(batch.inputs.flatten().tolist()) <= tokens
    assert set(batch.targets.flatten().tolist()) <= tokens | {NONE}


@settings(deadline=None)
@given(config=configs, seed=seeds, count=counts)
def test_the_same_seed_gives_the_same_batch(config, seed, count):
    before = torch.get_rng_state()
    first, second = draw(config, count, seed), draw(config, count, seed)
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.targets, second.targets)
    assert torch.equal(torch.get_rng_state(), before), "only the generator may be drawn from"


@every_default
def test_other_seeds_and_later_draws_give_other_batches(config):
    task, generator = TASKS[type(config)](config), seeded(0)
    draws = [task.sample(16, generator) for _ in range(4)]
    draws += [task.sample(16, seeded(seed)) for seed in range(1, 8)]
    assert len({tuple(batch.inputs.flatten().tolist()) for batch in draws}) == len(draws)


@every_default
def test_the_sequences_of_a_batch_differ(config):
    inputs = draw(config, 16, seed=0).inputs
    assert len(inputs.unique(dim=0)) > 12


# ------------------------------------------------------------------------------------ retrieval


def test_the_marker_is_everywhere_except_before_the_query():
    inputs = draw(Retrieval(sequence_length=8, needle_within=1.0), 6000, seed=0).inputs
    assert ((inputs == 0).sum(1) == 2).all() and (inputs[:, -1] == 0).all()
    positions = Counter(x.index(0) for x in inputs.tolist())
    assert sorted(positions) == [0, 1, 2, 3, 4, 5]
    assert all(800 < number < 1200 for number in positions.values())


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.0])
def test_noise_replaces_labels_at_its_rate(noise):
    config = Retrieval(vocab_size=5, noise=noise)
    batch = draw(config, 20_000, seed=0)
    wrong = (batch.targets != retrieval_targets(batch.inputs)).any(1).double().mean().item()
    # One random symbol in four is the right one.
    assert wrong == pytest.approx(noise * 3 / 4, abs=0.02)
    assert set(batch.targets[:, -1].tolist()) == {1, 2, 3, 4}
    assert (batch.targets[:, :-1] == NONE).all()


def test_noise_leaves_the_inputs_of_a_seed_alone():
    clean, noisy = draw(Retrieval(), 64, seed=0), draw(Retrieval(noise=0.9), 64, seed=0)
    assert torch.equal(clean.inputs, noisy.inputs)


# ---------------------------------------------------------------------------------------- stack


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_stack_reaches_its_depth_and_pushes_or_pops_at_random_in_between(depth):
    pushes, visits = Counter(), Counter()
    for x in draw(Stack(sequence_length=40, depth=depth), 500, seed=0).inputs.tolist():
        height = 0
        for token in x:
            visits[height] += 1
            pushes[height] += token > 0
            height += 1 if token else -1
    assert sorted(visits) == list(range(depth + 1))
    assert pushes[0] == visits[0] and pushes[depth] == 0
    for height in range(1, depth):
        assert pushes[height] / visits[height] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("config", [Copy(vocab_size=6), Stack(vocab_size=6)])
def test_every_symbol_is_sampled_and_is_a_target(config):
    batch = draw(config, 500, seed=0)
    assert set(batch.inputs.flatten().tolist()) == {0, 1, 2, 3, 4, 5}
    assert set(batch.targets.flatten().tolist()) == {NONE, 1, 2, 3, 4, 5}


# --------------------------------------------------------------------------------------- recall


@settings(deadline=None)
@given(config=recalls(), seed=seeds)
def test_the_keys_of_a_sequence_are_distinct(config, seed):
    for x, _ in rows(draw(config, 8, seed)):
        pairs, query, _ = split_recall(x, config)
        assert len(dict(pairs)) == config.pairs
        assert query in dict(pairs)


@pytest.mark.parametrize(
    "config",
    [
        Recall(pairs=64, key_symbols=64),
        Recall(pairs=64, key_symbols=2, key_length=6),
        Recall(pairs=64, key_symbols=257),
        Recall(pairs=64, key_symbols=26, key_length=8),
        Recall(pairs=64, key_symbols=2, key_length=80),
    ],
    ids=lambda config: f"P{config.pairs}-of-{config.key_symbols}**{config.key_length}",
)
def test_many_keys_are_distinct_for_any_number_of_possible_keys(config):
    keys = draw_distinct_keys(config, 8, seeded(0))
    assert keys.shape == (8, config.pairs, config.key_length)
    assert keys.min() >= 0 and keys.max() < config.key_symbols
    for row in keys.tolist():
        assert len(set(map(tuple, row))) == config.pairs


@pytest.mark.parametrize("pairs, symbols", [(2, 9), (3, 5)], ids=["redrawn", "shuffled"])
def test_distinct_keys_are_uniformly_sampled(pairs, symbols):
    keys = draw_distinct_keys(Recall(pairs=pairs, key_symbols=symbols), 40_000, seeded(0))
    choices = Counter(tuple(row) for row in keys.squeeze(2).tolist())
    assert set(choices) == set(permutations(range(symbols), pairs))
    expected = 40_000 / len(choices)
    assert all(0.75 * expected < number < 1.25 * expected for number in choices.values())


def test_every_pair_is_queried():
    config = Recall(pairs=4)
    queried = Counter()
    for x, _ in rows(draw(config, 4000, seed=0)):
        pairs, query, _ = split_recall(x, config)
        queried[[key for key, _ in pairs].index(query)] += 1
    assert sorted(queried) == [0, 1, 2, 3]
    assert all(800 < number < 1200 for number in queried.values())


# ----------------------------------------------------------------------------------- arithmetic


def test_exactly_the_rules_within_the_difficulty_are_sampled():
    config = Arithmetic(vocab_size=7, examples=12, difficulty=3)
    found = set()
    for x, _ in rows(draw(config, 200, seed=0)):
        rules = fitting_rules(list(zip(x[::2], x[1::2], strict=True)), config)
        assert rules, "a or b was beyond the difficulty"
        found.update(rules if len(rules) == 1 else [])
    assert found == set(product(range(3), repeat=2))


def test_two_different_examples_determine_all_answers_of_a_prime_modulus():
    config = Arithmetic(vocab_size=7, difficulty=7)
    for x, y in rows(draw(config, 50, seed=0)):
        examples = list(zip(x[::2], x[1::2], strict=True))
        first, second = next((one, other) for one, other in pairwise(examples) if one != other)
        ((a, b),) = fitting_rules([first, second], config)
        assert y[::2] == [(a * token + b) % 7 for token in x[::2]]


# -------------------------------------------------------------------------------- on a device

SMALL = [Retrieval(), Copy(), Stack(), Recall(), Recall(pairs=2, key_symbols=40), Arithmetic()]
SMALL += [Parity(), S5()]


class NoHost(TorchDispatchMode):
    """Refuses what a captured step on a GPU may not do: read a number, or make one elsewhere."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim"), name
        if not any(isinstance(one, torch.Tensor) for one in tree_leaves(args)):
            assert (kwargs or {}).get("device") is not None, f"{name} is made on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_sampling_needs_no_host_synchronisation(config, monkeypatch):
    ranked = partial(draw_distinct_keys, rank=True)  # as on a GPU
    monkeypatch.setattr(synthetic, "draw_distinct_keys", lambda *a, rank: ranked(*a))
    with NoHost():
        TASKS[type(config)](config).sample(3, seeded(0))


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_tasks_are_drawn_on_a_gpu_where_a_step_can_be_captured(config):
    task = TASKS[type(config)](config)
    assert task.to(torch.device("cpu")).device.type == "cpu"
    assert task.to(torch.device("cuda")).device.type == "cuda"
    assert task.sample(2, seeded(0)).inputs.device.type == "cpu"  # held-out ones stay the same


def test_large_key_spaces_are_sampled_on_the_host():
    task = TASKS[Recall](Recall(key_symbols=20, key_length=4))
    assert task.to(torch.device("cuda")).device.type == "cpu"


def test_ranked_keys_are_distinct_and_uniform():
    config = Recall(pairs=2, key_symbols=3, key_length=2, value_symbols=2)
    keys = draw_distinct_keys(config, 4000, seeded(0), rank=True)
    numbers = keys[..., 0] + 3 * keys[..., 1]
    assert (numbers[:, 0] != numbers[:, 1]).all()
    assert numbers.flatten().bincount(minlength=9).float().div(8000).sub(1 / 9).abs().max() < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", SMALL, ids=str)
def test_sampling_is_captured_and_every_replay_is_new(config):
    task = TASKS[type(config)](config).to(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    task.sample(8, generator)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        batch = task.sample(8, generator)
    seen = set()
    for _ in range(4):
        graph.replay()
        seen.add(str(batch.inputs.tolist()))
        for x, y in rows(batch):
            assert type(config) not in SOLVERS or SOLVERS[type(config)](x, config) == y
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("config", "last"),
    [
        (Retrieval(), 15),
        (Retrieval(needle_within=1.0), 29),
        (Retrieval(needle_within=0.25), 7),
        (Retrieval(needle_within=0.0), 0),
    ],
)
def test_the_needle_is_within_the_first_fraction_of_the_sequence(config, last):
    task = synthetic.RetrievalTask(config)
    inputs = task.sample(4096, torch.Generator().manual_seed(0)).inputs
    marker = (inputs == 0).int().argmax(1)
    assert int(marker.min()) == 0 and int(marker.max()) == last
