"""use_context_parallel: runs a model's attention layers on rows that are spread over ranks.

Inside the block, ``torch_frontend.module.Attention`` and the registered attention of transformers run
``context_parallel_attention``. ``torch_frontend.attention`` is not affected: its arguments are whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from attn_core.call.after_fork import free_in_children
from attn_core.call.seq_info import SeqInfo, SeqInfoLike
from attn_core.errors import SpecError, shown
from torch_frontend.dispatch.after_import import after_import

if TYPE_CHECKING:  # layers import this module, and run where torch was built without torch.distributed
    from torch.distributed.device_mesh import DeviceMesh

    from attn_core.context_parallel.layout import Layout

Tensor = torch.Tensor
T = TypeVar("T")


class ActiveMesh(NamedTuple):
    """The arguments of a ``use_context_parallel`` block."""

    mesh: DeviceMesh
    strategy: str | None
    layout: str
    length: int | None
    seq_info: Any

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Runs ``context_parallel_attention`` on shards ``[batch, shard, heads, dim]``."""
        from torch_frontend.context_parallel.attention import context_parallel_attention

        _, strategy, layout, length, info = self
        return context_parallel_attention(
            q, k, v, mesh=self.mesh, strategy=strategy, layout=layout, length=length, seq_info=info, **options
        )

    def tell(self, check: Callable[..., T], *arguments: object) -> T:
        """Returns what a function returns. If it raises, the other ranks hear of it: they would wait for this one."""
        try:
            return check(*arguments)
        except Exception as error:
            if not torch.compiler.is_compiling():  # a trace cannot send
                from torch_frontend.context_parallel.agreement import announce_error

                announce_error(error, self.mesh)
            raise

    def with_documents(self, info: SeqInfo | None) -> ActiveMesh:
        """Returns the same arguments with the documents of a call."""
        if info is not None and self.seq_info is not None:
            raise SpecError("seq_info: expected it once, got one from the call and one from use_context_parallel")
        return self if info is None else self._replace(seq_info=info)

    def row_layout(self, places: int) -> Layout:
        """Returns the layout of rows whose shards have so many places."""
        from torch_frontend.context_parallel.mesh import group_names, row_layout

        group_names(self.mesh)  # checks the mesh before its size is read
        documents = self.documents
        length = self.length if documents is None else documents[-1]
        return row_layout(self.mesh, self.layout, places * self.mesh.size() if length is None else length, documents)

    @property
    def documents(self) -> tuple[int, ...] | None:
        """The offsets of the row's documents."""
        from torch_frontend.context_parallel.shards import document_offsets

        return document_offsets(self.seq_info)

    @property
    def rank(self) -> int:
        """This rank's number in the layout."""
        from torch_frontend.context_parallel.mesh import rank_of

        return rank_of(self.mesh)

    def position_count(self, places: int) -> int:
        """Returns how many of this rank's places hold a position."""
        return min(places, self.row_layout(places).position_count(self.rank))

    def position_ids(self, shard: int, device: torch.device | str) -> Tensor:
        """Returns int32 ``[shard]``: the position (in its document) at each of this rank's places; 0 if none."""
        return _position_ids(self.row_layout(shard), self.documents, self.rank, torch.device(device))


def _leave_to_python() -> None:
    """Makes Dynamo call these methods instead of tracing them: they read meshes and groups, which it cannot trace."""
    for name in ("attend", "position_ids"):
        setattr(ActiveMesh, name, torch.compiler.disable(getattr(ActiveMesh, name)))


after_import("torch._dynamo", _leave_to_python)  # torch.compiler.disable itself would import Dynamo


# A small cache, because each entry is a tensor on the device.
@lru_cache(maxsize=16)
def _position_ids(layout: Layout, documents: tuple[int, ...] | None, rank: int, device: torch.device) -> Tensor:
    """Returns the positions on the device; cached, because a copy from the host waits for the device."""
    from attn_core.context_parallel import index_arrays

    return torch.from_numpy(index_arrays.position_ids(layout, documents)[rank]).to(device)


