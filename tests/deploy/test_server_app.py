"""The routes: OpenAI's forms of responses, events and errors, over real connections."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from server_testing import WAIT, make_worker

from memtrain.deploy.server import app as server_app
from memtrain.deploy.server.app import Server
from memtrain.deploy.server.worker import Worker
from model_testing import decided_model

PATH = "/v1/completions"


class Live:
    """A server on loopback, and the worker behind it."""

    def __init__(self, worker: Worker, port: int) -> None:
        self.worker, self.port = worker, port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT)

    def post(self, **fields: Any) -> httpx.Response:
        return self.http.post(PATH, json=fields)

    def text(self, **fields: Any) -> str:
        response = self.post(**fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def send(self, raw: bytes) -> socket.socket:
        """A connection on which these bytes were sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)
        connection.sendall(raw)
        return connection

    def send_request(self, **fields: Any) -> socket.socket:
        body = json.dumps(fields).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        return self.send(head.encode() + body)

    def until(self, **load: int) -> None:
        """Wait until the server has this much to do."""
        ends = time.monotonic() + WAIT
        while not load.items() <= (now := self.worker.load()).items():
            assert time.monotonic() < ends, now
            time.sleep(0.01)


@contextmanager
def live(worker: Worker, **options: Any) -> Iterator[Live]:
    app = Server(worker, "tiny", **options).app()
    config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        client = Live(worker, listener.getsockname()[1])
        try:
            with client.http:
                client.http.get("/health")  # it answers when it is ready
                yield client
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(make_worker(rows=64, queue=400)) as found:
        yield found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends with [DONE]."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_a_completion_has_the_form_of_openai(server: Live):
    response = server.post(model="tiny", prompt=["ab", "cd"], max_tokens=3, n=2, seed=1)
    plain = response.json()
    assert plain["object"] == "text_completion" and plain["model"] == "tiny"
    assert plain["id"].startswith("cmpl-") and isinstance(plain["created"], int)
    assert [one["index"] for one in plain["choices"]] == [0, 1, 2, 3]
    assert {one["finish_reason"] for one in plain["choices"]} == {"length"}
    assert plain["choices"][0]["logprobs"] is None
    assert plain["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


def test_a_stream_adds_up_to_the_completion(server: Live):
    fields: dict[str, Any] = dict(prompt=["ab", "cd"], max_tokens=50, seed=1, logprobs=1)
    whole = server.post(**fields).json()
    response = server.post(**fields, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, last = events(response)
    assert last["usage"] == whole["usage"] and last["choices"] == []
    assert len({part["id"] for part in parts}) == 1
    for index in (0, 1):
        own = [c for part in parts for c in part["choices"] if c["index"] == index]
        choice = whole["choices"][index]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own][-1] == "length"
        found = [value for one in own for value in one["logprobs"]["token_logprobs"]]
        assert found == choice["logprobs"]["token_logprobs"] and len(found) == 50
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)


def test_the_first_event_comes_before_the_last_token(server: Live):
    body = {"prompt": "a", "max_tokens": 5000, "stream": True}
    with server.http.stream("POST", PATH, json=body) as response:
        assert next(response.iter_text()).startswith("data: {")
        server.until(running=1)
    server.until(running=0, waiting=0)


def test_models_health_and_sessions(server: Live):
    (found,) = server.http.get("/v1/models").json()["data"]
    assert found["id"] == "tiny" and server.http.get("/v1/models/tiny").json() == found
    assert server.http.get("/health").json()["status"] == "ok"
    first = server.text(prompt="hello", max_tokens=5, session="s", temperature=0)
    listed = server.http.get("/v1/sessions").json()["data"]
    assert listed == [{"id": "s", "object": "session", "tokens": 10}]
    second = server.text(max_tokens=5, session="s", temperature=0)
    assert first + second == server.text(prompt="hello", max_tokens=10, temperature=0)
    assert server.http.delete("/v1/sessions/s").json()["deleted"] is True
    assert server.http.delete("/v1/sessions/s").status_code == 404
    assert server.http.get("/v1/sessions").json()["data"] == []


# ------------------------------------------------------------------------------ many clients


def test_64_clients_get_the_texts_that_each_gets_alone(server: Live):
    def text(number: int) -> str:
        stream = number % 2 == 1
        fields = dict(prompt=f"client {number}", max_tokens=10 + number // 2, seed=number)
        response = server.post(**fields, stream=stream)
        assert response.status_code == 200
        whole = events(response) if stream else [response.json()]
        return "".join(choice["text"] for part in whole for choice in part["choices"])

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(text, range(64)))
    for number in range(0, 64, 7):
        assert text(number) == together[number]


