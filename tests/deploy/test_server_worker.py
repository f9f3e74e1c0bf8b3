"""Completions are those of `generate`, alone or among others; rows and sessions come free."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from server_testing import WAIT, Client, make_worker, working

from memtrain.data.codec import TokenCodec
from memtrain.data.images import ImageFormat
from memtrain.deploy.server.errors import RequestError
from memtrain.generation.generate import generate
from model_testing import TEXT, decided_model

PICTURE = TokenCodec(
    vocab_size=6,
    start_token=5,
    start_written=False,
    picture=ImageFormat(height=2, width=3, levels=4),
    classes=("cat", "dog"),
    class_counts=(1, 3),
)
MARKED = TokenCodec(vocab_size=8, start_token=7, start_written=False)


@pytest.fixture
def client() -> Iterator[Client]:
    with working(make_worker()) as client:
        yield client


def until(condition) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def idle(client: Client) -> bool:
    load = client.worker.load()
    return load["running"] == 0 and load["waiting"] == 0


SAMPLERS = [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}]


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_a_text_is_that_of_generate_with_the_same_seed(client: Client, options):
    expected = generate(decided_model(), prompt="hello", length=40, seed=3, **options)
    found = client.text("hello", max_tokens=40, seed=3, **options)
    assert found == TEXT.decode_text(expected.tokens[0, 5:])


def test_choice_i_has_the_seed_plus_i(client: Client):
    choices = client.pieces(client.submit(["ab", "cd"], n=2, max_tokens=20, seed=5))
    assert [piece.index for piece in choices] == [0, 1, 2, 3]
    prompts = ["ab", "ab", "cd", "cd"]
    for i, prompt in enumerate(prompts):
        assert choices[i].text == client.text(prompt, max_tokens=20, seed=5 + i)


def test_a_text_does_not_depend_on_the_others_in_the_batch():
    """Of 64 others, which come and go, with other prompts, lengths and samplers."""
    with working(make_worker(rows=64, queue=200)) as client:
        options = {"max_tokens": 60, "seed": 11, "logprobs": 2}
        alone = client.pieces(client.submit("begin", **options))
        others = [
            client.submit(
                chr(97 + i % 26) * (1 + i % 7),
                max_tokens=20 + 3 * i,
                seed=i,
                **SAMPLERS[i % len(SAMPLERS)],
            )
            for i in range(64)
        ]
        among = [client.submit("begin", **options) for _ in range(5)]
        for completion in among:
            assert client.pieces(completion) == alone  # their log-probabilities, too, to the bit
        for i in range(0, 64, 16):
            expected = client.pieces(others[i])
            again = client.submit(
                chr(97 + i % 26) * (1 + i % 7),
                max_tokens=20 + 3 * i,
                seed=i,
                **SAMPLERS[i % len(SAMPLERS)],
            )
            assert client.pieces(again) == expected


def test_tokens_are_a_prompt_too(client: Client):
    assert client.text((104, 105), max_tokens=9) == client.text("hi", max_tokens=9)
    for wrong in ((256,), (-1,), (2**70,)):
        with pytest.raises(RequestError, match="token"):
            client.submit(wrong)


def test_a_prompt_that_is_too_long_is_refused(client: Client):
    with pytest.raises(RequestError, match="101 tokens: at most 100") as caught:
        client.submit("x" * 101)
    assert caught.value.code == "context_length_exceeded"


def test_without_a_prompt_a_text_starts_as_the_data_does(client: Client):
    expected = generate(decided_model(), length=20, seed=2).tokens[0]
    assert client.text("", max_tokens=20, seed=2) == TEXT.decode_text(expected[1:])
    echoed = client.text("", max_tokens=20, seed=2, echo=True)
    assert echoed == TEXT.decode_text(expected)


@pytest.mark.parametrize("codec", [MARKED, PICTURE], ids=["marked", "classes"])
def test_a_special_start_token_comes_first_and_is_not_written(codec: TokenCodec):
    made = decided_model(codec)
    with working(make_worker(made)) as client:
        length = 6 if codec.picture else 9
        expected = generate(made, length=None if codec.picture else 8, seed=4).tokens[0]
        found = client.text("", max_tokens=length, seed=4)
        assert found.split() == [str(token) for token in expected]
        if codec.classes:
            dog = generate(made, label="dog", seed=4).tokens[0]
            found = client.text((codec.writable + 1,), max_tokens=length, seed=4)
            assert found.split() == [str(token) for token in dog]


def test_an_image_ends_where_it_ends():
    with working(make_worker(decided_model(PICTURE))) as client:
        for prompt, session in (((), None), ((4, 1, 2), None), ((1, 2), "s")):
            room = 6 - len([token for token in prompt if token < 4])
            with pytest.raises(RequestError, match=f"an image has 6 tokens.*at most {room}"):
                client.submit(prompt, max_tokens=room + 1, session=session)
            found = client.text(prompt, max_tokens=room - 1, session=session)
            assert len(found.split()) == room - 1
        with pytest.raises(RequestError, match="of which 5 are given; at most 1"):
            client.submit("", max_tokens=2, session="s")
        assert len(client.text("", max_tokens=1, session="s").split()) == 1


def test_stop_strings_end_a_text(client: Client):
    whole = client.text("q", max_tokens=200, seed=1)
    stop = whole[50:53]
    (piece,) = client.pieces(client.submit("q", max_tokens=200, seed=1, stop=(stop,)))
    assert piece.text == whole[: whole.index(stop)] and piece.finish == "stop"


def test_echo_and_scores_of_the_prompt(client: Client):
    made = decided_model()
    (piece,) = client.pieces(client.submit("hello", max_tokens=0, echo=True, logprobs=1))
    assert piece.text == "hello" and piece.finish == "length"
    assert [one.token for one in piece.scores] == list("hello")
    assert [one.offset for one in piece.scores] == [0, 1, 2, 3, 4]
    tokens = torch.tensor([list(b"hello")])
    with torch.no_grad():
        logs = made(tokens)[0].log_softmax(-1)
    assert piece.scores[0].logprob is None
    found = [one.logprob for one in piece.scores[1:]]
    expected = logs[torch.arange(4), tokens[0, 1:]].tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def test_a_single_token_without_anything_to_write_is_complete_at_once(client: Client):
    (piece,) = client.pieces(client.submit("h", max_tokens=0))
    assert piece.text == "" and piece.finish == "length"


# ----------------------------------------------------------------------------------- sessions


def test_a_session_continues_as_one_long_call_would(client: Client):
    options = {"temperature": 0.0}
    whole = client.text("hello", max_tokens=30, **options)
    first = client.text("hello", max_tokens=10, session="s", **options)
    second = client.text("", max_tokens=12, session="s", **options)
    third = client.text("", max_tokens=8, session="s", **options)
    assert first + second + third == whole
    assert client.worker.sessions.tokens() == {"s": 35}


def test_a_session_reads_prompts_in_parts(client: Client):
    whole = client.text("hello, you", max_tokens=10, seed=3)
    client.text("hel", max_tokens=0, session="s")
    client.text("lo, ", max_tokens=0, session="s")
    assert client.text("you", max_tokens=10, seed=3, session="s") == whole


def test_a_session_has_one_call_at_a_time(client: Client):
    running = client.submit("x", max_tokens=5000, session="s")
    with pytest.raises(RequestError) as caught:
        client.submit("y", session="s")
    assert caught.value.status == 409
    client.worker.cancel(running)
    until(lambda: idle(client))
    assert client.worker.sessions.tokens() == {}


def test_a_cancelled_call_leaves_the_session_as_it_was(client: Client):
    client.text("hello", max_tokens=3, seed=1, session="s")
    client.worker.cancel(client.submit(" more", max_tokens=5000, session="s"))
    until(lambda: idle(client))
    found = client.text("", max_tokens=9, seed=2, session="s")
    client.text("hello", max_tokens=3, seed=1, session="t")
    assert found == client.text("", max_tokens=9, seed=2, session="t")


def test_a_refused_call_frees_its_session():
    with working(make_worker(rows=1, queue=0)) as client:
        running = client.submit("x", max_tokens=5000)
        until(lambda: client.worker.load()["running"] == 1)
        with pytest.raises(RequestError, match="wait already"):
            client.submit("y", session="s")
        client.worker.cancel(running)
        until(lambda: idle(client))
        client.text("y", max_tokens=2, session="s")


# ------------------------------------------------------------------------- bounds and the end


def test_a_full_queue_refuses_and_cancelled_sequences_make_room():
    with working(make_worker(rows=2, queue=3)) as client:
        running = [client.submit("x", max_tokens=5000) for _ in range(5)]
        with pytest.raises(RequestError, match="at most 3") as caught:
            client.submit("x")
        assert caught.value.status == 429
        for completion in running:
            client.worker.cancel(completion)
        until(lambda: idle(client))
        assert client.text("hello", max_tokens=5, seed=1)


def test_stopping_ends_every_completion_with_an_error():
    with working(make_worker(rows=2)) as client:
        running = [client.submit("x", max_tokens=5000) for _ in range(4)]
    for completion in running:
        with pytest.raises(RequestError, match="stopping") as caught:
            client.pieces(completion)
        assert caught.value.status == 503
    with pytest.raises(RequestError, match="stopping"):
        client.submit("x")


def test_a_network_that_fails_fails_its_requests_and_the_worker_goes_on(client: Client, capsys):
    step, calls = client.worker.batch.step, iter(range(100))

    def failing(tokens):
        if next(calls) == 3:
            raise RuntimeError("out of everything")
        return step(tokens)

    client.worker.batch.step = failing
    with pytest.raises(RequestError, match="out of everything") as caught:
        client.text("x", max_tokens=20, session="s")
    assert caught.value.status == 500
    assert "out of everything" in capsys.readouterr().err
    assert len(client.text("x", max_tokens=3, seed=0, session="s").encode()) >= 3


def test_logits_that_are_not_finite_are_refused():
    made = decided_model()
    with torch.no_grad():
        made.readout.head.weight.fill_(float("nan"))
    worker = make_worker(made)
    with working(worker) as client, pytest.raises(RequestError, match="not finite"):
        client.text("x", max_tokens=3)


def test_usage_counts_prompts_once(client: Client):
    completion = client.submit(["ab", "cde"], n=2, max_tokens=4)
    client.pieces(completion)
    usage = {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
    assert completion.usage() == usage
