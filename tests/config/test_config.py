import json
from copy import deepcopy
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.config import (
    CELLS,
    S5,
    Arithmetic,
    BPTTConfig,
    CellConfig,
    Copy,
    Custom,
    Digits,
    DMTConfig,
    EngineConfig,
    LogConfig,
    ModularArithmetic,
    Parity,
    PretrainConfig,
    Recall,
    Retrieval,
    RunConfig,
    SMTConfig,
    Stack,
    TeacherConfig,
    check_used,
)
from memtrain.config.serialize import (
    ADDED_FIELDS,
    CONFIG_VERSION,
    from_json,
    read_config,
    structure,
    to_json,
)
from memtrain.errors import MemtrainError
from memtrain.recipes import RECIPES, recipe

# ------------------------------------------------------------------------------- valid configs

count = st.integers(1, 256)
from_zero = st.integers(0, 1000)
share = st.floats(0, 1)
weight = st.floats(0, 1e6)
positive = st.floats(1e-12, 1e6)
even = st.integers(1, 64).map(lambda n: 2 * n)
words = st.text("abcXYZ_019", min_size=1, max_size=8)
options = st.dictionaries(words, st.one_of(words, st.integers(), st.booleans(), weight))
paths = st.sampled_from(["a:B", "my_lab.cells:Leaky", "_x.y.z:_C9"])

stage = dict(
    batch_size=count,
    learning_rate=positive,
    warmup=share,
    schedule=st.sampled_from(["constant", "cosine"]),
    weight_decay=weight,
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    clip_norm=positive,
)
data = st.one_of(
    st.builds(
        Retrieval, sequence_length=st.integers(3, 99), vocab_size=st.integers(3, 99), noise=share
    ),
    st.builds(Copy, sequence_length=even, vocab_size=st.integers(3, 99)),
    st.builds(Stack, sequence_length=st.integers(2, 99), depth=count),
    st.builds(Recall, pairs=st.integers(1, 8), key_length=st.integers(1, 9), value_symbols=even),
    st.builds(Arithmetic, vocab_size=st.integers(9, 99), difficulty=st.integers(1, 9)),
    st.builds(Parity, sequence_length=count),
    st.builds(S5, sequence_length=count),
    st.builds(
        ModularArithmetic, modulus=st.integers(2, 99), operations=st.sampled_from(["+", "-*"])
    ),
    st.builds(Digits, held_out=st.floats(0.01, 0.99)),
    st.builds(Custom, path=paths, options=options),
)
configs = st.builds(
    RunConfig,
    name=st.from_regex(r"\w[\w.-]{0,19}", fullmatch=True),
    seed=st.integers(0, 2**31 - 1),
    data=data,
    teacher=st.builds(
        TeacherConfig,
        encoder=st.sampled_from(["bidirectional", "causal"]),
        context_length=count,
        width=count,
        heads=count,
        head_dim=even,
        head_bias=st.booleans(),
        rotary_fraction=st.sampled_from([0.0, 1.0]),
        normalize_memory=st.booleans(),
    ),
    cell=st.builds(
        CellConfig,
        kind=st.one_of(st.sampled_from(["transformer", "mlp", "gru", "lstm"]), paths),
        memory_tokens=count,
        memory_dim=count,
        head_dim=even,
        options=options,
    ),
    readout_attention=st.sampled_from(["causal", "bidirectional"]),
    pretrain=st.builds(PretrainConfig, **stage, steps=count),
    smt=st.builds(
        SMTConfig,
        **stage,
        steps=count,
        timesteps=st.integers(0, 99),
        decode_timesteps=from_zero,
        future_length=count,
        joint=st.booleans(),
        train_teacher=st.booleans(),
        decode_weight=weight,
        dynamics_weight=weight,
        uniformity_weight=weight,
        uniformity_samples=st.integers(2, 999),
        learn_start=st.booleans(),
    ),
    dmt=st.builds(
        DMTConfig,
        **stage,
        steps=from_zero,
        rollout_length=from_zero,
        empty_start=share,
        label_stride=count,
        through_time=st.booleans(),
        dynamics_weight=weight,
        readout_weight=weight,
    ),
    bptt=st.builds(BPTTConfig, **stage, steps=from_zero, truncate=from_zero),
    engine=st.builds(
        EngineConfig,
        device=st.sampled_from(["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:12"]),
        precision=st.sampled_from(["auto", "fp32", "bf16"]),
        compile=st.booleans(),
        threads=from_zero,
    ),
    log=st.builds(LogConfig, every=count, evaluate_every=from_zero, keep=st.integers(2, 99)),
)


