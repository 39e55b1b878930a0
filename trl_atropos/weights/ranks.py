"""Calls whose outcome all ranks of the trainer share: an error raised on one rank alone leaves the others waiting."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object


def together(call: Callable[[], Any]) -> Any:
    """This rank's result of `call`, made on every rank. If it fails on any, the first error is raised on all."""
    state = PartialState()
    result, error = None, None
    try:
        result = call()
    except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
        error = caught
    errors = gather_object([error]) if state.num_processes > 1 else [error]
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise first
    return result


@contextmanager
def held_on_main(make: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """The context that `make` returns, entered on rank 0 only. If that fails, its error is raised on every rank."""
    with ExitStack() as stack:
        on_main(lambda: stack.enter_context(make()) and None)
        yield


def on_main(call: Callable[[], Any]) -> Any:
    """The result of `call`, made on rank 0, on every rank. Or its error."""
    state = PartialState()
    outcome: list[Any] = [None, None]
    if state.is_main_process:
        try:
            outcome = [call(), None]
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            outcome = [None, error]
    if state.num_processes > 1:
        broadcast_object_list(outcome, from_process=0)
    result, error = outcome
    if error is not None:
        raise error
    return result
