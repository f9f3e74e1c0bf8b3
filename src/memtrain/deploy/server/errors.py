"""Errors of a request, in the form that clients of OpenAI's API expect."""

from typing import Any

from memtrain.errors import printable

KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class RequestError(Exception):
    """A request that is refused; the message names the field, its value and the rule."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(printable(message))
        self.status, self.param, self.code = status, param, code

    def plain(self) -> dict[str, Any]:
        """The body of the response."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }
