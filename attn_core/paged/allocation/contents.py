"""PageContents: the tokens in the full pages of a pool, so that the beginning of a prompt is found by its content.

Keys and values depend on all tokens before them. So a page is known by its own tokens and by the page before it: a
chain of hash tables, one for each page, from the tokens of the next page to that page. The tables compare tokens after
their hashes, so two texts with equal hashes never share a page. A chain begins with a ``salt``, which stands for
everything else that changes keys and values, such as the name of an adapter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from attn_core.errors import SpecError, shown


class Chain:
    """The content of a page and of all pages before it.

    Attributes:
        before: the chain up to the page before; None for the beginning, which has no page.
        tokens: the tokens in the page.
        depth: the number of pages.
        pages: pages with this content; several if sequences computed it at the same time.
        after: the chains that continue this one, by their tokens.
    """

    __slots__ = ("after", "before", "depth", "pages", "salt", "tokens")

    def __init__(self, salt: Hashable, before: Chain | None = None, tokens: tuple[int, ...] = ()) -> None:
        self.salt, self.before, self.tokens = salt, before, tokens
        self.depth: int = 0 if before is None else before.depth + 1
        self.pages: dict[int, None] = {}  # a set with an order, so that runs are equal
        self.after: dict[tuple[int, ...], Chain] = {}

    def cut(self, depth: int) -> Chain:
        """Returns the chain of the first ``depth`` pages, or this one if it has no more."""
        chain = self
        while chain.depth > depth and chain.before is not None:
            chain = chain.before
        return chain

    def all_tokens(self) -> tuple[int, ...]:
        """Returns the tokens of all pages, first to last."""
        chain, parts = self, list[tuple[int, ...]]()
        while chain.before is not None:
            parts.append(chain.tokens)
            chain = chain.before
        return tuple(token for part in reversed(parts) for token in part)


class PageContents:
    """The pages whose content is known, and their chains.

    A chain exists as long as a page has its content. Only ``_chain_of`` says what is in a page: a change that is
    interrupted may leave a page in ``Chain.pages``, where it is then ignored.
    """

    def __init__(self) -> None:
        self._chain_of: dict[int, Chain] = {}
        self._beginnings: dict[Hashable, Chain] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._chain_of

    def find(self, salt: Hashable, contents: Iterable[tuple[int, ...]]) -> tuple[Chain, list[int]]:
        """Returns the chain of the first pages with these contents, as far as there are pages, and those pages."""
        chain, pages = self._beginnings.get(salt) or Chain(salt), list[int]()
        for tokens in contents:
            following = chain.after.get(tokens)
            page = None if following is None else self._page_of(following)
            if following is None or page is None:
                break
            chain = following
            pages.append(page)
        return chain, pages

    def add(self, chain: Chain, tokens: tuple[int, ...], page: int) -> Chain:
        """Records that a page contains these tokens after a chain. Returns the longer chain.

        Raises:
            SpecError: if other tokens are recorded for the page.
        """
        if chain.before is None:  # a beginning is dropped when nothing follows it
            chain = self._beginnings.setdefault(chain.salt, chain)
        following = chain.after.get(tokens) or Chain(chain.salt, chain, tokens)
        known = self._chain_of.get(page)
        if known is not None and known is not following:
            raise SpecError(
                f"tokens={shown(tokens)}: expected the tokens that are recorded for page {page}, "
                f"{shown(known.tokens)}, because another sequence shares the page"
            )
        chain.after[tokens] = following
        following.pages[page] = None
        self._chain_of[page] = following
        return following

    def forget(self, page: int) -> bool:
        """Forgets what is in a page, because it gets other content. Returns whether its content was known."""
        chain = self._chain_of.pop(page, None)
        if chain is None:
            return False
        chain.pages.pop(page, None)
        if self._page_of(chain) is None:
            self._drop(chain)
        return True

    def _page_of(self, chain: Chain) -> int | None:
        return next((page for page in chain.pages if self._chain_of.get(page) is chain), None)

    def _drop(self, chain: Chain) -> None:
        """Removes a chain, and all that continue it, because nobody can find these without it."""
        before = chain.before
        if before is not None and before.after.get(chain.tokens) is chain:
            del before.after[chain.tokens]
            if before.before is None and not before.after and self._beginnings.get(before.salt) is before:
                del self._beginnings[before.salt]
        dropped = [chain]
        for each in dropped:  # grows while it is read
            dropped += each.after.values()
            for page in each.pages:
                if self._chain_of.get(page) is each:
                    del self._chain_of[page]


def pages_of_tokens(tokens: Any, page_size: int, start: int = 0, stop: int | None = None) -> list[tuple[int, ...]]:
    """Returns the contents of the full pages ``start`` to ``stop`` (all that are full if None) of a text.

    Args:
        tokens: token ids from the beginning of the text: a sequence of ints, or a numpy array of an integer dtype.

    Raises:
        SpecError: naming the first token from page ``start`` on that is no int.
    """
    full = check_is_tokens(tokens) // page_size
    stop = full if stop is None else min(stop, full)
    each = tokens[start * page_size :]
    # Plain ints, because numpy's take longer to hash and to compare.
    ids: Sequence[Any] = each.tolist() if isinstance(each, np.ndarray) else each
    for at, token in enumerate(ids, start * page_size):
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise SpecError(f"tokens[{at}]={shown(token)}: expected the id of a token, an int")
    return [tuple(map(int, ids[at : at + page_size])) for at in range(0, (stop - start) * page_size, page_size)]


def check_is_tokens(tokens: Any) -> int:
    """Returns the number of tokens. Raises SpecError unless they are a sequence, or a numpy array ``[tokens]``."""
    if isinstance(tokens, np.ndarray):
        good = tokens.ndim == 1 and tokens.dtype.kind in "iu"
    else:
        good = isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes | bytearray | memoryview)
    if not good:
        raise SpecError(
            f"tokens={shown(tokens)}: expected a list of token ids, or a numpy array of an integer dtype with one "
            "axis; a tensor has tolist()"
        )
    return len(tokens)