class TestRoundTrip:
    @pytest.mark.parametrize("name", RECIPES)
    def test_every_recipe_survives_json(self, name):
        config = recipe(name)
        assert from_json(to_json(config)) == config

    # The tests' own check of types looks at a random pair of a curriculum.
    @pytest.mark.filterwarnings("ignore:Do not use the `random` module")
    @settings(max_examples=60, deadline=None)
    @given(config=configs)
    def test_every_valid_config_survives_json(self, config):
        text = to_json(config)
        again = from_json(text)
        assert again == config
        assert type(again.data) is type(config.data)
        assert to_json(again) == text

    def test_options_keep_their_types(self):
        given_options = {"a": 1, "b": 1.0, "c": True, "d": "1"}
        config = replace(recipe("retrieval"), cell=CellConfig(options=given_options))
        again = from_json(to_json(config)).cell.options
        assert [type(again[key]) for key in "abcd"] == [int, float, bool, str]

    def test_json_states_its_version_and_every_field(self):
        plain = json.loads(to_json(recipe("retrieval")))
        assert plain["version"] == CONFIG_VERSION
        assert plain["bptt"]["truncate"] == 0
        assert plain["data"]["kind"] == "retrieval"

    def test_fields_left_out_take_their_defaults(self):
        config = from_json('{"smt": {"steps": 7}}')
        assert config == RunConfig(smt=SMTConfig(steps=7))

    def test_fields_that_a_written_config_is_too_old_to_have_keep_their_old_values(self):
        plain = json.loads(to_json(recipe("retrieval")))
        assert plain["data"].pop("needle_within") == Retrieval().needle_within == 0.5
        del plain["smt"]["memory_noise"]
        old = from_json(json.dumps(plain))
        assert isinstance(old.data, Retrieval) and old.data.needle_within == 1.0
        assert from_json(to_json(old)) == old
        del plain["version"]  # written by hand: fields that are left out have today's defaults
        assert from_json(json.dumps(plain)).data == Retrieval()

    @pytest.mark.parametrize("name", ADDED_FIELDS)
    def test_every_added_field_has_a_value_that_older_configs_can_take(self, name):
        *section, field_name = name.split(".")

        def place(plain: dict[str, Any]) -> dict[str, Any]:
            return plain[section[0]] if section else plain

        written = [json.loads(to_json(recipe(one))) for one in RECIPES]
        plain = next(one for one in written if field_name in place(one))
        del place(plain)[field_name]
        read = json.loads(to_json(from_json(json.dumps(plain))))
        before = json.loads(json.dumps(ADDED_FIELDS[name]))  # tuples are lists
        assert place(read)[field_name] == before

    def test_a_curriculum_is_read_as_pairs(self):
        pairs = ((32, 1000), (64, 500))
        config = RunConfig(smt=SMTConfig(steps=2000, curriculum=pairs))
        assert from_json(to_json(config)) == config and hash(config.smt.curriculum)
        for wrong, words in (
            ([[32]], "must be 2 values"),
            ([[32, "x"]], "must be a whole number"),
            ([32, 1000], "must be a list"),
            ("32 1000", "must be a list"),
        ):
            plain = json.loads(to_json(config))
            plain["smt"]["curriculum"] = wrong
            with pytest.raises(MemtrainError, match=f"smt.curriculum.*{words}"):
                from_json(json.dumps(plain))

    def test_integers_are_accepted_as_floats(self):
        rate = from_json('{"smt": {"steps": 7, "learning_rate": 1}}').smt.learning_rate
        assert (rate, type(rate)) == (1.0, float)


# ----------------------------------------------------------------------------- what is refused


def changed(field: str, value: Any) -> str:
    """The JSON of a recipe with one field, given by its path, set to a value."""
    plain = deepcopy(json.loads(to_json(recipe("retrieval"))))
    *parents, last = field.split(".")
    place = plain
    for parent in parents:
        place = place[parent]
    place[last] = value
    return json.dumps(plain)


