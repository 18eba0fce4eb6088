"""Sends the tests with the fixture ``interpreter`` to the process that the fixture starts."""

from __future__ import annotations

import pytest
from triton_interpreter import send


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return send(pyfuncitem)
