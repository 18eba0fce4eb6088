"""torch.compile for FlexAttention: one program per signature, so that no number of different calls falls back to eager.

torch's compiler caches compiled variants by a function's code object, gives up after a few variants of one code, and
then runs uncompiled; for FlexAttention that means the whole score matrix. So every signature gets a code object of its
own. A signature covers everything that would cause a variant; lengths and batch are symbols. One variant too many
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from threading import RLock
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.flex import functions
from attn_core.backends.flex.blocks import BLOCK, Table
from attn_core.backends.shared.autograd import differentiable_once
from attn_core.call.after_fork import free_in_children
from attn_core.call.observe import timed
from attn_core.expressions.on_torch import TorchFunction

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.fx import GraphModule
    from torch.nn.attention.flex_attention import BlockMask

TRACING = (("torch.fx.experimental._config", "use_duck_shape", False),)
"""torch's settings while it traces a program: two lengths that happen to be equal get two symbols."""
COMPILING = (
    # The gradient compiles with its forward, not when autograd's thread first runs it.
    ("torch._functorch.config", "force_non_lazy_backward_lowering", True),
    # A backward must not overwrite what its forward saved; see differentiable_once.
    ("torch._functorch.config", "donated_buffer", False),
)
"""torch's settings while it compiles a program, also when it recompiles. In torch 2.11 other threads see them, too."""

_lock = free_in_children(RLock())
"""One call at a time: tracing patches torch for the whole process, and XLA's threads call as well as ours."""


@contextmanager
def torch_settings(settings: tuple[tuple[str, str, object], ...]) -> Iterator[None]:
    """Sets torch's settings in its block, as far as this version of torch has them."""
    with ExitStack() as stack:
        for module, name, value in settings:
            config: Any = import_module(module)
            if hasattr(config, name):
                stack.enter_context(config.patch(**{name: value}))
        yield


class Signature(NamedTuple):
    """Everything that a FlexAttention program is compiled for, except the layouts of its tensors.

    Attributes:
        heads: of q, and of k and v. widths: the kernel's head dims, of q and k, and of v.
        scale, group: as text, because torch's compiler makes symbols of numbers, which the kernel cannot take.
        score, mask: the parts of the score and mask functions. options: kernel_options.
        mask_mod, score_mod: the call's functions.
        length_classes: see ``operands.length_classes``.
    """

    dtype: str
    heads: tuple[int, int]
    widths: tuple[int, int]
    enable_gqa: bool
    scale: str
    group: str
    score: tuple[str, ...]
    mask: tuple[str, ...]
    options: tuple[tuple[str, int | str], ...]
    mask_mod: TorchFunction | None
    score_mod: TorchFunction | None
    length_classes: tuple[bool, ...]


class CompiledFunction:
    """A function compiled for one signature. It compiles on its first run, separately with and without gradients."""

    def __init__(self, function: Callable[..., Any], signature: Hashable) -> None:
        def program(*arguments: object) -> Any:
            return function(signature, *arguments)

        # torch's compiler counts variants per code object, so each signature gets its own copy of the code.
        digest = sha256(repr(signature).encode()).hexdigest()[:8]
        code = program.__code__.replace(co_name=f"{function.__name__}_{digest}")
        own = FunctionType(code, program.__globals__, code.co_name, None, program.__closure__)
        self.compiler = Compiler(code.co_name)
        self.run = compile_symbolic(own, self.compiler)
        self.name = function.__name__.strip("_")
        self.ready: set[bool] = set()

    def __call__(self, *arguments: object) -> Any:
        import torch

        gradients = torch.is_grad_enabled()
        with _lock:
            if gradients in self.ready:
                results = self.run(*arguments)
            else:  # the first run compiles
                refuse_capture(f"the {self.name} program of this call is not compiled yet")
                with torch_settings(TRACING):
                    results = self.run(*arguments)
                self.ready.add(gradients)
            if self.compiler.fresh:  # also after a recompilation, e.g. because a process-wide setting changed
                self.compiler.fresh = False
                differentiable_once(results[0])
            return results


@lru_cache(maxsize=512)
def program(function: Callable[..., Any], *signature: Hashable) -> CompiledFunction:
    """Returns the program of ``function(signature, *tensors)``, one per signature."""
    return CompiledFunction(function, signature)


def compile_symbolic(function: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    """Calls ``torch.compile`` with symbolic lengths, and so that it raises instead of running uncompiled."""
    import torch

    return torch.compile(function, fullgraph=True, dynamic=True, backend=compiler)


class Compiler:
    """Inductor with our settings. ``fresh``: it has compiled since the owner last cleared the flag.

    When torch drops its compiled code (``torch.compiler.reset``), the programs are dropped, too.
    """

    fresh = False

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, graph: GraphModule, examples: Sequence[Tensor | torch.SymInt]) -> object:
        """Compiles a graph."""
        tag = ("torch.compiler.config", "cache_key_tag", f"{self.name} {_conditions(examples)}")
        with torch_settings((*COMPILING, tag)), timed("flex", self.name):
            result = inductor(graph, examples)
        self.fresh = True
        return result

    def reset(self) -> None:
        """Drops the programs. torch calls it from ``torch.compiler.reset``."""
        program.cache_clear()


def _conditions(examples: Sequence[Tensor | torch.SymInt]) -> str:
    """Returns a digest of the conditions on lengths under which torch traced a graph, such as "one block"."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(examples)
    known = [] if mode is None or mode.shape_env is None else [str(guard.expr) for guard in mode.shape_env.guards]
    return sha256("\n".join(known).encode()).hexdigest()[:16]


def inductor(graph: GraphModule, examples: Sequence[Tensor | torch.SymInt]) -> object:
    """Runs torch's own compiler without CUDA graphs, because the next replay would overwrite a graph's results."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, examples, config_patches={"triton.cudagraphs": False})


def refuse_capture(what: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured on the current stream."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"FlexAttention: {what}, and that cannot happen while a CUDA graph is captured; "
            "run the call once before, or call warm_up"
        )


def flex(how: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
    """Runs flex_attention on ``[batch, heads, tokens, dim]`` tensors. This is the function that is compiled.

    Args:
        how: what the program is compiled for: the Signature, and what else tells one compiled program from another.
        operands: the fields of ``operands.FlexOperands``, which the compiler takes one by one.

    Returns:
        out ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``, natural, float32.
    """
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    signature: Signature = how[0]
    edges, places, tables, mask, bias, slopes, softcap, ranges, aux, learned = operands
    distance = functions.distance_function(None if edges is None else edges.offset, places)
    wide = torch.float32
    bias_reader, slope_reader = functions.reader(bias, wide), functions.slope_reader(slopes, wide)
    left, right = (edges.left, edges.right) if "band" in signature.mask else (None, None)
    in_ranges = functions.range_reader(ranges, int(signature.group))
    masked, scored = signature.mask_mod, signature.score_mod
    shown = None if masked is None else lambda b, h, row, column: masked.function(None, b, h, row, column, aux)
    changed = None if scored is None else lambda score, *place: scored.function(score, *place, (*aux, *learned))
    visible = functions.mask_function(functions.reader(mask), left, right, distance, places, (in_ranges, shown))
    options: Any = dict(signature.options)
    out, extra = flex_attention(
        q,
        k,
        v,
        score_mod=functions.score_function(softcap, bias_reader, slope_reader, distance, changed),
        block_mask=_one_block(q) if visible is None else _block_mask(visible, (q.shape[2], k.shape[2]), tables),
        scale=float(signature.scale),
        enable_gqa=signature.enable_gqa,
        kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )
    lse: Any = extra.lse
    # The constant in rows that see no key has no gradient: an infinite one would give 0 * inf.
    return out, torch.where(lse == -torch.inf, -torch.inf, lse)


def _one_block(like: Tensor) -> BlockMask:
    """Returns the BlockMask that hides nothing: one block, which is as large as any call.

    flex_attention makes the same one if it gets none, but by vmap, which torch 2.11 cannot trace inside a compiled
    function of the caller.
    """
    import torch
    from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE, BlockMask, noop_mask

    count = torch.ones((1, 1, 1), dtype=torch.int32, device=like.device)
    indices = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=like.device)
    return BlockMask(
        seq_lengths=(1, 1),
        kv_num_blocks=count,
        kv_indices=indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=count,
        q_indices=indices,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(_LARGE_SPARSE_BLOCK_SIZE, _LARGE_SPARSE_BLOCK_SIZE),
        mask_mod=noop_mask,  # torch 2.11 has no default
    )


def _block_mask(visible: functions.Reader, lengths: tuple[int, int], tables: tuple[Table, Table]) -> BlockMask:
    """Returns flex's block mask for our tables of rows and of keys, which the forward and the backward read."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, keys = tables
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=rows.partial_count,
        kv_indices=rows.partial,
        full_kv_num_blocks=rows.full_count,
        full_kv_indices=rows.full,
        q_num_blocks=keys.partial_count,
        q_indices=keys.partial,
        full_q_num_blocks=keys.full_count,
        full_q_indices=keys.full,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )
