"""Listen, serve until a signal, and end in order."""

import logging
import socket
import sys
import threading
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any

from memtrain.deploy.server.completion_request import Limits
from memtrain.deploy.server.sessions import Sessions
from memtrain.deploy.server.worker import Worker
from memtrain.errors import MemtrainError, printable
from memtrain.generation.generate import rnn_and_codec, sampling_mode
from memtrain.generation.pretrained import Pretrained

SERVER_PACKAGES = ("starlette", "uvicorn")
CONNECTIONS = 1024
"""Beyond which new ones are refused."""
BACKLOG = 256
GRACE = 5.0
"""Seconds in which running completions may end after a signal."""


def serve(model: Pretrained, name: str, options: Any) -> None:
    """Serve a model until SIGINT or SIGTERM.

    Args:
        model: in evaluation mode.
        name: under which it is served.
        options: those of `memtrain serve`.

    Raises:
        MemtrainError: it cannot be served, or the address cannot be used.
    """
    for package in SERVER_PACKAGES:
        if find_spec(package) is None:
            raise MemtrainError(f'serve: needs {package}: pip install "memtrain[serve]"')
    rnn, codec = rnn_and_codec(model)
    limits = Limits(
        prompt_tokens=options.max_prompt, max_tokens=options.max_tokens, choices=options.rows
    )
    with listen(options.host, options.port) as listener, sampling_mode(rnn):
        host, port = listener.getsockname()[:2]
        worker = Worker(
            rnn,
            codec,
            rows=options.rows,
            queue=options.queue,
            limits=limits,
            sessions=Sessions(options.sessions, 60 * options.session_minutes),
        )
        local = is_loopback(host)
        if not local:
            who = "who has its --api-key" if options.api_key else "without a key (--api-key)"
            warning = f"everyone who can reach this machine may use the server, {who}"
            line = f"memtrain: host={options.host}: {warning}; it has no encryption"
            print(printable(line), file=sys.stderr)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        line = f"{name}: http://{address}/v1/completions   Ctrl-C ends it"
        print(printable(line), flush=True)
        _run(worker, name, listener, api_key=options.api_key, local=local)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one.

    Raises:
        MemtrainError: the address is in use, or is none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise MemtrainError(f"host={host}: {_reason(error)}; 127.0.0.1 is this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise MemtrainError(
            f"port={port}: {_reason(error)}; choose another with --port, 0 takes a free one"
        ) from None
    return listener


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return ip_address(host.partition("%")[0]).is_loopback


def _run(worker: Worker, name: str, listener: socket.socket, *, api_key: str, local: bool) -> None:
    import uvicorn

    from memtrain.deploy.server.app import Server

    class Uvicorn(uvicorn.Server):
        """Ends completions that take too long after a signal."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            if not self.should_exit:
                timer = threading.Timer(GRACE, worker.stop)
                timer.daemon = True
                timer.start()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        Server(worker, name, api_key=api_key, local=local).app(),
        log_level=logging.ERROR,
        access_log=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=round(2 * GRACE),
        server_header=False,
    )
    Uvicorn(config).run(sockets=[listener])
