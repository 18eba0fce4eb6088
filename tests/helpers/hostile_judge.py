"""Calls public functions with bad values and judges what happens. Run as a program, it judges cases in its own process:

python tests/helpers/hostile_judge.py FRAMEWORK SEED FIRST COUNT

It prints a line of JSON before and after each case, so that its parent knows which case ended it. A call may be right,
may be refused by an error that names an argument, or may find no memory for its result. Everything else is a fault.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import hostile_calls
import hostile_values
import numpy as np

from attn_core import BridgeError, NoBackendError, PoolFullError
from attn_core.call import checks, observe
from attn_core.call.tensors import Inputs
from attn_core.correctness import accuracy
from attn_core.errors import MissingExtraError, SpecError

GOOD = ("right", "accepted", "refused", "no backend", "no memory", "host's error")
"""Outcomes that are no fault: ``accepted`` has no numbers to compare, such as a selection or a tensor without data."""
ROOM = 6 * 2**30
"""Bytes of address space that a process may take after its imports."""

_TYPED = (SpecError, TypeError, ValueError, NotImplementedError)
_LIMITS = (NoBackendError, BridgeError, PoolFullError, MissingExtraError)
_NO_MEMORY = re.compile("can't allocate memory|RESOURCE_EXHAUSTED|out of memory|Unable to allocate", re.IGNORECASE)


class Case(NamedTuple):
    """One call: the function's name, its parameters with good values, and bad values by parameter."""

    function: str
    good: tuple[str, ...]
    bad: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        changes = ", ".join(f"{parameter}=<{value}>" for parameter, value in self.bad)
        return f"{self.function}({changes}; good: {', '.join(self.good)})"


def draw(framework: str, seed: int, number: int) -> Case:
    """Returns case ``number`` of a seed; every case can be drawn alone."""
    source = random.Random(f"{framework} {seed} {number}")
    functions, values = hostile_calls.functions(framework), hostile_values.values_for(framework)
    name = source.choice(sorted(functions))
    function = functions[name]
    optional = [parameter for parameter in function.good if parameter not in function.required]
    changed = source.sample(sorted(function.good), min(source.choice((1, 1, 2)), len(function.good)))
    bad: list[tuple[str, str]] = []
    for parameter in changed:
        is_array = hasattr(function.good[parameter](), "dtype")
        tables = [hostile_values.SCALARS, hostile_values.NUMPY, dict.fromkeys(set(values) - _SHARED)]
        table = source.choices(tables, (15, 20, 65) if is_array else (65, 15, 20))[0]
        names = sorted(table) or sorted(hostile_values.SCALARS)
        if parameter in _FUNCTIONS_OF_CALLERS:  # what a caller's own function raises is the caller's
            names = [
                value
                for value in names
                if value not in ("class", "function", "partial", "exception", "jnp.int32", "jnp.float32")
            ]
        if any("huge" in value or "2^62" in value for _, value in bad):  # two of them might fit together
            names = [value for value in names if not ("huge" in value or "2^62" in value)]
        bad.append((parameter, source.choice(names)))
    extra = source.sample(optional, min(len(optional), source.choice((0, 0, 1, 2))))
    good = [parameter for parameter in (*function.required, *extra) if parameter not in changed]
    return Case(name, tuple(dict.fromkeys(good)), tuple(bad))


_FUNCTIONS_OF_CALLERS = ("array", "process_heads", "rotary", "promote_dtype")
_SHARED = frozenset(hostile_values.SCALARS) | frozenset(hostile_values.NUMPY)


def judge(framework: str, case: Case) -> tuple[str, str]:
    """Runs a case. Returns its outcome and, for a fault, what happened."""
    function, values = hostile_calls.functions(framework)[case.function], hostile_values.values_for(framework)
    keywords = {parameter: function.good[parameter]() for parameter in case.good}
    for parameter, value in case.bad:
        keywords[parameter] = values[value](function.good[parameter]())
    before = {name: laundered(value) for name, value in keywords.items()}
    outcome, result = _called(function, dict(keywords))
    if state := _state_left():
        return "state left behind", state
    if outcome != "accepted":
        return outcome, result
    for name, value in keywords.items():
        if name not in function.writes and not _same(laundered(value), before[name], exact=True):
            return "argument written to", name
    return _judge_result(framework, function, keywords, before, result)


