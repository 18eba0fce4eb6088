"""Keeps the hosts off the network, and registers our attention with transformers for the tests of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before a test imports transformers or diffusers


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    """Registers our attention with transformers."""
    from torch_frontend import huggingface

    huggingface.register()
    huggingface.register()  # registering twice is allowed
    yield
    huggingface.unregister()
