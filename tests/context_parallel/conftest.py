"""float64 in JAX, for the tests that compare with the float64 reference; and what ranks of torch return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX with float64 for one test."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all worlds of a module's WORLDS, which run the jobs that a test of this run judges."""
    from context_torch_worker import once

    here = [test for test in request.session.items if test.path == request.path and hasattr(test, "callspec")]
    judged = {test.callspec.params.get("found") for test in here}
    chosen = [
        world._replace(jobs={name: job for name, job in world.jobs.items() if (world.name, name) in judged})
        for world in request.module.WORLDS
    ]
    name = request.module.__name__.rpartition(".")[2]
    return once([world for world in chosen if world.jobs], name, tmp_path_factory, seconds=550)[1]


@pytest.fixture
def found(request: pytest.FixtureRequest, worlds: dict[str, Any]) -> list[Any]:
    """What every rank of a world returned from a job; the parameter is (world, job). None from a rank that died."""
    from context_torch_worker import Failed

    world, job = request.param
    results = [rank.get(job) for rank in worlds[world]]
    for rank, one in enumerate(results):
        assert not isinstance(one, Failed), f"rank {rank}: {one.text}"
        may_die = world in getattr(request.module, "LOST", ())
        assert one is not None or may_die, (
            f"rank {rank} did not come to {job}: {list(worlds[world][rank].values())[-1:]}"
        )
    return results