def _called(function: hostile_calls.Function, keywords: dict[str, Any]) -> tuple[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function.call(**keywords)
            if isinstance(result, AbstractContextManager) and not _arrays(result):
                with result:
                    pass
    except MemoryError as error:
        return "no memory", str(error)
    except _LIMITS as error:
        return "no backend", str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if _NO_MEMORY.search(text):
            return "no memory", text
        if _from_host(error):
            return "host's error", text
        if not isinstance(error, _TYPED) or isinstance(error, UnicodeError):
            return "wrong exception", text
        return ("refused" if _names_an_argument(function, str(error)) else "no argument named"), text
    return "accepted", result


def _names_an_argument(function: hostile_calls.Function, text: str) -> bool:
    words = {*function.good, *(name.removesuffix("s") for name in function.good)}  # the name of one among names
    words |= {word for name in function.good for word in _OTHER_NAMES.get(name, ())}
    names = "|".join(map(re.escape, words))
    return re.search(rf"(?<![A-Za-z0-9_])({names})(?![A-Za-z0-9_])", text) is not None


def _from_host(error: Exception) -> bool:
    """Whether torch itself refused the call: drop-ins hand calls to its attention, and layers to its layers.

    Also JAX's error about a tracer that escaped, which names the function that it escaped from.
    """
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.name for frame in frames]
    if "escaped from inside a function being vmapped" in str(error) or str(error) == "Invalid scalar type":
        return True  # of torch.func; of gloo, which does not send every dtype
    if "Array has been deleted" in str(error) or "maybe_level.has_value()" in str(error):
        return True  # of JAX, for an array in the place of an option; of torch.func, in torch's own attention
    if "Inplace update to inference tensor" in str(error) or any("torch/distributed/" in f.filename for f in frames):
        return True
    kind = type(error)
    if kind.__module__ == "jax.errors" or (kind.__module__.startswith("jax") and "Tracer" in kind.__name__):
        return True
    if str(error).startswith("setStorage: "):
        return True  # of torch's views, which name the sizes of a tensor whose storage was freed
    if "Inference tensors cannot be saved for backward" in str(error):
        return True  # of autograd, whatever runs
    return "torch_attention" in names or (names[-1:] == ["forward"] and "must have the same dtype" in str(error))


_OTHER_NAMES = {
    **{name: (name.lower(),) for name in "QKV"},
    **{name: (name[0],) for name in ("query", "key", "key_")},
    "value": ("v", "seq_info"),  # the latter of SeqInfo.coerce
    "block_table": ("width",),
    "attn_mask": ("bias", "mask"),
    "qkv": ("q", "k", "v"),
    "x": ("in_features",),
    "causal_mask": ("bias", "mask"),
    "on": ("checks", "ranges", "log"),
    "kv_len": ("q_len",),  # of slow_inference_attention_softcapping
    "names": ("backend",),  # of use_backend
    "name": ("backend",),  # of Target.claims
    "dtype": ("q", "dtype"),  # a spec has the dtype of q
    "num_kv_heads": ("k",),
    "new": ("tokens",),
    "is_causal": ("causal",),
    "dropout_p": ("dropout",),
    "dropout_rate": ("dropout",),
    "kv": ("k", "v"),
    "context": ("attention_mask", "seq_info"),
}
"""What errors call a parameter besides its own name."""


def _state_left() -> str:
    """Names a switch that a call left on; switches it off."""
    from attn_core.selection import override

    if override.requested() is not None:
        return f"use_backend: {override.requested()}"
    if checks.enabled():
        checks.checks(False)
        return "checks"
    if observe.ranges_enabled():
        observe.ranges(False)
        return "ranges"
    return ""