def test_vanished_clients_free_their_rows_and_sessions_and_disturb_nobody(server: Live):
    fields = dict(prompt="stays", max_tokens=150, seed=1)
    alone = server.text(**fields)
    with ThreadPoolExecutor(8) as pool:
        staying = [pool.submit(server.text, **fields) for _ in range(8)]
        gone = [
            server.send_request(
                prompt="gone", max_tokens=5000, stream=number % 2 == 0, session=f"gone-{number}"
            )
            for number in range(20)
        ]
        gone += [server.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")]
        for connection in gone[:20:2]:
            assert connection.recv(10)  # a stream has begun
        for connection in gone:
            connection.close()
        assert [one.result(WAIT) for one in staying] == [alone] * 8
    server.until(running=0, waiting=0, sessions=0)
    assert server.text(**fields) == alone


def test_a_full_server_refuses_with_429():
    with live(make_worker(rows=1, queue=1)) as server:
        held = [server.send_request(prompt="a", max_tokens=5000) for _ in range(2)]
        server.until(running=1, waiting=1)
        response = server.post(prompt="b")
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        for connection in held:
            connection.close()
        server.until(running=0, waiting=0)
        assert server.post(prompt="b").status_code == 200


def test_a_server_that_stops_tells_running_streams_why():
    worker = make_worker()
    with live(worker) as server, ThreadPoolExecutor(2) as pool:
        fields = dict(prompt="a", max_tokens=5000)
        streamed, whole = (pool.submit(server.post, **fields, stream=s) for s in (True, False))
        server.until(running=2)
        worker.stop()
        last = events(streamed.result(WAIT))[-1]
        assert "stopping" in last["error"]["message"]
        assert whole.result(WAIT).status_code == 503
        assert server.post(prompt="b").status_code == 503


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", PATH, 405),
        ("PUT", PATH, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/sessions/s", 405),
        ("GET", "/", 404),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/v1/models/other", 404),
        ("DELETE", "/v1/sessions/none", 404),
        ("GET", "/%00%ff/../../etc", 404),
    ],
)
def test_wrong_paths_and_methods_are_refused_in_words(server: Live, method, path, status):
    response = server.http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) > 20


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xff",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"max_tokens": NaN}',
        b'{"max_tokens": -1}',
        b'{"max_tokens": ' + b"9" * 9000 + b"}",
        b'{"prompt": {"a": 1}}',
        b'{"prompt": [999]}',
        b'{"prompt": [[1, "a"]]}',
        b'{"unknown": 1}',
        b'{"model": "other"}',
        b'{"n": 100000}',
        b'{"prompt": "' + b"x" * 101 + b'"}',
    ],
    ids=range(15),
)
def test_malformed_requests_are_refused_in_words(server: Live, body: bytes):
    response = server.http.post(PATH, content=body)
    assert response.status_code == (404 if b"other" in body else 400)
    assert len(response.json()["error"]["message"]) > 20
    assert server.post(prompt="a").status_code == 200


def test_a_defect_is_one_line_of_output_and_a_500(server: Live, monkeypatch, capfd):
    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(server_app, "read_request", fails)
    response = server.post(prompt="a")
    assert response.status_code == 500 and "a defect" not in response.text
    assert capfd.readouterr().err == "memtrain: ZeroDivisionError: a defect\n"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Live):
    response = server.http.post(PATH, content=b" " * (2**20 + 1))
    assert response.status_code == 413 and "at most 1048576 bytes" in response.text


def test_a_body_that_does_not_arrive_is_given_up(server: Live, monkeypatch):
    monkeypatch.setattr(server_app, "BODY_SECONDS", 0.05)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    with server.send(head) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_bytes_that_are_no_http_are_refused(server: Live):
    with server.send(b"\x16\x03\x01\x00garbage\r\n\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_pages_of_other_sites_may_not_use_it(server: Live):
    own = f"http://127.0.0.1:{server.port}"
    for headers, status in (
        ({"origin": own}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:1"}, 200),
        ({"host": "[bad"}, 403),
    ):
        response = server.http.get("/v1/models", headers=headers)
        assert response.status_code == status, headers


def test_a_key_is_asked_for():
    with live(make_worker(decided_model()), api_key="sécret") as server:
        assert server.http.get("/health").status_code == 200
        for headers in (
            {},
            {b"authorization": b"Bearer wrong"},
            {b"authorization": b"\xff"},
        ):
            response = server.http.get("/v1/models", headers=headers)
            assert response.status_code == 401 and "Bearer" in response.json()["error"]["message"]
        right = {b"authorization": "Bearer sécret".encode()}
        assert server.http.get("/v1/models", headers=right).status_code == 200
