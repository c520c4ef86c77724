"""Runs a test on the event loops that the product meets: asyncio's own and uvloop."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def run_in_new_loop(coroutine: Coroutine[Any, Any, None], loop_name: str = "asyncio") -> None:
    """Fails on what the loop had to report (an exception that nobody took) and on tasks left behind.

    The thread's current loop stays as it is, which `asyncio.run` does not grant and pytest-asyncio relies on.
    """
    reports: list[dict[str, Any]] = []
    loop = _FACTORIES[loop_name]()
    try:
        loop.set_exception_handler(lambda _, context: reports.append(context))
        loop.run_until_complete(coroutine)
        assert not asyncio.all_tasks(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    assert not reports


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a test of a coroutine function, once for each loop. What it takes as arguments are fixtures."""

    def run(loop_name: str, **fixtures: Any) -> None:
        run_in_new_loop(test(**fixtures), loop_name)

    of_loop = inspect.Parameter("loop_name", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(run)["__signature__"] = inspect.Signature([of_loop, *inspect.signature(test).parameters.values()])
    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    parametrized: Callable[..., None] = pytest.mark.parametrize("loop_name", sorted(_FACTORIES))(run)
    return parametrized
