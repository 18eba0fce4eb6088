"""Records the operators of torch that a function runs, as a text that ``operator_call.cc`` runs without Python.

The function runs once on tensors that have shapes but no memory (torch's FakeTensorMode). So its operators may depend
on shapes and dtypes, and never on values: a function that reads a value on the host cannot be recorded.

The text's first line is the number of tensors. Each further line is an operator: its name, its overload or "-", its
arguments, ">", its results, "~", and the tensors that no later line reads. Arguments: "t4" tensor 4, "T4,-1" a list of
tensors or None, "i3" "f0.5" "b1" "n" "sword" a number, bool, None or text, "wi3" a number as a tensor, "u" an undefined
tensor, "I1,2" and "B0,1" lists, "d" the device of the run, "c" the CPU. A result is the number of its tensor, with
sizes and strides ("5:2,8:8,1") unless it is a view; -1 if nothing reads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.programs.kernel_programs import Unrecordable

MOST_OPERATORS = 400
"""The most operators of a text. A function that runs more is a loop over blocks, whose launches would take longer than
its callback."""
FAKE_DEVICE = "cuda:0"
"""The device of tensors without memory. Without an index torch takes the thread's current device, or that of an equal
tensor before; then a call's tensors were on two devices once a process had used two GPUs."""
FakeResults = Callable[[Any, dict[str, Any]], Any]
"""``(operator, arguments by name) -> first results``, for an operator that torch cannot run on tensors without memory;
None for any other operator."""


class Functions(NamedTuple):
    """A backend's forward and backward as programs record them, the ``operator_functions`` of its Program.

    Attributes:
        forward, backward: of the backend.
        writes_into: whether they take ``into``.
        fake_results: see FakeResults.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    writes_into: bool = False
    fake_results: FakeResults | None = None


class _Line(NamedTuple):
    """One operator. words: its arguments; results: ``(tensor, layout as text)``; changes: memory that it writes to."""

    name: str
    words: list[str]
    reads: list[int]
    results: list[tuple[int, str]]
    changes: set[Any]


def without_memory() -> AbstractContextManager[Any]:
    """Returns a context in which torch's functions create tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _suppress_address_warning()
    return FakeTensorMode()


@cached_once
def _suppress_address_warning() -> None:
    """Triggers and suppresses torch's once-per-process warning about reading a FakeTensor's data_ptr.

    Backends and cutlass read addresses for their alignment, so users would see the warning.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")
        torch.empty(1, device="cpu").data_ptr()


def outside() -> AbstractContextManager[Any]:
    """Returns a context that leaves a recording for a while, to run small calls whose results are kept."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@without_gradient