def refusal(text: str) -> str:
    """The message of the MemtrainError that the text provokes, which is one line."""
    with pytest.raises(MemtrainError) as caught:
        from_json(text)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@dataclass
class Containers:
    """Fields of other files than a config."""

    names: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    way: Literal["a", "b"] = "a"


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "owner", "guess"),
        [
            ("seeed", "RunConfig", "seed"),
            ("tacher", "RunConfig", "teacher"),
            ("teacher.widht", "TeacherConfig", "width"),
            ("smt.learning_rat", "SMTConfig", "learning_rate"),
            ("dmt.rolout_length", "DMTConfig", "rollout_length"),
            ("data.sequence_lenght", "Retrieval", "sequence_length"),
        ],
    )
    def test_an_unknown_field_with_the_nearest_name(self, field, owner, guess):
        message = refusal(changed(field, 3))
        name = field.split(".")[-1]
        assert message == f"{name}: {owner} has no such field; did you mean {guess}?"

    def test_an_unknown_field_without_a_near_match_lists_all_names(self):
        message = refusal(changed("bptt.zzz", 3))
        assert "zzz: BPTTConfig has no such field" in message
        assert "truncate" in message and "steps" in message

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("seed", "1"),
            ("seed", 1.5),
            ("seed", True),
            ("seed", None),
            ("smt.joint", 1),
            ("smt.joint", "yes"),
            ("smt.learning_rate", "3e-4"),
            ("smt.learning_rate", True),
            ("smt.betas", 0.9),
            ("smt.betas", [0.9]),
            ("smt.betas", [0.9, 0.9, 0.9]),
            ("smt.betas", [0.9, "x"]),
            ("name", 3),
            ("teacher", None),
            ("teacher", []),
            ("teacher", "causal"),
            ("smt", 7),
            ("cell.options", [1]),
            ("cell.options", {"a": None}),
            ("cell.options", {"a": [1]}),
        ],
        ids=lambda value: json.dumps(value) if not isinstance(value, str) else value,
    )
    def test_a_wrong_type_with_its_location(self, field, value):
        assert refusal(changed(field, value)).startswith(field)

    @pytest.mark.parametrize(
        ("field", "value", "choice"),
        [
            ("smt.schedule", "sine", "cosine"),
            ("teacher.padding", "zero", "void"),
            ("teacher.encoder", "bidirectionnal", "bidirectional"),
            ("engine.precision", "fp16", "bf16"),
            ("readout_attention", 3, "causal"),
        ],
    )
    def test_an_invalid_choice_with_the_choices(self, field, value, choice):
        message = refusal(changed(field, value))
        assert all(part in message for part in (str(value), choice, field.split(".")[-1]))

    @pytest.mark.parametrize(
        ("plain", "message"),
        [
            ({"names": "joint"}, "names='joint': must be a list"),
            ({"names": {"a": 1}}, "names={'a': 1}: must be a list"),
            ({"names": ["a", 3]}, "names[1]=3: must be a string"),
            ({"numbers": [["a", 1]]}, "numbers=[['a', 1]]: must be a JSON object"),
            ({"numbers": {"a": "1"}}, "numbers['a']='1': must be a whole number"),
            ({"way": "c"}, "way='c': must be one of 'a', 'b'"),
            ({"way": ["a"]}, "way=['a']: must be one of 'a', 'b'"),
        ],
        ids=str,
    )
    def test_lists_mappings_and_choices_are_named_with_value_and_rule(self, plain, message):
        with pytest.raises(MemtrainError) as caught:
            structure(plain, Containers)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("kind", "part"),
        [
            ("retreival", "data.kind='retreival': did you mean retrieval?"),
            (
                "qqq",
                "must be one of arithmetic, copy, custom, digits, labels, modular-arithmetic, "
                "parity, recall, retrieval, s5, ",
            ),
            (None, "data.kind=None"),
            (["copy"], "data.kind=['copy']"),
        ],
        ids=str,
    )
    def test_a_bad_kind_of_data_with_the_nearest_one(self, kind, part):
        assert part in refusal(changed("data.kind", kind))

    @pytest.mark.parametrize("data", [[], None, "copy", 3], ids=str)
    def test_data_that_is_not_an_object(self, data):
        assert refusal(changed("data", data)).startswith("data: ")

    def test_a_bad_kind_of_cell_with_the_nearest_one(self):
        message = refusal(changed("cell.kind", "transfromer"))
        assert "did you mean transformer?" in message

    def test_a_bad_value_with_its_rule(self):
        message = refusal(changed("smt.future_length", 0))
        assert message == "future_length=0: must be at least 1; the paper uses 64"

    @pytest.mark.parametrize("version", [CONFIG_VERSION + 1, 0, "1", None], ids=str)
    def test_another_version(self, version):
        message = refusal(changed("version", version))
        assert f"reads config version {CONFIG_VERSION}" in message

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"smt"', '{"smt"}', "\x00"])
    def test_text_that_is_not_a_json_object(self, text):
        assert refusal(text).startswith("not a config: ")


