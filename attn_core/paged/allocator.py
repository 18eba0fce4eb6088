"""PageAllocator: assigns the pages of a pool to sequences. Pure Python; it never touches the pool itself.

Sequences share a page as long as none of them writes to it: a fork shares all pages of its parent. A sequence that is
about to write to a shared page gets a copy of it (copy-on-write). ``extend`` returns the pages to copy, and the caller,
who has the pool, copies them before it writes the new tokens.

A sequence that ends leaves its recorded pages in the pool. They count as free, and are taken last: those that nobody
used for the longest time first. Until then, a prompt that begins with the same tokens finds them, with their keys and
values.

What is known of a sequence is one record, and every change is planned first and then made by one write of records. The
books of free pages follow from the records, so ``_recount`` repairs them after Ctrl-C at any moment.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.kinds import MOST, check_hashable, check_kind, check_names, check_size, is_host_int
from attn_core.errors import SpecError, shown

UNUSED = -1
"""The entry of a block table after a sequence's last page."""


@dataclass(eq=False, repr=False, slots=True)
class Chain:
    """The content of a page and of all pages before it.

    Attributes:
        before: the chain up to the page before; None for the beginning, which has no page.
        tokens: the tokens in the page.
        depth: the number of pages.
        pages: pages with this content; several if sequences computed it at the same time.
        after: the chains that continue this one, by their tokens.
    """

    salt: Hashable
    before: Chain | None = None
    tokens: tuple[int, ...] = ()
    depth: int = 0
    pages: dict[int, None] = field(default_factory=dict)  # a set with an order, so that runs are equal
    after: dict[tuple[int, ...], Chain] = field(default_factory=dict)

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
    """The pages whose content is known, and their chains, so that the beginning of a prompt is found by its content.

    Keys and values depend on all tokens before them. So a page is known by its own tokens and by the page before it: a
    chain of hash tables, one for each page, from the tokens of the next page to that page. The tables compare tokens
    after their hashes, so two texts with equal hashes never share a page. A chain begins with a ``salt``, which stands
    for everything else that changes keys and values, such as the name of an adapter.

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
        following = chain.after.get(tokens) or Chain(chain.salt, chain, tokens, chain.depth + 1)
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
        # Several pages may have equal content. One that was dropped and filled again belongs to another chain.
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


class PoolFullError(MemoryError):
    """The pool has too few free pages for the request. The allocator is unchanged."""


class Copies(NamedTuple):
    """Pages to copy, ``source[i]`` to ``target[i]``, before new tokens are written to the extended sequence."""

    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()


class Match(NamedTuple):
    """Pages with the beginning of a prompt.

    Attributes:
        tokens: the number of tokens in them, a multiple of the page size.
        pages: the pages, in the order of the tokens.
        cached: how many of them no sequence has. A sequence that starts on them takes that many of the free pages.
    """

    tokens: int
    pages: tuple[int, ...]
    cached: int


class Held(NamedTuple):
    """What is known of a sequence.

    Attributes:
        pages: in the order of its tokens; none if it is swapped out.
        length: its tokens.
        chain: what is recorded of them.
        started, changed: the times of its start and of its last change, counted in changes of the pool.
        what: the last change, as a participle.
    """

    pages: tuple[int, ...]
    length: int
    chain: Chain
    started: int
    changed: int
    what: str = "started"


class Growth(NamedTuple):
    """The plan of a step, which ``PageAllocator.commit`` carries out.

    Attributes:
        needed: how many free pages it takes. If there are fewer, the plan is incomplete and must not be carried out.
        records: of the extended sequences, by name.
        taken: these pages, in the order in which the allocator gives them.
        copies: the pages to copy before; the targets are some of ``taken``.
        overwritten: pages whose content after the sequence's end is lost, because tokens are written there.
    """

    needed: int
    records: dict[Hashable, Held]
    taken: list[int]
    copies: Copies
    overwritten: list[int]


class PoolReport(NamedTuple):
    """The occupancy of a pool: num_pages, free and shared count pages, tokens and waste count tokens.

    Attributes:
        num_pages: pages of the pool; free: pages of no sequence; shared: pages of more than one sequence.
        tokens: tokens of the sequences; a token in a shared page counts once.
        waste: unused slots in the pages of sequences: less than a page for each sequence.
    """

    num_pages: int
    free: int
    shared: int
    tokens: int
    waste: int


class PrefixReport(NamedTuple):
    """How many pages were found by their content.

    Attributes:
        cached: pages of no sequence that ``match`` still finds.
        hits: full pages of prompts that ``allocate_matching`` found; misses: those that it did not find.
        evictions: cached pages that were taken for other content.
        evicted: the latest of these pages, oldest first, at most as many as the pool has pages.
    """

    cached: int
    hits: int
    misses: int
    evictions: int
    evicted: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """The hits among all full pages of prompts, 0 to 1; 0 if there were none."""
        return self.hits / max(self.hits + self.misses, 1)


class PageAllocator:
    """Assigns the pages of a pool to sequences.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.

    Attributes:
        now: the number of changes so far.

    Any hashable value can name a sequence. Not thread-safe. A change that Ctrl-C interrupts is complete or undone.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            check_size(name, value, 1)  # tables are int32
        self.num_pages, self.page_size = int(num_pages), int(page_size)
        self.now = 0
        self._held: dict[Hashable, Held] = {}
        self._swapped: dict[Hashable, Held] = {}  # sequences whose pages are elsewhere
        # In the order in which they are taken: the page freed last first, and those with known content last.
        self._free = OrderedDict[int, None].fromkeys(range(self.num_pages))
        self._holders = [0] * self.num_pages  # by page, the number of sequences that have it
        self._contents = PageContents()
        self._hits = self._misses = self._evictions = 0
        self._evicted: deque[int] = deque(maxlen=self.num_pages)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self._held)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """The names of the sequences, oldest first."""
        return tuple(self._held)

    @property
    def free_pages(self) -> int:
        """The number of pages of no sequence. Those that are still found by their content count, too."""
        return len(self._free)

    @property
    def swapped(self) -> tuple[Hashable, ...]:
        """The names of the sequences that are swapped out; ``sequences`` does not contain them."""
        return tuple(self._swapped)

    def length(self, name: Hashable) -> int:
        """Returns the number of tokens of a sequence."""
        return self._known(name).length

    def pages(self, name: Hashable) -> tuple[int, ...]:
        """Returns the pages of a sequence, in the order of its tokens."""
        return self._known(name).pages

    def changed_since(self, time: int, names: Iterable[Hashable]) -> tuple[Hashable, str] | None:
        """Returns the first of these sequences that changed after a time, and how; None if none did.

        A sequence that started later under the name of one that was freed is a different one.
        """
        if time == self.now:  # the usual case in a model: nothing changed between the layers of a step
            return None
        for name in names:
            held = self._held.get(name) or self._swapped.get(name)
            if held is None or held.started > time:
                return name, "freed"
            if held.changed > time:
                return name, held.what
        return None

    def report(self) -> PoolReport:
        """Returns how full the pool is."""
        free, tokens = self._holders.count(0), sum(self._filled())
        shared = sum(count > 1 for count in self._holders)
        return PoolReport(self.num_pages, free, shared, tokens, (self.num_pages - free) * self.page_size - tokens)

    def prefix_report(self) -> PrefixReport:
        """Returns how many pages were found by their content, and which ones were evicted."""
        cached = sum(page in self._contents for page in self._free)
        return PrefixReport(cached, self._hits, self._misses, self._evictions, tuple(self._evicted))

    def __str__(self) -> str:
        """Draws the pool: a line for each page, # for each token, and the sequences that read the page.

        A cached page belongs to no sequence and is found by its content.
        """
        report, size, filled = self.report(), self.page_size, self._filled()
        readers: list[list[str]] = [[] for _ in filled]
        for name, held in self._held.items():
            for page in held.pages:
                readers[page].append(str(name))
        used = report.num_pages - report.free
        lines = [f"{report.num_pages} pages of {size} tokens: {used} used, {report.shared} of them shared"]
        for page, (tokens, names) in enumerate(zip(filled, readers, strict=True)):
            is_cached = page in self._free and page in self._contents
            state = ", ".join(names) or ("cached" if is_cached else "free")
            tokens = size if is_cached else tokens
            lines.append(f"{page:>5} |{'#' * tokens}{'.' * (size - tokens)}| {state}")
        return "\n".join(lines)

    def _filled(self) -> list[int]:
        """Returns the tokens in each page. Sequences that share a page may end at different tokens in it."""
        filled, size = [0] * self.num_pages, self.page_size
        for held in self._held.values():
            for at, page in enumerate(held.pages):
                filled[page] = max(filled[page], min(size, held.length - at * size))
        return filled

    def allocate(self, name: Hashable, tokens: int = 0) -> None:
        """Starts a sequence of ``tokens`` tokens on pages that no other sequence has.

        Raises:
            SpecError: if a sequence of that name exists. PoolFullError: if the pool has too few free pages.
        """
        self._check_new(name)
        count = self._count(tokens)
        taken = self._room_for(self._pages_for(count), name)
        self._commit({name: self._started(taken, count, Chain(None))}, taken=taken)

    def fork(self, parent: Hashable, name: Hashable, tokens: int | None = None) -> None:
        """Starts a sequence that shares the parent's first ``tokens`` (all if None), without a copy.

        Raises:
            SpecError: for a name that a sequence already has, or more tokens than the parent has.
        """
        self._check_new(name)
        held = self._known(parent)
        count = held.length if tokens is None else self._count(tokens)
        if count > held.length:
            raise SpecError(f"tokens={tokens}: expected at most the {held.length} that {parent!r} has")
        shared = held.pages[: self._pages_for(count)]
        child = self._started(shared, count, held.chain.cut(count // self.page_size))
        self._commit({parent: held._replace(changed=self.now + 1, what="forked"), name: child}, shared=shared)

    def extend(self, name: Hashable, tokens: int = 1) -> Copies:
        """Makes room for ``tokens`` more tokens at the end of a sequence.

        Returns:
            The pages to copy before the tokens are written: the last page, if it has room and other sequences share it.

        Raises:
            PoolFullError: if the pool has too few free pages. The sequence is unchanged then.
        """
        self._known(name)
        growth = self.grow({name: tokens})
        self._room_for(growth.needed, name)
        self.commit(growth)
        return growth.copies

    def needed(self, tokens: Mapping[Hashable, int]) -> int:
        """Returns how many free pages it would take to extend each sequence by its number of tokens."""
        return self.grow(tokens).needed

    def grow(self, tokens: Mapping[Hashable, int]) -> Growth:
        """Plans to extend each sequence by its number of tokens; changes nothing."""
        check_kind("tokens", tokens, Mapping, "a dict of tokens by sequence")
        size, free, changed = self.page_size, iter(self._free), self.now + 1
        needed, records, taken, overwritten = 0, dict[Hashable, Held](), list[int](), list[int]()
        copied, source, target = dict[int, int](), list[int](), list[int]()
        for name, tokens_of in tokens.items():
            held = self._held.get(name) or self._known(name)  # which raises the error
            count, pages, length, copies = self._count(tokens_of), held.pages, held.length, False
            if count and length % size:  # the last page has room, so the new tokens begin in it
                last = pages[-1]
                # When all other sequences have copied a shared page, its last one writes to the page itself.
                copies = self._holders[last] - copied.get(last, 0) > 1
                copied[last] = copied.get(last, 0) + copies
                (source if copies else overwritten).append(last)
            more = copies - (-(length + count) // size) - len(pages)  # the pages of all tokens, rounded up
            if more:
                # With too few free pages these are fewer than ``more``; the caller compares ``needed``.
                new = list(itertools.islice(free, more))
                target += new[:copies]
                pages = (*pages[: len(pages) - copies], *new)
                taken += new
                needed += more
            records[name] = Held(pages, length + count, held.chain, held.started, changed, "stepped again")
        return Growth(needed, records, taken, Copies(tuple(source), tuple(target)), overwritten)

    def commit(self, growth: Growth) -> None:
        """Carries out a plan, before which nothing else has changed."""
        for page in growth.overwritten:
            self._contents.forget(page)  # of a longer sequence that is gone
        self._commit(growth.records, taken=growth.taken, left=growth.copies.source)

    def evict(self, pages: Iterable[int]) -> None:
        """Forgets the content of free pages, because they get other content."""
        for page in pages:
            if self._contents.forget(page):
                self._evictions += 1
                self._evicted.append(page)

    def free(self, name: Hashable) -> tuple[int, ...]:
        """Ends a sequence and returns the pages that are free now, because no other sequence shares them.

        Pages that are recorded keep their content until they are taken. A sequence may be swapped out.
        """
        check_hashable("name", name)
        if name in self._swapped:
            self.now += 1
            del self._swapped[name]
            return ()
        self._known(name)
        return self._end(name)

    def swap_out(self, name: Hashable) -> tuple[int, ...]:
        """Frees the pages of a sequence that continues later. The caller has copied their content elsewhere.

        Returns:
            The pages, in the order of the tokens. They are free now.

        Raises:
            SpecError: if the sequence shares a page: it would not become free.
        """
        self.check_unshared(name)
        held = self._held[name]
        chain, changed = Chain(held.chain.salt), self.now + 1
        self._end(name, held._replace(pages=(), chain=chain, changed=changed, what="swapped out"))
        return held.pages

    def check_unshared(self, name: Hashable) -> None:
        """Raises SpecError if a sequence shares pages with others, naming one of them."""
        pages = self._known(name).pages
        shared = {page for page in pages if self._holders[page] > 1}
        if shared:
            other = next(each for each, held in self._held.items() if each != name and shared.intersection(held.pages))
            raise SpecError(
                f"name={shown(name)}: expected a sequence that shares no page, but {len(shared)} of its "
                f"{len(pages)} pages are shared, with {shown(other)} for one; free the others first"
            )

    def swap_in(self, name: Hashable) -> tuple[int, ...]:
        """Takes pages for a sequence that is swapped out, and returns them in the order of its tokens.

        The caller copies their content back, and then calls ``record`` if ``recorded`` had tokens before.

        Raises:
            SpecError: if no such sequence is swapped out. PoolFullError: if the pool has too few free pages.
        """
        self.check_swapped(name)
        held = self._swapped[name]
        taken = self._room_for(self._pages_for(held.length), name)
        pages = tuple(taken)
        self._commit({name: held._replace(pages=pages, changed=self.now + 1, what="swapped in")}, taken=taken)
        return pages

    def check_swapped(self, name: Hashable) -> None:
        """Raises SpecError unless a sequence of this name is swapped out."""
        check_hashable("name", name)
        if name not in self._swapped:
            raise SpecError(f"name={shown(name)}: expected the name of a sequence that is swapped out")

    def match(self, tokens: Sequence[int], *, salt: Hashable = None) -> Match:
        """Returns the pages that contain the beginning of these tokens. Changes nothing.

        Args:
            tokens: token ids, from the beginning of the text.
            salt: stands for everything else that changes keys and values, such as the name of an adapter, or an image.
                Only pages with an equal salt are found.

        Raises:
            SpecError: for a token that is no int, or a salt that is not hashable.
        """
        _, pages, _ = self._find(tokens, salt)
        cached = sum(not self._holders[page] for page in pages)
        return Match(len(pages) * self.page_size, tuple(pages), cached)

    def allocate_matching(self, name: Hashable, tokens: Sequence[int], *, salt: Hashable = None) -> int:
        """Starts a sequence on the pages that ``match`` finds, which it then shares, and returns their tokens.

        The caller computes the other tokens of the prompt, at least the last one, because its logits choose the next
        token. The sequence needs no free page for its beginning.

        Args:
            tokens, salt: as in ``match``. What ``record`` says of the sequence later has the same salt.

        Raises:
            SpecError: as ``match`` does, and if a sequence of that name exists.
        """
        self._check_new(name)
        chain, pages, most = self._find(tokens, salt, left=1)
        found = len(pages) * self.page_size
        self._commit({name: self._started(pages, found, chain)}, shared=pages)
        # After the change, so that one that was interrupted counts nothing.
        self._hits += len(pages)
        self._misses += most - len(pages)
        return found

    def record(self, name: Hashable, tokens: Sequence[int]) -> None:
        """Says which tokens a sequence contains, so that ``match`` finds its full pages.

        Call it after the keys and values of these tokens are written in every layer, and before ``free``.

        Args:
            tokens: token ids from the beginning of the sequence, as far as they are written. Pages that are recorded
                already are not read again, so a long list costs no more than its new part.

        Raises:
            SpecError: for more tokens than the sequence has, for a token that is no int, or for other tokens than those
                that are recorded for a shared page.
        """
        held = self._known(name)
        if (count := check_is_tokens(tokens)) > held.length:
            raise SpecError(f"tokens: expected at most the {held.length} that {shown(name)} has, got {count}")
        chain = held.chain
        contents = pages_of_tokens(tokens, self.page_size, chain.depth)
        for page, content in zip(held.pages[chain.depth :], contents, strict=False):
            chain = self._contents.add(chain, content, page)
        self._held[name] = held._replace(chain=chain)  # last: a change that was interrupted can run again

    def recorded(self, name: Hashable) -> tuple[int, ...]:
        """Returns the tokens that ``record`` keeps of a sequence: those of its first full pages."""
        return self._known(name).chain.all_tokens()

    def _find(self, tokens: Sequence[int] | np.ndarray, salt: Hashable, left: int = 0) -> tuple[Chain, list[int], int]:
        """Returns the chain and the pages that begin with the first tokens, all but ``left``, and how many could."""
        check_hashable("salt", salt)
        most = max(check_is_tokens(tokens) - left, 0) // self.page_size
        contents = pages_of_tokens(tokens, self.page_size)[:most]
        return *self._contents.find(salt, contents), len(contents)

    def block_table(self, names: Sequence[Hashable], width: int | None = None) -> np.ndarray:
        """Returns int32 ``[len(names), width]``: each sequence's pages in order, then ``UNUSED``.

        Args:
            width: columns; the pages of the longest sequence if None. A fixed width keeps shapes equal in every step.

        Raises:
            SpecError: if a sequence has more pages than columns.
        """
        return self.table_of([self._known(name) for name in check_names("names", names)], width)

    def table_of(self, records: Sequence[Held], width: int | None) -> np.ndarray:
        """Returns ``block_table`` of sequences with these records. Raises SpecError as it does."""
        longest = self._pages_for(max([held.length for held in records], default=0))
        most = MOST // self.page_size
        if width is not None and not (is_host_int(width) and width >= longest):
            kind = "" if is_host_int(width) else ", as an int"
            raise SpecError(
                f"width={shown(width)}: expected at least the {longest} pages of the longest sequence{kind}"
            )
        if width is not None and width > most:
            raise SpecError(f"width={width}: expected at most {most} columns, because kernels count tokens in int32")
        table = np.full((len(records), longest if width is None else width), UNUSED, np.int32)
        for row, held in zip(table, records, strict=True):
            row[: len(held.pages)] = held.pages
        return table

    def seq_lens(self, names: Sequence[Hashable]) -> np.ndarray:
        """Returns int32 ``[len(names)]``: the tokens of each sequence."""
        return np.array([self.length(name) for name in check_names("names", names)], np.int32)

    def _started(self, pages: Iterable[int], length: int, chain: Chain) -> Held:
        """Returns the record of a sequence that starts with the next change."""
        return Held(tuple(pages), length, chain, self.now + 1, self.now + 1)

    def _commit(
        self,
        records: Mapping[Hashable, Held],
        taken: Iterable[int] = (),
        shared: Iterable[int] = (),
        left: Iterable[int] = (),
    ) -> None:
        """Gives sequences their new records, and books the pages.

        Args:
            taken: the first of the free pages. shared: pages that have one more sequence now.
            left: pages of several sequences that have one fewer now.
        """
        try:
            self.now += 1  # first, so that ``changed_since`` does not take its shortcut
            self._held.update(records)
            for name in records:
                self._swapped.pop(name, None)
            for page in left:
                self._holders[page] -= 1
            for page in shared:
                self._free.pop(page, None)
                self._holders[page] += 1
            for page in taken:
                self._take(page)
        except BaseException:
            self._recount()
            raise

    def _end(self, name: Hashable, elsewhere: Held | None = None) -> tuple[int, ...]:
        """Ends a sequence, or swaps it out under another record. Returns the pages that are free now."""
        try:
            self.now += 1
            if elsewhere is not None:
                self._swapped[name] = elsewhere
            pages = self._held.pop(name).pages
            # Backwards, so that the next sequence gets them in order.
            return tuple([page for page in reversed(pages) if self._release(page)])
        except BaseException:
            self._recount()
            raise

    def _recount(self) -> None:
        """Counts all pages anew from the records, after a change that was interrupted anywhere."""
        for name in self._held.keys() & self._swapped.keys():
            del self._swapped[name]  # it is still in the pool, or in it again
        holders = [0] * self.num_pages
        for page in [page for held in self._held.values() for page in held.pages]:
            holders[page] += 1
        lost = {page for page, count in enumerate(holders) if not count}.difference(self._free)
        recorded = {page for page in lost if page in self._contents}
        kept = [page for page in self._free if not holders[page]]
        self._free = OrderedDict.fromkeys([*sorted(lost - recorded), *kept, *sorted(recorded)])
        self._holders = holders

    def _take(self, page: int) -> None:
        """Takes the next free page."""
        self.evict([page])  # first: from now on it may get other content
        del self._free[page]
        self._holders[page] = 1

    def _release(self, page: int) -> bool:
        """Returns whether a page has no sequence any more."""
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        # Taken next if nobody can find its content, last if somebody can: as a cache drops the oldest entry first.
        self._free[page] = None
        self._free.move_to_end(page, last=page in self._contents)
        return True

    def _room_for(self, pages: int, name: Hashable) -> list[int]:
        """Returns the pages that are taken next. Raises PoolFullError if so many are not free."""
        if pages > self.free_pages:
            raise PoolFullError(
                f"{name!r} needs {pages} more pages of {self.page_size} tokens, and {self.free_pages} of the pool's "
                f"{self.num_pages} are free; free a sequence, or make the pool larger"
            )
        return list(itertools.islice(self._free, pages))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _check_new(self, name: Hashable) -> None:
        check_hashable("name", name)
        if name in self._held or name in self._swapped:
            raise SpecError(f"name={shown(name)}: expected a new name, but a sequence has this one; free it first")

    def _known(self, name: Hashable) -> Held:
        """Returns the record of a sequence in the pool. Raises SpecError if there is none."""
        check_hashable("name", name)
        if name in self._swapped:
            raise SpecError(
                f"name={shown(name)}: expected a sequence in the pool, but this one is swapped out; swap it in first"
            )
        if name not in self._held:
            raise SpecError(f"name={shown(name)}: expected the name of a sequence of this allocator; add it first")
        return self._held[name]

    def _count(self, tokens: int) -> int:
        check_size("tokens", tokens, 0)
        return int(tokens)


def pages_of_tokens(tokens: Sequence[int] | np.ndarray, page_size: int, start: int = 0) -> list[tuple[int, ...]]:
    """Returns the contents of the full pages of a text, from page ``start`` on.

    Args:
        tokens: token ids from the beginning of the text: a sequence of ints, or a numpy array of an integer dtype.

    Raises:
        SpecError: naming the first token from page ``start`` on that is no int.
    """
    stop = check_is_tokens(tokens) // page_size
    each = tokens[start * page_size :]
    # Plain ints, because numpy's take longer to hash and to compare.
    ids: Sequence[Any] = each.tolist() if isinstance(each, np.ndarray) else each
    for at, token in enumerate(ids, start * page_size):
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise SpecError(f"tokens[{at}]={shown(token)}: expected the id of a token, an int")
    return [tuple(map(int, ids[at : at + page_size])) for at in range(0, (stop - start) * page_size, page_size)]


def check_is_tokens(tokens: Sequence[int] | np.ndarray) -> int:
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
