"""Plans JAX's calls on a CPU as if no call were faster on XLA's operations than on torch's kernels."""

from collections.abc import Iterator

import jax
import pytest

from attn_core.selection import choice, preference
from jax_frontend.dispatch import plan


def _forget() -> None:
    plan.plan.cache_clear()
    plan.backend_of.cache_clear()
    choice._explained.cache_clear()
    jax.clear_caches()


@pytest.fixture
def torch_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes torch's kernels the first choice of every call, for tests of automatic choice that are about them."""
    with monkeypatch.context() as patch:
        patch.setattr(preference, "xla_is_faster", lambda spec: False)
        _forget()
        yield
    _forget()
