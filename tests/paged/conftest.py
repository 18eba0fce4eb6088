"""Sends the tests with the fixture ``interpreter`` to the process that the fixture starts."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    process = pyfuncitem.funcargs.get("interpreter")
    if process is None:
        return None
    process.run(pyfuncitem.nodeid)
    return True