RULES: list[tuple[type, dict[str, Any], str]] = [
    (Retrieval, dict(sequence_length=2), "sequence_length=2: must be at least 3; a marker"),
    (Retrieval, dict(vocab_size=2), "vocab_size=2: must be at least 3"),
    (Retrieval, dict(noise=-0.1), "noise=-0.1: must be between 0 and 1"),
    (Retrieval, dict(noise=1.1), "noise=1.1: must be between 0 and 1"),
    (Copy, dict(sequence_length=0), "sequence_length=0: must be at least 2"),
    (Copy, dict(sequence_length=7), "sequence_length=7: must be even"),
    (Copy, dict(vocab_size=2), "vocab_size=2: must be at least 3"),
    (Stack, dict(sequence_length=1), "sequence_length=1: must be at least 2"),
    (Stack, dict(vocab_size=2), "vocab_size=2: must be at least 3"),
    (Stack, dict(depth=0), "depth=0: must be at least 1"),
    (Recall, dict(pairs=0), "pairs=0: must be at least 1"),
    (Recall, dict(key_length=0), "key_length=0: must be at least 1"),
    (Recall, dict(value_length=0), "value_length=0: must be at least 1"),
    (Recall, dict(key_symbols=1), "key_symbols=1: must be at least 2"),
    (Recall, dict(value_symbols=1), "value_symbols=1: must be at least 2"),
    (Recall, dict(pairs=5, key_symbols=2, key_length=2), "pairs=5: must be at most 4"),
    (Arithmetic, dict(vocab_size=1), "vocab_size=1: must be at least 2"),
    (Arithmetic, dict(examples=0), "examples=0: must be at least 1"),
    (Arithmetic, dict(difficulty=0), "difficulty=0: must be at least 1"),
    (Arithmetic, dict(vocab_size=5, difficulty=6), "difficulty=6: must be at most 5"),
    (ModularArithmetic, dict(modulus=1), "modulus=1: must be at least 2"),
    (ModularArithmetic, dict(operations=""), "operations='': must be some of +, - and *"),
    (ModularArithmetic, dict(operations="+/"), "operations='+/': must be some of +, - and *"),
    (ModularArithmetic, dict(operations="++"), "operations='++': must be some of +, - and *"),
    (Digits, dict(held_out=0.0), "held_out=0.0: must lie between 0 and 1"),
    (Digits, dict(held_out=1.0), "held_out=1.0: must lie between 0 and 1"),
    (Custom, dict(path="my_task"), "path='my_task': must look like package.module:Class"),
    (Custom, dict(path="my-task:Task"), "must look like package.module:Class"),
    (TeacherConfig, dict(context_length=0), "context_length=0: must be at least 1; the paper"),
    (TeacherConfig, dict(width=0), "width=0: must be at least 1"),
    (TeacherConfig, dict(encoder_layers=0), "encoder_layers=0: must be at least 1"),
    (TeacherConfig, dict(decoder_layers=0), "decoder_layers=0: must be at least 1"),
    (TeacherConfig, dict(heads=0), "heads=0: must be at least 1"),
    (TeacherConfig, dict(head_dim=0), "head_dim=0: must be at least 2"),
    (TeacherConfig, dict(head_dim=5), "head_dim=5: must be even"),
    (
        CellConfig,
        dict(kind="rwkv"),
        "kind='rwkv': must be one of attention, gru, lstm, mlp, transformer",
    ),
    (CellConfig, dict(kind="grue"), "did you mean gru?"),
    (CellConfig, dict(kind="lab:"), "kind='lab:': must be"),
    (CellConfig, dict(memory_tokens=0), "memory_tokens=0: must be at least 1; the paper uses 16"),
    (CellConfig, dict(memory_dim=0), "memory_dim=0: must be at least 1"),
    (CellConfig, dict(width=0), "width=0: must be at least 1"),
    (CellConfig, dict(layers=0), "layers=0: must be at least 1"),
    (CellConfig, dict(heads=0), "heads=0: must be at least 1"),
    (CellConfig, dict(head_dim=1), "head_dim=1: must be at least 2"),
    (CellConfig, dict(head_dim=7), "head_dim=7: must be even"),
    (SMTConfig, dict(future_length=0), "future_length=0: must be at least 1; the paper uses 64"),
    (SMTConfig, dict(decode_timesteps=-1), "decode_timesteps=-1: must be at least 0"),
    (SMTConfig, dict(decode_weight=-1.0), "decode_weight=-1.0: must be at least 0"),
    (SMTConfig, dict(decode_weight=float("nan")), "decode_weight=nan: must be at least 0"),
    (SMTConfig, dict(dynamics_weight=-1.0), "dynamics_weight=-1.0: must be at least 0"),
    (SMTConfig, dict(uniformity_weight=-1.0), "uniformity_weight=-1.0: must be at least 0"),
    (SMTConfig, dict(uniformity_samples=1), "uniformity_samples=1: must be at least 2"),
    (DMTConfig, dict(rollout_length=-1), "rollout_length=-1: must be at least 0"),
    (DMTConfig, dict(empty_start=1.5), "empty_start=1.5: must be between 0 and 1"),
    (DMTConfig, dict(label_stride=0), "label_stride=0: must be at least 1"),
    (DMTConfig, dict(dynamics_weight=-1.0), "dynamics_weight=-1.0: must be at least 0"),
    (DMTConfig, dict(readout_weight=-1.0), "readout_weight=-1.0: must be at least 0"),
    (BPTTConfig, dict(truncate=-1), "truncate=-1: must be at least 0"),
    (EngineConfig, dict(threads=-1), "threads=-1: must be at least 0"),
    (EngineConfig, dict(device="gpu"), "device='gpu': must be auto, cpu, mps, cuda or cuda:N"),
    (EngineConfig, dict(device="cuda:x"), "device='cuda:x': must be"),
    (LogConfig, dict(every=0), "every=0: must be at least 1"),
    (LogConfig, dict(evaluate_every=-1), "evaluate_every=-1: must be at least 0"),
    (LogConfig, dict(evaluate_sequences=0), "evaluate_sequences=0: must be at least 1"),
    (LogConfig, dict(checkpoint_every=0), "checkpoint_every=0: must be at least 1"),
    (LogConfig, dict(keep=1), "keep=1: must be at least 2"),
    (RunConfig, dict(), "steps=0 in every stage: set smt.steps, dmt.steps or bptt.steps"),
    (RunConfig, dict(name="a b", smt=SMTConfig(steps=1)), "name='a b': must begin with a letter"),
    (RunConfig, dict(name="..", smt=SMTConfig(steps=1)), "name='..': must begin with a letter"),
    (RunConfig, dict(name="a/b", smt=SMTConfig(steps=1)), "name='a/b': must begin with a letter"),
    (RunConfig, dict(name="", smt=SMTConfig(steps=1)), "name='': must begin with a letter"),
    (RunConfig, dict(seed=-1, smt=SMTConfig(steps=1)), "seed=-1: must be at least 0 and below"),
    (RunConfig, dict(seed=2**31, smt=SMTConfig(steps=1)), "seed=2147483648: must be"),
    (RunConfig, dict(dmt=DMTConfig(steps=5)), "dmt.steps=5 with smt.steps=0: DMT needs"),
    (
        RunConfig,
        dict(smt=SMTConfig(steps=1, train_teacher=False)),
        "smt.train_teacher=False with pretrain.steps=0: the cell would learn the memories",
    ),
    (
        TeacherConfig,
        dict(head_dim=8, rotary_fraction=0.4),
        "rotary_fraction=0.4: must rotate an even number of the head_dim=8 channels",
    ),
    (CellConfig, dict(head_dim=6, rotary_fraction=0.5), "rotary_fraction=0.5: must rotate"),
    (CellConfig, dict(rotary_fraction=1.5), "rotary_fraction=1.5: must be between 0 and 1"),
    (
        RunConfig,
        dict(smt=SMTConfig(steps=1, token_weight=0.5)),
        "smt.token_weight=0.5: must be 0 with teacher.encoder=bidirectional",
    ),
]
for stage_class in (PretrainConfig, SMTConfig, DMTConfig, BPTTConfig):
    RULES += [
        (stage_class, dict(steps=-1), "steps=-1: must be at least 0"),
        (stage_class, dict(batch_size=0), "batch_size=0: must be at least 1"),
        (stage_class, dict(warmup=1.5), "warmup=1.5: must be between 0 and 1"),
        (stage_class, dict(weight_decay=-0.1), "weight_decay=-0.1: must be at least 0"),
        (stage_class, dict(weight_decay=float("nan")), "weight_decay=nan: must be at least 0"),
        (stage_class, dict(learning_rate=0.0), "learning_rate=0.0: must be above 0"),
        (stage_class, dict(learning_rate=float("nan")), "learning_rate=nan: must be above 0"),
        (stage_class, dict(clip_norm=0.0), "clip_norm=0.0: must be above 0"),
        (
            stage_class,
            dict(betas=(0.9, 1.0)),
            "betas=(0.9, 1.0): each must be at least 0 and below",
        ),
        (stage_class, dict(betas=(-0.1, 0.9)), "betas=(-0.1, 0.9): each must be"),
    ]


