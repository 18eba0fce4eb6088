"""Errors of the command line: one line of its own on stderr for each line of a message, none wider than a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable

import typer

from attn_core.call.arguments import HINT
from attn_core.selection.columns import wrapped

_WORDS = {
    HINT: "change --heads or --kv-heads",
    "cast q, k and v to one of them": "name one by --dtype",
    "reshape to [1, batch * seq, heads, head_dim]": "leave --batch out",
    "seq_info.cu_seqlens_q:": "--cu-seqlens:",
    "lengths_q:": "--lengths:",
    "lengths_k:": "--kv-lengths:",
    "None is unbounded": "none is unbounded",
    "None switches it off": "leave it out to switch it off",
    "None gives": "leave it out for",
}
"""What the library says about its arguments -> the same about options of a command."""


def complain(message: object) -> None:
    """Prints an error to stderr, in lines of at most 80 columns."""
    for line in f"attn: {message}".splitlines():
        typer.echo(wrapped(line), err=True)


def in_options(message: object, names: Iterable[str]) -> str:
    """Returns a message of the library in the words of a command: ``causal=True`` is ``--causal`` there.

    Args:
        names: of the command's parameters.
    """
    text = str(message)
    for words, ours in _WORDS.items():
        text = text.replace(words, ours)

    def option(found: re.Match[str]) -> str:
        name, value = "--" + found[1].replace("_", "-"), found[2]
        if value == "True":
            return name
        return f"{name}={value.strip('()').replace(' ', '').replace('None', 'none')}"

    return re.sub(rf"(?<![-\w.])({'|'.join(names)})=(True\b|\([^()]*\)|)", option, text)
