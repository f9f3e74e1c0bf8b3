"""The checks of types and shapes that every function of the package makes while it is tested."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable) -> Callable:
    """Check what beartype checks, but the arguments once.

    jaxtyping passes two functions for each of the package's: one for its arguments, and one that
    is called with the arguments and the result after the call. The shapes of the arguments are
    remembered from the first, so the second only has to check the result.
    """
    result = function.__annotations__.get("return", Any)
    if result is not Any:
        function.__annotations__ = {"return": result}
    return beartype(function)
