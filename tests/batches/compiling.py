"""Compiles layers without inductor, which takes seconds for each graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


def compile_by(backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch hand each graph and its inputs to `backend`, for this test."""
    compiled = torch.compile

    def compile_quickly(call, dynamic, **_):
        return compiled(call, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(torch, "compile", compile_quickly)
