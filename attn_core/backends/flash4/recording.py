"""Records the kernels that one call of FlashAttention-4 launches, in their order, with their arguments.

flash-attn-4 chooses tiles, kernels and scratch memory in Python, and chooses otherwise in every version. We do not
repeat its choices: its entry points make the call once, in a private copy of their module that notes what they do.
There are two ways to make that call:

- On the call's own tensors. The kernels are launched as usual; ``replay`` launches them again in later calls.
- On tensors without memory (torch's FakeTensorMode, which flash-attn-4 itself uses to compile ahead). Nothing is
  compiled or launched; ``program`` makes a program of XLA.

Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute.interface``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.flash4 import own_kernels
from attn_core.backends.flash4.own_kernels import Arguments, OwnKernel
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.kernel_programs import Unrecordable
from attn_core.call.after_fork import free_in_children

if TYPE_CHECKING:
    from cutlass import Int64
    from torch import Tensor
    from torch._ops import OpOverload


class Uncompiled(NamedTuple):
    """The arguments of ``cute.compile`` for a kernel. It stands for the compiled kernel; a launch of it does nothing.

    Attributes:
        code: the function of the CuTe DSL.
        described: its arguments without values: descriptions of tensors, numbers, None; the stream is the last.
    """

    code: Any
    described: tuple[Any, ...]
    options: str | None

    def __call__(self, *arguments: object) -> None: ...


@dataclass(frozen=True)
class Operand:
    """An argument of a kernel that is a tensor of the call, or its address as a number.

    Attributes:
        place: of the tensor in ``Recording.tensors``.
    """

    place: int
    is_address: bool = False


class Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        kernel: the compiled function, or an ``Uncompiled``.
        name: says which kernel it is: for flash-attn-4's own, the key in its cache.
        arguments: each an ``Operand``, a number or None, the same in every call, or a tuple of these.
    """

    kernel: Any
    name: str
    arguments: tuple[Any, ...]


class Recording(NamedTuple):
    """The launches of a call, in order.

    Attributes:
        tensors: the operands of the call, results among them, then the scratch: memory that the call allocates for its
            kernels, contiguous.
        scratch: the places of the scratch, and whether it must be zero before the first launch.
    """

    tensors: list[Any]
    scratch: dict[int, bool]
    launches: list[Launch]


# torch's operations that launch no kernel, beside zeros. Any other one would be missing between the launches.
_EMPTY = ("aten.empty", "aten.new_empty")
_ZEROS = ("aten.zeros", "aten.new_zeros")
_NOTHING = ("aten.detach", "prim.")
_FIRST_ADDRESS = 2**62
"""Numbers from here on stand for addresses of tensors without memory; no GPU has such addresses."""


class Recorder:
    """A lane (see ``own_kernels``) that notes the launches of flash-attn-4's kernels and of ours."""

    TAKES_VIEWS = False

    def __init__(self, with_memory: bool) -> None:
        self._with_memory = with_memory
        self._launches: list[Launch] = []
        self._addressed: dict[int, Any] = {}
        self.operations: list[tuple[str, Any]] = []
        """The name and the result of every operation of torch."""

    def entry_points(self) -> tuple[Any, Any]:
        """Returns ``(_flash_attn_fwd, _flash_attn_bwd)`` of the private copy."""
        return _private_copy()._flash_attn_fwd, _private_copy()._flash_attn_bwd

    def launch(self, kernel: OwnKernel, arguments: Arguments) -> None:
        """Launches a kernel of ours."""
        compiled = own_kernels.compiled if self._with_memory else _uncompiled
        self.note(compiled(kernel, arguments), kernel.name, arguments)

    def address(self, tensor: Tensor) -> Int64:
        """Returns a number that is, or stands for, the address of a tensor."""
        from cutlass import Int64

        number = tensor.data_ptr() if self._with_memory else _FIRST_ADDRESS + len(self._addressed)
        self._addressed[number] = tensor
        return Int64(number)

    def note(self, kernel: Callable[..., None] | Uncompiled, name: str, arguments: Arguments) -> None:
        """Notes a launch, and launches the kernel."""
        self._launches.append(Launch(kernel, name, arguments))
        kernel(*arguments)

    def recorded(self, operands: Iterable[Tensor | None]) -> Recording:
        """Returns the recording of a call.

        Args:
            operands: every tensor that it got, and None for an operand that it has not. No two have one address.

        Raises:
            Unrecordable: if there is an operation of torch that does more than allocate, or a kernel's argument that is
                not known to be the same, or of the same tensor, in every call.
        """
        tensors, scratch = list(operands), dict[int, bool]()
        # What torch did between the launches: a replay can allocate, but not compute.
        for name, result in self.operations:
            if name.startswith((*_EMPTY, *_ZEROS)) and result.is_contiguous():
                scratch[len(tensors)] = name.startswith(_ZEROS)
                tensors.append(result)
            elif not name.startswith(_NOTHING):
                raise Unrecordable(f"a torch operation, {name}, among its kernels")
        # By memory, because a kernel may get another object for the same tensor.
        places = {_memory(tensor): place for place, tensor in enumerate(tensors) if tensor is not None}

        def known(value: Any, _: object) -> Any:
            number = getattr(value, "value", None)
            addressed = self._addressed.get(number) if isinstance(number, int) else None
            tensor = value if addressed is None else addressed
            if not hasattr(tensor, "untyped_storage"):
                check_constant(value)
                return value
            place = places.get(_memory(tensor))
            if place is None or _layout(tensor) != _layout(tensors[place]):  # type: ignore[arg-type]
                what = f"{list(tensor.shape)}, strides {tensor.stride()}"
                raise Unrecordable(f"a kernel takes a view, or a tensor that is not the call's: {what}")
            return Operand(place, addressed is not None)

        launches = [
            launch._replace(arguments=tuple([with_leaves(known, value, value) for value in launch.arguments]))
            for launch in self._launches
        ]
        return Recording(tensors, scratch, launches)


@contextmanager
def recording(with_memory: bool) -> Iterator[Recorder]:
    """Returns a context whose recorder notes the launches of its entry points.

    Args:
        with_memory: whether tensors have memory, so that kernels are compiled and launched as usual.
    """
    from flash_attn.cute import interface

    recorder, copy = Recorder(with_memory), _private_copy()
    # flash-attn-4 keeps a function's compiled kernels in an attribute of the function.
    own = [each for each in vars(copy).values() if isinstance(each, FunctionType) and each.__globals__ is vars(copy)]
    functions: list[Any] = [function for function in own if hasattr(function, "compile_cache")]
    with _one_at_a_time:
        for function in functions:
            # Without memory the cache is empty, so that every kernel is requested from the compiler, which notes it.
            compiled = getattr(interface, function.__name__).compile_cache if with_memory else {}
            function.compile_cache = _NotingCache(function.__name__, compiled, recorder)
        copy.cute = interface.cute if with_memory else _NotingCompiler()
        copy.is_fake_mode = lambda: False  # in fake mode it would stop before the launch that we record
        try:
            with _watch()(recorder.operations):
                yield recorder
        finally:
            for function in functions:
                function.compile_cache = None  # the copy outlives the call, and the tensors of a recorder must not


_one_at_a_time = free_in_children(threading.Lock())
"""Held during a recording, because all recordings share the private copy."""


@cached_once
def _private_copy() -> Any:
    """Imports flash_attn.cute.interface again, so that changes to it affect no other caller."""
    from flash_attn.cute import interface

    spec = util.spec_from_file_location("flash_attn.cute._attn_core_recorded", interface.__file__)
    if spec is None or spec.loader is None:
        raise Unrecordable(f"no source of {interface.__name__}")
    copy = util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@cached_once
def is_possible() -> bool:
    """Returns whether flash-attn-4's calls can be recorded. The first call takes 30 ms."""
    try:
        return all(hasattr(_private_copy(), name) for name in ("_flash_attn_fwd", "_flash_attn_bwd", "cute"))
    except Exception:  # an interface that changed upstream can raise anything, and the usual entry points still work
        return False


class _NotingCompiler:
    """Replaces ``cutlass.cute`` in the private copy. Its ``compile`` only notes its arguments."""

    def __getattr__(self, name: str) -> Any:
        from cutlass import cute

        return getattr(cute, name)

    def compile(self, code: object, *described: object, options: str | None = None) -> Uncompiled:
        return Uncompiled(code, described, options)


def _uncompiled(kernel: OwnKernel, arguments: Arguments) -> Uncompiled:
    return Uncompiled(kernel.code(), own_kernels.described(arguments), own_kernels.OPTIONS)


class _NotingCache:
    """The compiled kernels of a function by flash-attn-4's keys. Notes each launch."""

    def __init__(self, name: str, compiled: MutableMapping[Hashable, Callable[..., None]], recorder: Recorder) -> None:
        self._name, self._compiled, self._recorder = name, compiled, recorder

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiled

    def __setitem__(self, key: Hashable, kernel: Callable[..., None]) -> None:
        self._compiled[key] = kernel

    def __getitem__(self, key: Hashable) -> Callable[..., None]:
        kernel = self._compiled[key]  # flash-attn-4 looks a kernel up where it launches it
        return lambda *arguments: self._recorder.note(kernel, f"{self._name} {key!r}", arguments)


@cached_once
def _watch() -> Any:
    """Returns the class of contexts that note the name and the result of every torch operation in a list."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self, operations: list[tuple[str, Any]]) -> None:
            super().__init__()
            self._operations = operations

        def __torch_dispatch__(
            self,
            function: OpOverload,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            result = function(*args, **(kwargs or {}))
            self._operations.append((str(function), result))
            return result

    return Watch


def with_leaves(leaf: Callable[[Any, Any], Any], value: Any, about: Any) -> Any:
    """Returns an argument with ``leaf(value, about)`` in its place; of a tuple or list, in the place of each part.

    Args:
        about: describes the argument, part by part. The result has its types.
    """
    if not is_group(value):
        return leaf(value, about)
    parts = [with_leaves(leaf, part, of_part) for part, of_part in zip(value, about, strict=True)]
    return type(about)(*parts) if hasattr(about, "_fields") else type(about)(parts)


def is_group(value: object) -> bool:
    """Returns whether an argument has parts. A tuple of None alone has none."""
    return isinstance(value, (tuple, list)) and any(part is not None for part in value)


def is_number(value: object) -> bool:
    """Returns whether an argument is a number of the CuTe DSL."""
    return isinstance(getattr(value, "value", None), (int, float))


def check_constant(value: Any) -> float | str | None:
    """Checks an argument that is the same in every call, and returns what says it."""
    if is_number(value):
        return f"{type(value).__name__}({value.value})"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if type(value).__name__ == "AuxData" and all(part is None for part in value):
        return "no AuxData"
    raise Unrecordable(f"a kernel takes {type(value).__name__} {value!r:.200}")


def _memory(tensor: Tensor) -> Hashable:
    """Returns what identifies a tensor's memory, also of a tensor that has none: storage and first byte."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
