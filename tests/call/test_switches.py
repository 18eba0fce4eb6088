"""Tests the switches ``checks``, ``log`` and ``ranges``: of a block, of a thread, from here on, and by the
environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from own_process import in_its_own_process

import attn_core
from attn_core import SpecError
from attn_core.call import checks, observe

SWITCHES: dict[str, Callable[[], bool]] = {
    "checks": checks.enabled,
    "log": observe.log_enabled,
    "ranges": observe.ranges_enabled,
}
"""By name: whether it is on."""
every_switch = pytest.mark.parametrize("name", SWITCHES)


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    with attn_core.checks(False), attn_core.log(False), attn_core.ranges(False):
        yield


@every_switch
def test_it_belongs_to_a_block_and_to_a_thread(name: str) -> None:
    switch, enabled = getattr(attn_core, name), SWITCHES[name]

    def in_a_new_thread() -> bool:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(enabled).result()

    with switch(True):
        seen = [in_a_new_thread()]
        with switch(False):
            seen.append(enabled())
        seen.append(enabled())
    assert [*seen, enabled()] == [False, False, True, False]
    switch(True)
    with switch(False):
        assert not enabled()
    assert enabled() and not in_a_new_thread()


@every_switch
@pytest.mark.parametrize("value", [1, 20, None])
def test_it_takes_a_bool(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"^{name}\({re.escape(repr(value))}\): expected True or False"):
        getattr(attn_core, name)(value)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_them_on(value: str, on: bool) -> None:
    code = (
        "from attn_core.call import checks, observe as o; print(checks.enabled(), o.log_enabled(), o.ranges_enabled())"
    )
    done = in_its_own_process(code, **{f"ATTN_CORE_{each.upper()}": value for each in SWITCHES})
    assert done.stdout.split() == [str(on)] * len(SWITCHES), done.stderr
