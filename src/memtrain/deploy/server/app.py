"""The routes of the server. This is the only module that imports starlette."""

import asyncio
import contextlib
import hmac
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memtrain.deploy.server.completion import Completion, event, merged
from memtrain.deploy.server.completion_request import read_request
from memtrain.deploy.server.errors import RequestError
from memtrain.deploy.server.text import Piece
from memtrain.deploy.server.worker import Worker
from memtrain.errors import describe_error, printable

BODY_SECONDS = 30.0
"""Within which a client must have sent its request."""

LOCAL_NAMES = ("127.0.0.1", "::1", "localhost")


class Server:
    """The handlers of all routes around one worker."""

    def __init__(self, worker: Worker, name: str, *, api_key: str = "", local: bool = True) -> None:
        """
        Args:
            worker: computes the completions.
            name: of the model.
            api_key: that every request but /health must have, if there is one.
            local: whether it listens on loopback alone, and so has only local names.
        """
        self.worker, self.name, self.api_key, self.local = worker, name, api_key, local
        self.created = int(time.time())
        self._ready: dict[int, asyncio.Event] = {}

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self._checked(self.models)),
            Route("/v1/models/{model}", self._checked(self.model)),
            Route("/v1/completions", self._checked(self.completions), methods=["POST"]),
            Route("/v1/sessions", self._checked(self.sessions)),
            Route("/v1/sessions/{session}", self._checked(self.end_session), methods=["DELETE"]),
        ]
        handlers: Mapping[Any, Any] = {HTTPException: _no_route}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def notify(completions: list[Completion]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._wake, completions)

        self.worker.start(notify)
        try:
            yield
        finally:
            await asyncio.to_thread(self.worker.stop)

    def _wake(self, completions: Iterable[Completion]) -> None:
        for one in completions:
            if (ready := self._ready.get(id(one))) is not None:
                ready.set()

    def _checked(self, handler: Any) -> Any:
        """A handler behind the checks of the client, with its errors as responses."""

        async def handle(request: Request) -> Response:
            try:
                self._check_client(request)
                return await handler(request)
            except RequestError as error:
                return error_response(error)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                print(f"memtrain: {printable(describe_error(error))}", file=sys.stderr)
                message = "the server failed to handle this request; its output has the reason"
                return error_response(RequestError(message, status=500))

        return handle

    def _check_client(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if self.local and _hostname(host) not in LOCAL_NAMES:
            # A web page may have given this machine's address to a name of its own.
            raise RequestError(f"host={host[:64]!r}: must be localhost or 127.0.0.1", status=403)
        origin = request.headers.get("origin")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            raise RequestError(
                f"origin={origin[:64]!r}: pages of other sites may not use this server", status=403
            )
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self.api_key and not hmac.compare_digest(given.encode("latin-1"), self.api_key.encode()):
            raise RequestError(
                "authorization: must be Bearer KEY, with the server's --api-key", status=401
            )

    # ------------------------------------------------------------------------------ routes

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self.name, **self.worker.load()})

    def _model(self) -> dict[str, Any]:
        owner = {"object": "model", "created": self.created, "owned_by": "memtrain"}
        return {"id": self.name, **owner}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise RequestError(
                f"model={name[:64]!r}: must be {self.name!r}, which is the only one",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def sessions(self, request: Request) -> Response:
        named = self.worker.sessions.tokens()
        data = [{"id": name, "object": "session", "tokens": n} for name, n in named.items()]
        return JSONResponse({"object": "list", "data": data})

    async def end_session(self, request: Request) -> Response:
        name = request.path_params["session"]
        self.worker.sessions.drop(name)
        return JSONResponse({"id": name, "object": "session", "deleted": True})

    async def completions(self, request: Request) -> Response:
        body = await _body(request, self.worker.limits.body_bytes)
        # A long prompt takes a while to encode, during which others are served.
        asked = await run_in_threadpool(read_request, body, self.worker.limits)
        self._check_model(asked.model)
        completion = await run_in_threadpool(self.worker.submit, asked)
        watch = _Watched(self, completion)
        if asked.stream:
            return _EventStream(watch, self._events(watch))
        try:
            pieces = await self._all_pieces(watch, request)
        finally:
            watch.end()
        if completion.error is not None:
            raise completion.error
        return JSONResponse(completion.plain(self.name, pieces) | {"usage": completion.usage()})

    # -------------------------------------------------------------------------- completions

    async def _all_pieces(self, watch: "_Watched", request: Request) -> list[Piece]:
        """All choices of a completion, unless its client vanishes."""
        gone = asyncio.ensure_future(_disconnected(request))
        found: list[Piece] = []
        try:
            while not watch.completion.done:
                news = asyncio.ensure_future(watch.ready.wait())
                await asyncio.wait({news, gone}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if gone.done():
                    raise ClientDisconnect
                found += watch.take()
        finally:
            gone.cancel()
        return merged([*found, *watch.take()])

    async def _events(self, watch: "_Watched") -> AsyncIterator[str]:
        """A completion as server-sent events."""
        completion, done = watch.completion, False
        while not done:
            await watch.ready.wait()
            done = completion.done  # before the pieces are taken, so that none is missed
            for piece in merged(watch.take()):
                yield event(completion.plain(self.name, [piece]))
        if completion.error is not None:
            yield event(completion.error.plain())
        elif completion.request.stream_options:
            yield event(completion.plain(self.name, []) | {"usage": completion.usage()})
        yield "data: [DONE]\n\n"


class _Watched:
    """A completion with the event that wakes its handler."""

    def __init__(self, server: Server, completion: Completion) -> None:
        self.completion, self._server = completion, server
        self.ready = asyncio.Event()
        server._ready[id(completion)] = self.ready
        if completion.pieces or completion.done:  # before there was an event to set
            self.ready.set()

    def take(self) -> list[Piece]:
        """What was added since the last call."""
        self.ready.clear()
        if self.completion.done:
            self.ready.set()
        pieces = self.completion.pieces
        return [pieces.popleft() for _ in range(len(pieces))]

    def end(self) -> None:
        """Stop watching; what is not complete is cancelled."""
        self._server._ready.pop(id(self.completion), None)
        self._server.worker.cancel(self.completion)


class _EventStream(StreamingResponse):
    """Server-sent events; the completion ends with the connection."""

    def __init__(self, watch: _Watched, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._watch.end()


async def _body(request: Request, most: int) -> bytes:
    """The body of a request, if it is small enough and arrives in time."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise RequestError(f"body: must have at most {most} bytes", status=413)
    except TimeoutError:
        raise RequestError(
            f"body: must arrive within {BODY_SECONDS:g} seconds", status=408
        ) from None
    return b"".join(parts)


def _hostname(host: str) -> str | None:
    """The name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def _disconnected(request: Request) -> None:
    """Return when the client is gone. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(error: RequestError) -> Response:
    """An error as a response; clients may retry where it says so."""
    retry = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.plain(), status_code=error.status, headers=retry)


async def _no_route(request: Request, error: Any) -> Response:
    reasons = {
        404: "no such path; there are POST /v1/completions, GET /v1/models, GET /v1/sessions, "
        "DELETE /v1/sessions/NAME and GET /health",
        405: "this path takes another method",
    }
    path = request.url.path[:64]
    message = f"{request.method} {path}: {reasons.get(error.status_code, error.detail)}"
    response = error_response(RequestError(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response
