"""`memtrain serve`: its process from the start to a signal, and what it refuses."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from command_line import refused

from conftest import TINY
from doc_blocks import blocks_of
from memtrain.cli import main
from memtrain.deploy.server.serve import is_loopback, listen
from memtrain.errors import MemtrainError
from memtrain.training.run import Run

pytestmark = pytest.mark.usefixtures("default_signals")
DOCS = Path(__file__).parents[2] / "docs"
WAIT = 60.0
"""Seconds that a test waits for what must happen; longer only if it failed."""


@contextmanager
def started(*options: str, run: str = "mnist-small") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of `memtrain serve`, and its address."""
    command = [sys.executable, "-m", "memtrain", "serve", run, "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield process, line.split()[1].removesuffix("/v1/completions")
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_one_line(number: signal.Signals):
    with started("--rows", "4") as (process, address):
        fields = {"max_tokens": 20, "seed": 1}
        response = httpx.post(f"{address}/v1/completions", json=fields, timeout=WAIT)
        assert len(response.json()["choices"][0]["text"].split()) == 20
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT)
    assert process.returncode == 128 + number
    assert out == "" and err == "memtrain: stopped\n"


@pytest.fixture
def book(tmp_path: Path, monkeypatch) -> str:
    """A run of text, trained for one step."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("".join(f"{n} sheep and {n % 7} goats. " for n in range(2000)))
    steps = ["--smt.steps", "1", "--dmt.steps", "0", "--smt.batch-size", "2"]
    assert main(["train", "text", "--data", "book.txt", "--size", "tiny", *steps]) == 0
    return "runs/text"


def test_a_signal_ends_running_requests_with_a_reason(book: str):
    with started("--max-tokens", "1000000", run=book) as (process, address):
        fields = {"prompt": "7", "max_tokens": 1_000_000, "stream": True}
        url = f"{address}/v1/completions"
        with httpx.stream("POST", url, json=fields, timeout=WAIT) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "stopping" in rest[-2]
        _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 143 and err == "memtrain: stopped\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_requests_of_the_guide_are_answered(book: str):
    """The blocks of docs/guides/serve.md that need a server, but for the one that needs openai."""
    blocks = [one for one in blocks_of(DOCS / "guides/serve.md") if "server" in one.reason]
    with started(run=book) as (_, address):

        def here(code: str) -> str:
            assert "http://127.0.0.1:8000" in code
            return code.replace("http://127.0.0.1:8000", address).replace('"It was"', '"7 sheep"')

        for block in blocks:
            if block.language == "python":
                exec(compile(here(block.code), str(block), "exec"), {})
            elif "curl" in block.code:
                for line in here(block.code).splitlines():
                    command = line.replace("curl ", "curl --silent --fail-with-body ", 1)
                    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
                    assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert sum("curl" in one.code for one in blocks) == 2
    assert sum(one.language == "python" for one in blocks) == 1


def test_another_address_than_loopback_is_warned_of():
    with started("--host", "0.0.0.0") as (process, address):
        port = address.rpartition(":")[2]
        found = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=WAIT)
        assert found.json()["data"][0]["id"] == "mnist-small"
        process.terminate()
        _, err = process.communicate(timeout=WAIT)
    assert err.startswith("memtrain: host=0.0.0.0: everyone who can reach this machine may use")


def test_loopback_is_known():
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("127.9.9.9")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("10.0.0.1")


def test_a_port_in_use_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port={port}: " in refused(capsys, "serve", "mnist-small", "--port", port)


def test_an_address_that_is_none_is_refused():
    with pytest.raises(MemtrainError, match=r"host=no\.such\.host\.invalid: "):
        listen("no.such.host.invalid", 0)


@pytest.mark.parametrize("option", ["--port=70000", "--rows=0", "--sessions=-1", "--max-tokens=0"])
def test_options_out_of_bounds_are_refused(option: str, capsys):
    name = option.removeprefix("--").partition("=")[0].replace("-", "_")
    assert f"{name}=" in refused(capsys, "serve", "mnist-small", option)


def test_what_has_no_text_is_refused(tmp_path, capsys):
    one = replace(TINY.smt, steps=1)
    config = replace(
        TINY, smt=one, dmt=replace(TINY.dmt, steps=0), bptt=replace(TINY.bptt, steps=0)
    )
    Run.create(config, tmp_path / "answers").train()
    capsys.readouterr()
    assert "asks for answers" in refused(capsys, "serve", str(tmp_path / "answers"), "--port", "0")
    assert "no run there" in refused(capsys, "serve", "nowhere")


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr("memtrain.deploy.server.serve.SERVER_PACKAGES", ("no_such_package",))
    assert 'pip install "memtrain[serve]"' in refused(capsys, "serve", "mnist-small")


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in ("--host", "--api-key", "--queue", "--session-minutes"))