@pytest.mark.parametrize(
    ("config", "values", "message"),
    RULES,
    ids=[f"{config.__name__}-{message.split(':')[0]}" for config, _, message in RULES],
)
def test_a_value_that_breaks_a_rule_is_refused_with_field_value_and_rule(config, values, message):
    with pytest.raises(MemtrainError) as caught:
        config(**values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class TestRunConfig:
    def test_is_frozen(self):
        with pytest.raises(FrozenInstanceError):
            recipe("copy").seed = 3  # type: ignore[misc]

    def test_stages_are_named_in_the_order_in_which_they_run(self):
        assert list(recipe("copy").stages()) == ["pretrain", "smt", "dmt", "bptt"]

    def test_bptt_alone_has_no_teacher(self):
        assert not RunConfig(bptt=BPTTConfig(steps=1)).has_teacher
        assert RunConfig(smt=SMTConfig(steps=1)).has_teacher
        assert RunConfig(pretrain=PretrainConfig(steps=1)).has_teacher

    def test_dmt_may_follow_the_pretraining_of_a_teacher(self):
        RunConfig(pretrain=PretrainConfig(steps=1), dmt=DMTConfig(steps=1))

    def test_a_config_without_the_fields_added_later_opens_unchanged(self):
        plain = json.loads(to_json(recipe("copy")))
        del plain["pretrain"], plain["smt"]["train_teacher"], plain["dmt"]["train_teacher"]
        for section in ("teacher", "cell"):
            del plain[section]["rotary_fraction"]
        del plain["teacher"]["head_bias"]
        assert from_json(json.dumps(plain)) == recipe("copy")


WRONG_TYPES: list[tuple[type, dict[str, Any], str]] = [
    (SMTConfig, dict(steps="100"), "steps='100': must be a whole number"),
    (SMTConfig, dict(steps=10.0), "steps=10.0: must be a whole number"),
    (SMTConfig, dict(steps=True), "steps=True: must be a whole number"),
    (SMTConfig, dict(steps=None), "steps=None: must be a whole number"),
    (SMTConfig, dict(learning_rate="1e-3"), "learning_rate='1e-3': must be a number"),
    (SMTConfig, dict(joint=1), "joint=1: must be True or False"),
    (SMTConfig, dict(schedule="sine"), "schedule='sine': must be one of 'constant', 'cosine'"),
    (SMTConfig, dict(betas=0.9), "betas=0.9: must be 2 numbers"),
    (SMTConfig, dict(betas=(0.9, "x")), "betas=(0.9, 'x'): must be 2 numbers"),
    *(
        (
            SMTConfig,
            dict(curriculum=wrong),
            f"curriculum={wrong!r}: must be a tuple of pairs of whole numbers, as ((32, 1000), (64",
        )
        for wrong in ([(4, 2)], ((4, 2.0),), ((4, 2, 1),), (4, 2))
    ),
    (CellConfig, dict(kind=3), "kind=3: must be a string"),
    (CellConfig, dict(options={"a": [1]}), "options={'a': [1]}: must be a dict from names to"),
    (Custom, dict(options=[1]), "options=[1]: must be a dict from names to"),
    (Digits, dict(held_out="0.5"), "held_out='0.5': must be a number"),
    (RunConfig, dict(smt={"steps": 3}), "smt={'steps': 3}: must be a SMTConfig"),
    (RunConfig, dict(data="copy"), "data='copy': must be a Retrieval or Copy or"),
    (RunConfig, dict(name=3), "name=3: must be a string"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG_TYPES, ids=lambda v: str(v)[:40])
def test_a_field_of_a_wrong_type_is_refused_in_python_too(kind, options, message):
    with pytest.raises(MemtrainError) as caught:
        made(kind, **options)
    assert str(caught.value).startswith(message)


def made(kind: type, /, **options: Any) -> Any:
    """kind(**options) as a user makes it; the constructor under pytest checks types itself."""
    config = recipe("retrieval") if kind is RunConfig else kind()
    for name, value in options.items():
        object.__setattr__(config, name, value)
    config.__post_init__()
    return config


def test_integers_are_accepted_as_floats_and_lists_as_pairs():
    made(SMTConfig, steps=1, learning_rate=1, seconds=3, betas=[0.9, 0.95])


@pytest.mark.parametrize("config", [{"a": 1}, "retrieval", SMTConfig(steps=1)], ids=str)
def test_only_a_run_config_is_written(config):
    write = getattr(to_json, "__wrapped__", to_json)  # without the tests' own check of types
    with pytest.raises(MemtrainError, match="must be a RunConfig"):
        write(config)


def test_passing_a_path_instead_of_json_names_the_mistake():
    with pytest.raises(MemtrainError, match=r"^runs/c/config.json: is a path; .*Run.open"):
        from_json("runs/c/config.json")


class TestUnusedFields:
    """Fields that a kind of cell does not have."""

    RECIPE = CellConfig(layers=1, width=64, heads=4, head_dim=16)

    @pytest.mark.parametrize(
        ("kind", "field", "users"),
        [
            ("gru", "layers", "transformer, mlp, attention"),
            ("gru", "width", "transformer, mlp, attention"),
            ("gru", "heads", "transformer, attention"),
            ("mlp", "heads", "transformer, attention"),
            ("mlp", "head_dim", "transformer, attention"),
            (
                "my_file:Cell",
                "memory_dim",
                "transformer, mlp, gru, lstm; cell.options sets the arguments of a class "
                "(hidden_size, ...)",
            ),
        ],
    )
    def test_are_refused_with_the_kinds_that_have_them(self, kind, field, users):
        with pytest.raises(MemtrainError) as caught:
            check_used(replace(self.RECIPE, kind=kind, **{field: 6}), self.RECIPE)
        assert str(caught.value) == (
            f"cell.{field}=6: must be left out with cell.kind={kind}, which does not use it; "
            f"it is for {users}"
        )

    @pytest.mark.parametrize("kind", CELLS)
    def test_options_need_a_user_class(self, kind):
        with pytest.raises(MemtrainError, match="it is for package.module:Class"):
            check_used(replace(self.RECIPE, kind=kind, options={"a": 1}), self.RECIPE)
        check_used(replace(self.RECIPE, kind="my_file:Cell", options={"a": 1}), self.RECIPE)

    @pytest.mark.parametrize("kind", (*CELLS, "my_file:Cell"))
    def test_values_filled_in_by_a_recipe_are_allowed(self, kind):
        check_used(replace(self.RECIPE, kind=kind), self.RECIPE)

    @pytest.mark.parametrize(("kind", "field"), [("mlp", "layers"), ("gru", "memory_dim")])
    def test_fields_of_the_kind_may_change(self, kind, field):
        check_used(replace(self.RECIPE, kind=kind, **{field: 6}), self.RECIPE)


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(MemtrainError, match="did you mean retrieval?"):
        recipe("retreival")


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MemtrainError, match=r"config\.json: not a config"):
        read_config(tmp_path / "config.json")
