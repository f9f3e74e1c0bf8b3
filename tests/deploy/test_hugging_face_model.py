"""An exported network in transformers gives what memtrain gives, in batches of any padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_testing import CELLS, MARKED, SEPARATED, TOKENS, exported
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline

from conftest import seeded
from memtrain.data.codec import TokenCodec
from memtrain.deploy.hugging_face import MemoryCache, MemtrainConfig, MemtrainForCausalLM
from memtrain.generation.generate import generate
from memtrain.generation.pretrained import Pretrained
from model_testing import TEXT, decided_model

PROMPT = "Once upon a time"


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, generator=seeded(3))


@pytest.fixture(scope="module")
def network_of_text() -> Pretrained:
    return decided_model()


@pytest.fixture(scope="module")
def folder(network_of_text: Pretrained, tmp_path_factory) -> Path:
    return exported(tmp_path_factory.mktemp("exports") / "text", network_of_text)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return opened(folder)


@pytest.mark.parametrize(
    ("codec", "kind"),
    [(TEXT, kind) for kind in CELLS]
    + [(codec, "transformer") for codec in (SEPARATED, TOKENS, MARKED)],
)
def test_logits_are_those_of_the_network(tmp_path: Path, codec: TokenCodec, kind: str):
    original = decided_model(codec, kind, head_bias=kind == "mlp", rotary_fraction=0.5)
    found = opened(exported(tmp_path, original))
    tokens = torch.randint(codec.vocab_size, (3, 7), generator=seeded())
    logits = found(tokens).logits
    assert logits.shape[-1] == found.config.vocab_size
    assert_close(logits[..., : codec.vocab_size], original(tokens), atol=1e-5, rtol=1e-5)
    assert (logits[..., codec.vocab_size :] < -9000).all()


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_the_readout_keeps_its_kind_of_attention(tmp_path: Path, attention: Any):
    original = decided_model(readout_attention=attention, decoder_layers=2)
    found = opened(exported(tmp_path, original))
    tokens = tokens_of(2, 6)
    assert found.readout.causal == (attention == "causal")
    assert_close(found(tokens).logits[..., :256], original(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [*((kind, "naïve 日本") for kind in CELLS), ("transformer", PROMPT), ("transformer", None)],
)
def test_greedy_text_is_that_of_generate(tmp_path: Path, kind: str, prompt: str | None):
    original = decided_model(TEXT, kind)
    found = opened(exported(tmp_path, original))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = generate(original, prompt=prompt, length=40, temperature=0.0)
    inputs = tokenizer(prompt, return_tensors="pt") if prompt else {}
    made = found.generate(**inputs, max_new_tokens=40)[0]
    assert made[1:].tolist() == expected.tokens[0, 1:].tolist()
    assert tokenizer.decode(made[1:]) == TEXT.decode_text(expected.tokens[0, 1:])
    if prompt is None:  # read as the start token
        assert made[0] == tokenizer.bos_token_id and expected.tokens[0, 0] == TEXT.start_token
    else:
        assert tokenizer.decode(made) == expected.texts()[0]


def test_generation_ends_at_the_end_of_a_text(tmp_path: Path):
    original = decided_model(SEPARATED)
    with torch.no_grad():  # of equal logits the first is taken: byte 0, which ends a text
        original.readout.head.weight.zero_()
    found = opened(exported(tmp_path, original))
    made = found.generate(tokens_of(2, 3), max_new_tokens=5)
    assert made.shape == (2, 4) and (made[:, -1] == 0).all()


def test_special_tokens_of_images_are_never_sampled(tmp_path: Path):
    original = decided_model(MARKED)
    with torch.no_grad():  # the classes are the likeliest
        original.readout.head.weight[MARKED.writable :] *= 50
    found = opened(exported(tmp_path, original))
    made = found.generate(torch.tensor([[5]] * 20), do_sample=True)
    assert made.shape == (20, 7) and (made[:, 1:] < MARKED.writable).all()
    greedy = found.generate(torch.tensor([[5]]))[0, 1:]
    expected = generate(original, label="dog", temperature=0.0).tokens[0]
    assert greedy.tolist() == expected.tolist()


def test_left_padding_does_not_change_a_row(model):
    rows = [tokens_of(1, length) for length in (9, 4, 1)]
    padded = torch.full((3, 9), model.config.pad_token_id)
    mask = torch.zeros(3, 9, dtype=torch.long)
    for number, row in enumerate(rows):
        padded[number, 9 - row.shape[1] :] = row
        mask[number, 9 - row.shape[1] :] = 1
    logits = model(padded, attention_mask=mask).logits
    made = model.generate(padded, attention_mask=mask, max_new_tokens=12)
    for number, row in enumerate(rows):
        assert_close(logits[number, 9 - row.shape[1] :], model(row).logits[0])
        alone = model.generate(row, max_new_tokens=12)
        assert made[number, 9:].tolist() == alone[0, row.shape[1] :].tolist()


def test_a_padded_row_has_the_loss_of_the_row_alone(model):
    row = tokens_of(1, 6)
    padded = torch.cat([torch.full((1, 3), model.config.pad_token_id), row], dim=1)
    mask = (padded != model.config.pad_token_id).long()
    loss = model(padded, attention_mask=mask, labels=padded).loss
    assert_close(loss, model(row, labels=row).loss)


def test_the_loss_is_that_of_the_next_token(model):
    tokens = tokens_of(2, 8)
    output = model(tokens, labels=tokens)
    log_probabilities = output.logits[:, :-1].log_softmax(dim=-1)
    expected = -log_probabilities.gather(2, tokens[:, 1:, None]).mean()
    assert_close(output.loss, expected)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()


def test_reading_in_parts_with_the_cache_is_reading_at_once(model):
    tokens = tokens_of(2, 8)
    whole = model(tokens)
    first = model(tokens[:, :5])
    assert first.past_key_values.get_seq_length() == 5
    rest = model(tokens[:, 5:], past_key_values=first.past_key_values)
    assert_close(torch.cat([first.logits, rest.logits], dim=1), whole.logits)
    assert_close(rest.past_key_values.past.memory, whole.past_key_values.past.memory)
    assert model(tokens, use_cache=False).past_key_values is None


def test_only_the_wanted_logits_are_computed(model):
    tokens = tokens_of(2, 8)
    whole = model(tokens).logits
    assert_close(model(tokens, logits_to_keep=3).logits, whole[:, -3:])
    wanted = torch.tensor([1, 6])
    assert_close(model(tokens, logits_to_keep=wanted).logits, whole[:, wanted])


def test_generation_without_the_cache_is_the_same(model):
    tokens = tokens_of(2, 4)
    fast = model.generate(tokens, max_new_tokens=10)
    assert torch.equal(model.generate(tokens, max_new_tokens=10, use_cache=False), fast)


def test_generation_continues_from_a_memory(model):
    tokens = tokens_of(2, 6)
    past = model(tokens[:, :4]).past_key_values
    continued = model.generate(tokens, past_key_values=past, max_new_tokens=9)
    assert torch.equal(continued, model.generate(tokens, max_new_tokens=9))


@torch.no_grad()
def beam_search(model: Any, tokens: Tensor, beams: int, length: int) -> list[int]:
    """The likeliest of `beams` sequences kept at every step, each read again from its start."""
    kept = [(0.0, tokens)]
    for _ in range(length):
        candidates = []
        for score, sequence in kept:
            logs = model(sequence[None]).logits[0, -1].log_softmax(dim=-1)
            best = logs.topk(beams)
            candidates += [
                (score + float(value), torch.cat([sequence, token[None]]))
                for value, token in zip(best.values, best.indices, strict=True)
            ]
        kept = sorted(candidates, key=lambda one: -one[0])[:beams]
    return kept[0][1].tolist()


def test_beam_search_is_that_of_a_plain_loop(tmp_path: Path):
    found = opened(exported(tmp_path, decided_model(kind="lstm")))
    tokens = tokens_of(4, 5)
    made = found.generate(tokens, max_new_tokens=6, num_beams=3)
    expected = [beam_search(found, row, 3, 6) for row in tokens]
    assert made.tolist() == expected
    greedy = found.generate(tokens, max_new_tokens=6)
    assert not torch.equal(made, greedy)  # else reordering would not be tested


def test_a_memory_is_reordered_repeated_and_emptied(model):
    cache = model(tokens_of(3, 4)).past_key_values
    memory = cache.past.memory
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.past.memory, memory[[0, 0, 1, 1, 2, 2]])
    cache.batch_select_indices(torch.tensor([0, 2, 4]))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(cache.past.memory, memory[[2, 0, 1]])
    cache.reset()
    assert cache.get_seq_length() == 0
    again = model(tokens_of(3, 4), past_key_values=cache)
    assert torch.equal(again.past_key_values.past.memory, memory)


def test_the_memory_does_not_grow(model):
    short, long = (model(tokens_of(1, length)).past_key_values for length in (2, 50))
    assert short.past.memory.shape == long.past.memory.shape == (1, 2, 8)


def test_pipeline_writes_text(folder: Path):
    write = pipeline("text-generation", model=str(folder))
    options = {"max_new_tokens": 5, "do_sample": False}
    alone = [write(prompt, **options)[0]["generated_text"] for prompt in ("It", PROMPT)]
    both = write(["It", PROMPT], batch_size=2, **options)
    assert [one[0]["generated_text"] for one in both] == alone
    assert alone[1].startswith(PROMPT)


def test_16_bits_are_asked_for_in_vain(folder: Path, model):
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = tokens_of(2, 5)
    assert_close(found(tokens).logits, model(tokens).logits)


def test_a_network_is_made_from_its_config(folder: Path):
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, MemtrainConfig)
    made = AutoModelForCausalLM.from_config(config)
    assert made(tokens_of(1, 3)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "input_ids: must be given"),
        ({"input_ids": tokens_of(1, 2), "past_key_values": DynamicCache()}, "MemoryCache"),
        ({"input_ids": tokens_of(1, 2), "attention_mask": torch.ones(1, 1, 2, 2)}, "attention_m"),
        ({"input_ids": tokens_of(1, 2), "labels": tokens_of(1, 2), "logits_to_keep": 1}, "labels"),
    ],
)
def test_wrong_arguments_are_named(model, arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        model(**arguments)


def test_a_memory_holds_no_keys_and_forgets_nothing():
    layer = MemoryCache().past
    with pytest.raises(TypeError, match="no keys"):
        layer.update(torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="cannot forget"):
        layer.crop(3)


def test_configs_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        MemtrainConfig(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="attention"):
        MemtrainForCausalLM(MemtrainConfig(cell={"kind": "attention"}))