def record(run: Callable[[], None], tensors: Sequence[Any], fake_results: FakeResults | None = None) -> str:
    """Returns the text of the operators that ``run`` runs on tensors and on what it makes of them.

    Call it inside ``without_memory``, in which the tensors must have been created. Results are written into some of the
    tensors.

    Raises:
        Unrecordable: for a function that needs a value, more than MOST_OPERATORS, or an argument that has no word.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    recorder = _recorder()(tensors, fake_results)
    try:
        with recorder:
            run()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise Unrecordable(f"its operators depend on values: {error}") from error
    return recorder.text()  # type: ignore[no-any-return]


@cached_once
def _recorder() -> Any:  # noqa: C901
    """Returns the class of recordings, a mode of torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self, tensors: Sequence[Any], fake_results: FakeResults | None) -> None:
            super().__init__()
            self._alive = list(tensors)  # so that no two tensors have one id
            self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
            self._operands, self._device = len(tensors), tensors[0].device.type
            self._fake_results, self._lines = fake_results, list[_Line]()

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if op in _identities():  # a new view of the whole tensor
                result = op(*args, **kwargs)
                self._places[id(result)] = self._place(args[0])
                self._alive.append(result)
                return result
            schema = op._schema
            named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
            values = [named.get(each.name, each.default_value) for each in schema.arguments]
            read = [place for value in values for place in self._read(value)]
            pairs = list(zip(values, schema.arguments, strict=True))
            words = [self._word(value, str(each.type)) for value, each in pairs]
            results = self._fake_results(op, named) if self._fake_results else None
            results = op(*args, **kwargs) if results is None else _completed(results, schema.returns)
            several = results if isinstance(results, (tuple, list)) else (results,)
            is_view = any(each.alias_info is not None for each in schema.returns)
            noted = [self._result(result, is_view) for result in several]
            name = f"{schema.name} {schema.overload_name or '-'}"
            written = [v for v, each in pairs if each.alias_info is not None and each.alias_info.is_write]
            several_written = [each for v in written for each in (v if isinstance(v, (list, tuple)) else (v,))]
            changes = {_memory(tensor) for tensor in several_written if hasattr(tensor, "untyped_storage")}
            self._lines.append(_Line(name, words, read, noted, changes))
            if len(self._lines) > 10 * MOST_OPERATORS:
                raise Unrecordable(f"it runs more than {10 * MOST_OPERATORS} operators")
            return results

        def _read(self, value: Any) -> list[int]:
            if isinstance(value, (list, tuple)):
                return [place for each in value for place in self._read(each)]
            return [self._place(value)] if hasattr(value, "untyped_storage") else []

        def _place(self, tensor: Any) -> int:
            place = self._places.get(id(tensor))
            if place is None:
                raise Unrecordable("it reads a tensor from outside of the call")
            return place

        def _result(self, result: Any, is_view: bool) -> tuple[int, str]:
            if not hasattr(result, "untyped_storage") or id(result) in self._places:
                return -1, ""
            self._places[id(result)] = len(self._alive)
            self._alive.append(result)
            layout = "" if is_view else f":{_joined(result.shape)}:{_joined(result.stride())}"
            return self._places[id(result)], layout

        def _word(self, value: Any, kind: str) -> str:
            if hasattr(value, "untyped_storage"):
                return f"t{self._place(value)}"
            if isinstance(value, (list, tuple)):
                return self._list(list(value))
            if kind == "Tensor":  # a number that the operator takes as a tensor, or no tensor at all
                return "u" if value is None else f"w{_scalar(value, kind, self._device)}"
            return _scalar(value, kind, self._device)

        def _list(self, values: list[Any]) -> str:
            if any(hasattr(value, "untyped_storage") for value in values):
                return "T" + _joined(-1 if value is None else self._place(value) for value in values)
            if all(isinstance(value, bool) for value in values) and values:
                return "B" + _joined(map(int, values))
            if all(isinstance(value, int) for value in values):
                return "I" + _joined(values)
            raise Unrecordable(f"an operator takes {values!r:.100}")

        def text(self) -> str:
            """Returns the recorded operators whose results somebody reads."""
            live, last = list[tuple[_Line, list[int]]](), set(range(self._operands))
            memory = [_memory(tensor) for tensor in self._alive]
            needed, read = set(memory[: self._operands]), set(range(self._operands))
            for line in reversed(self._lines):
                if not (line.changes & needed or any(place in read for place, _ in line.results)):
                    continue
                needed.update(memory[place] for place in line.reads)
                read.update(line.reads)
                ends = sorted(set(line.reads) - last)
                last.update(ends)
                live.append((line, ends))
            if len(live) > MOST_OPERATORS:
                raise Unrecordable(f"it needs {len(live)} operators, and at most {MOST_OPERATORS} are run this way")
            lines = [
                " ".join(
                    [line.name, *line.words, ">"]
                    + [f"{place}{layout}" if place in read else "-1" for place, layout in line.results]
                    + ["~", *map(str, ends)]
                )
                for line, ends in reversed(live)
            ]
            return "\n".join([str(len(self._alive)), *lines])

    return Recorder


def _memory(tensor: Any) -> Any:
    """Returns what identifies the memory that a tensor would share with its views."""
    return tensor.untyped_storage()._cdata


@cached_once
def _identities() -> tuple[Any, ...]:
    import torch

    return torch.ops.aten.alias.default, torch.ops.aten.detach.default


def _completed(results: tuple[Any, ...], returns: Any) -> tuple[Any, ...]:
    """Returns an operator's first results and stand-ins for its others, which nobody reads."""
    missing = returns[len(results) :]
    return (*results, *(results[0].new_empty(0) if str(each.type) == "Tensor" else 0 for each in missing))


def _joined(values: Any) -> str:
    return ",".join(map(str, values))


def _scalar(value: Any, kind: str, device: str) -> str:
    """Returns the word of an argument that is no tensor.

    Args:
        kind: the argument's type in the operator's schema.
        device: the kind of device that the tensors of the recording are on.
    """
    import torch

    if value is None:
        return "n"
    if isinstance(value, bool):
        return f"b{int(value)}"
    if isinstance(value, (int, float)):
        return f"f{float(value)!r}" if isinstance(value, float) or "float" in kind else f"i{value}"
    if isinstance(value, torch.device):
        if value.type not in (device, "cpu"):
            raise Unrecordable(f"an operator takes the device {value}")
        return "d" if value.type == device else "c"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return f"i{_enumerated()[value]}"
    if isinstance(value, str) and value and not value.split()[1:]:
        return f"s{value}"
    raise Unrecordable(f"an operator takes {type(value).__name__} {value!r:.100}")


@cached_once
def _enumerated() -> dict[Any, int]:
    """Returns torch's own numbers of dtypes, layouts and memory formats (``c10/core/ScalarType.h``, ``Layout.h``)."""
    import torch

    names = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
    dtypes = {getattr(torch, name): number for number, name in enumerate(names)}
    dtypes |= {torch.bool: 11, torch.bfloat16: 15, torch.uint32: 28, torch.uint64: 29}
    return {**dtypes, torch.strided: 0, torch.contiguous_format: 0, torch.preserve_format: 1}
