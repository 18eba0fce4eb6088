"""Prints answers while they are computed, a few words of each in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from rich.markup import escape

EVERY = 8
"""Tokens between two lines of an answer."""


class Stream:
    """Collects tokens of several answers and prints their text.

    Args:
        log: prints a line of rich markup.
        ended: called when an answer has ended.

    Attributes:
        texts: the text of each answer, by the number of its prompt.
    """

    def __init__(self, tokenizer: Any, log: Callable[[str], None], ended: Callable[[], None]) -> None:
        self.tokenizer, self.log, self.ended = tokenizer, log, ended
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.texts: defaultdict[int, str] = defaultdict(str)

    def on_token(self, number: int, token: int, last: bool) -> None:
        """Takes a token of an answer; prints what is new of its text now and then, and at the end."""
        self.tokens[number].append(token)
        if last or len(self.tokens[number]) % EVERY == 0:
            text: str = self.tokenizer.decode(self.tokens[number], skip_special_tokens=True)
            if not last:
                text = text.rstrip("\ufffd")  # the first bytes of a character
            # In one line, whatever the answer contains.
            new = " ".join(text[len(self.texts[number]) :].split())
            self.texts[number] = text
            self.log(f"[bold]{number:>2}[/] {escape(new)}{' [dim]end[/]' if last else ''}")
        if last:
            self.ended()