_active: ContextVar[ActiveMesh | None] = ContextVar("attn_core_context_parallel", default=None)
active_block = _active.get
"""``active_mesh`` for eager code, which calls it in every layer."""
_blocks: set[int] = set()
_entered, _lock = 0, free_in_children(Lock())
"""How many blocks are running, and what guards the number and ``_blocks``, their ids."""
# Weak keys, so that the entry does not keep a model alive.
_ran_under: WeakKeyDictionary[torch.nn.Module, ActiveMesh | None] = WeakKeyDictionary()


def _checked(block: ActiveMesh) -> ActiveMesh:
    """Returns a block's arguments; raises for an unknown layout or mesh here instead of in the first layer."""
    length = block.length
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise SpecError(f"length={shown(length)}: expected the positions of the whole row, an int")
    block = block._replace(seq_info=SeqInfo.coerce(block.seq_info))
    if block.documents is not None:
        from attn_core.context_parallel.request import row_lengths

        row_lengths(length, block.documents, (0, 0), 1)
    # Documents to deal may come with the layers' calls. Arrays have no truth value, so the kind is checked first.
    if block.documents is not None or not isinstance(block.layout, str) or block.layout != "documents":
        block.row_layout(1)
    return block


@contextmanager
def use_context_parallel(
    mesh: DeviceMesh,
    *,
    strategy: str | None = None,
    layout: str = "zigzag",
    length: int | None = None,
    seq_info: SeqInfoLike = None,
) -> Iterator[None]:
    """Runs the attention layers inside the block on rows whose positions are spread over the ranks of ``mesh``.

    Every rank runs the model on its shards of everything that has positions: token ids, labels, and position ids
    (``shard_sequence(torch.arange(length)[None], mesh)``), because a model would count positions from 0 on every rank.
    The loss must be this rank's share of the sum over all tokens, without places that hold no position. Sum the
    gradients of weights over the mesh. Layers that a backward recomputes (activation checkpointing) run as in their
    forward. Blocks nest, and the innermost block applies. Safe with threads and asyncio tasks.

    Under torch.compile, a block breaks the graph at every attention layer, and ``fullgraph=True`` raises an error. A
    direct call of ``context_parallel_attention`` compiles as one graph.

    Args:
        mesh, strategy, layout: as in ``context_parallel_attention``.
        length: the number of positions of the whole row; None for ranks times shard.
        seq_info: the whole row's packed documents. Shards then have a batch of 1.

    Raises:
        SpecError, ShapeError: for invalid arguments. Layers raise for calls that ranks cannot share.
    """
    global _entered
    block = ActiveMesh(mesh, strategy, layout, length, seq_info)
    block = block.tell(_checked, block)
    before = _active.get()
    try:  # around the changes as well, because Ctrl-C may raise right after one
        _active.set(block)
        with _lock:
            _blocks.add(id(block))
            _entered = len(_blocks)
        yield
    finally:
        _active.set(before)
        with _lock:
            _blocks.discard(id(block))
            _entered = len(_blocks)


def active_mesh() -> ActiveMesh | None:
    """Returns the innermost ``use_context_parallel`` around the caller, or None. A plain thread starts without one."""
    if torch.compiler.is_compiling() and not _entered:  # Dynamo cannot trace a contextvar
        return None
    return _active.get()


def active_for(module: object) -> ActiveMesh | None:
    """Returns the block that a layer runs under.

    A backward that recomputes a layer may run in another thread or after the block. It uses the block of the layer's
    forward.
    """
    block = active_mesh()
    if torch.compiler.is_compiling() or not isinstance(module, torch.nn.Module):
        return block
    # A task id means that autograd runs a backward in this thread.
    if block is None and torch._C._current_graph_task_id() != -1:
        return _ran_under.get(module)
    # None is recorded as well if the layer ran in a block before: its last forward decides, not an older one.
    if block is not None or module in _ran_under:
        _ran_under[module] = block
    return block
