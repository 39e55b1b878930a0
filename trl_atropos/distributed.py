"""Makes calls whose outcome all ranks of the trainer share, because an error that is raised on one
rank alone leaves the others waiting."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object


def together(call: Callable[[], Any]) -> Any:
    """Calls `call` on every rank and returns this rank's result. If any rank fails, all raise the
    first error."""
    result = None
    error = None
    try:
        result = call()
    except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
        error = caught
    for error_of_rank in gather_object([error]):
        if error_of_rank is not None:
            raise error_of_rank
    return result


def on_main(call: Callable[[], Any]) -> Any:
    """Calls `call` on rank 0 only, and returns its result, or raises its error, on every rank."""
    outcome: list[Any] = [None, None]  # result and error
    if PartialState().is_main_process:
        try:
            outcome[0] = call()
        except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
            outcome[1] = caught
    broadcast_object_list(outcome, from_process=0)
    result, error = outcome
    if error is not None:
        raise error
    return result


@contextmanager
def held_on_main(make: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Enters the context that `make` returns, on rank 0 only. If entering fails, every rank raises
    the error."""
    with ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(make())

        on_main(enter)
        yield