def _judge_result(
    framework: str,
    function: hostile_calls.Function,
    keywords: dict[str, Any],
    plain: dict[str, Any],
    result: Any,
) -> tuple[str, str]:
    actual = _arrays(result)
    if not actual:
        return "accepted", ""
    if any(array is value for array in actual for value in keywords.values()):
        return "accepted", ""  # an argument, handed back
    if foreign := [name for name, value in keywords.items() if _reads_beyond(value)]:
        return "read memory that is not the tensor's", ", ".join(foreign)
    drops = any(isinstance(keywords.get(name), float) and keywords[name] > 0 for name in _DROPOUT)
    if drops or any(value is _NO_VALUES for value in plain.values()) or not all(map(_has_values, actual)):
        return "accepted", ""
    # The first call may have written to its own arguments by contract, so the second gets the copies from before.
    outcome, other = _called(function, {name: _fresh(value) for name, value in plain.items()})
    if outcome != "accepted":
        return "plain copies are treated in another way", f"{outcome}: {other}"
    expected = _arrays(other)
    if len(actual) != len(expected) or not all(map(_same, actual, expected)):
        return "wrong numbers", f"{[_text(each) for each in actual]} but from plain copies {list(map(_text, expected))}"
    if function.name == f"{framework}_frontend.attention":
        return _judge_by_reference(framework, keywords, actual)
    return "right", ""


_DROPOUT = ("dropout", "dropout_p", "dropout_rate")


def _judge_by_reference(framework: str, keywords: dict[str, Any], actual: list[Any]) -> tuple[str, str]:
    from importlib import import_module

    if keywords.get("seq_info") is not None or not all(
        type(keywords[name]).__name__ != "NestedTensor" for name in "qkv"
    ):
        return "right", ""
    spec = import_module(f"{framework}_frontend").explain(**keywords).spec
    tensors = {name: None if keywords.get(name) is None else _numpy(keywords[name]) for name in Inputs._fields[:7]}
    out = _numpy(actual[0])
    if keywords.get("layout") == "bhsd":
        tensors |= {name: tensors[name].swapaxes(1, 2) for name in "qkv"}
        out = out.swapaxes(1, 2)
    for name in ("mask", "bias"):
        if tensors[name] is not None:
            tensors[name] = tensors[name].reshape((1,) * (4 - tensors[name].ndim) + tensors[name].shape)
    with np.errstate(all="ignore"):
        found = accuracy.expect(spec, Inputs(**tensors)).judge(out=out)
    # Kernels sum values before they divide by the sum of the weights, so a sum may overflow though no result does.
    largest = float(np.finfo(np.float32).max) / max(spec.kv_len, 1)
    if not found.ok and all((abs(each) < largest).all() for each in tensors.values() if each is not None):
        return "wrong numbers", f"against the float64 reference: {found}"
    return "right", ""


# Arrays -----------------------------------------------------------------------------------------------------------

_NO_VALUES = object()
"""Stands for an array whose values cannot be read."""


def _torch() -> Any:
    return sys.modules.get("torch")


def _jax() -> Any:
    return sys.modules.get("jax")


def _is_tensor(value: Any) -> bool:
    return _torch() is not None and isinstance(value, _torch().Tensor)


def _is_jax(value: Any) -> bool:
    return _jax() is not None and isinstance(value, _jax().Array)


def laundered(value: Any) -> Any:
    """A plain copy of an array in its own memory; other values as they are; _NO_VALUES for what cannot be read."""
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        made = [laundered(each) for each in value]
        return _NO_VALUES if any(each is _NO_VALUES for each in made) else type(value)(made)
    if _is_tensor(value):
        torch = _torch()
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta or _is_wrapped(value):
            return _NO_VALUES
        if value.is_nested or value.layout is not torch.strided or value.is_quantized or _reads_beyond(value):
            return _NO_VALUES
        if value.numel() > 2**24:
            return _NO_VALUES
        copy = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return torch.from_numpy(copy.numpy().copy()) if copy.is_inference() else copy
    if _is_jax(value):
        jax = _jax()
        if (
            isinstance(value, jax.core.Tracer)
            or value.is_deleted()
            or jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        ):
            return _NO_VALUES
        return jax.numpy.array(np.array(value))
    if isinstance(value, np.ndarray):
        return _NO_VALUES if value.size > 2**24 or value.dtype == object else np.array(value)
    return value


