"""Two parts of a step that do not need each other may run at the same time."""

from types import TracebackType

import torch


class Beside:
    """`with objective.beside:` marks work that need not be done before `beside.join()`.

    Here it is simply done at once.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def join(self) -> None:
        """Wait for it."""


class SideStream(Beside):
    """The work goes to a stream of its own: short kernels fill what long ones leave idle."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.context = torch.cuda.stream(self.stream)

    def __enter__(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        self.context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.context.__exit__(kind, error, trace)

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


INLINE = Beside()