def _fresh(value: Any) -> Any:
    """Another copy, because a call may write to what it is given."""
    return laundered(value)


def _is_wrapped(tensor: Any) -> bool:
    functorch = _torch()._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(tensor)) or bool(_torch()._is_functional_tensor(tensor))


def _reads_beyond(value: Any) -> bool:
    """Whether a tensor's sizes and strides reach beyond its storage."""
    if not _is_tensor(value) or type(value) not in (_torch().Tensor, _torch().nn.Parameter) or value.is_meta:
        return False
    if value.is_nested or value.layout is not _torch().strided or value.numel() == 0 or _is_wrapped(value):
        return False
    last = value.storage_offset() + sum(
        (size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)
    )
    return bool((last + 1) * value.element_size() > value.untyped_storage().nbytes())


def _arrays(result: Any) -> list[Any]:
    if _is_tensor(result) or _is_jax(result) or isinstance(result, np.ndarray):
        return [result]
    if isinstance(result, tuple | list):
        return [array for each in result for array in _arrays(each)]
    return []


def _has_values(array: Any) -> bool:
    return laundered(array) is not _NO_VALUES


def _numpy(array: Any) -> np.ndarray:
    array = laundered(array)
    if array is _NO_VALUES:
        return np.zeros(0)
    if _is_tensor(array):
        return (array if array.dtype in (_torch().bool,) or not array.is_floating_point() else array.double()).numpy()
    if isinstance(array, np.ndarray) and array.dtype.kind in "OV":
        return np.zeros(0)
    made = np.asarray(array)
    return made.astype(np.float64) if made.dtype.kind == "f" or "float" in str(made.dtype) else made


def _same(one: Any, other: Any, *, exact: bool = False) -> bool:
    if not all(isinstance(each, np.ndarray) or _is_tensor(each) or _is_jax(each) for each in (one, other)):
        return True
    a, b = _numpy(one), _numpy(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind not in "fc":
        return a.tobytes() == b.tobytes()
    with np.errstate(all="ignore"):
        tolerance = 0.0 if exact else 2e-2 if "16" in str(one.dtype) else 1e-4
        return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


def _text(array: Any) -> str:
    return f"{tuple(array.shape)} {_numpy(array).reshape(-1)[:6]}"


# The program ------------------------------------------------------------------------------------------------------


def cases(framework: str, seed: int, first: int, count: int) -> Iterator[tuple[int, Case, str, str]]:
    """Yields (number, case, outcome, text); the outcome is empty before a case runs."""
    for number in range(first, first + count):
        case = draw(framework, seed, number)
        yield number, case, "", ""
        yield (number, case, *judge(framework, case))


@cache
def _limited() -> None:
    """Limits the address space, so that an allocation of gigabytes fails instead of filling the machine."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(arguments: list[str]) -> None:
    """Judges cases and prints lines of JSON. Whatever else prints goes to the error stream."""
    framework, seed, first, count = arguments[0], *map(int, arguments[1:4])
    faulthandler.enable()
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    hostile_calls.functions(framework)
    hostile_values.values_for(framework)
    _limited()
    for number, case, outcome, text in cases(framework, seed, first, count):
        line = {"number": number, "function": case.function, "case": str(case), "outcome": outcome, "text": text[:600]}
        lines.write(json.dumps(line) + "\n")
    os._exit(0)  # neither gloo nor XLA need to end in order


if __name__ == "__main__":
    main(sys.argv[1:])
