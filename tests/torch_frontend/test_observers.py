"""Every call has the outcome of the general path: results, gradients, warnings or the error, whatever observes it.

A call that was made before is prepared. Each case makes a legal call first, then the same call inside an observer
or with one operand or option changed, twice, and compares both with that call on the general path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from general_path import general_path, prepared_calls, remembered_on_one_rank
from observed_calls import (
    FORMS,
    OBSERVERS,
    Change,
    Form,
    Observer,
    Outcome,
    changes_of,
    is_meant,
    leave_one_rank,
    legal,
    outcome,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from attn_core import checks
from attn_core.errors import SpecError
from torch_frontend import use_backend


class Known(NamedTuple):
    """Differences of prepared calls, in each form under each observer, and why."""

    forms: tuple[str, ...]
    observers: tuple[str, ...]
    changes: tuple[str, ...]
    reason: str


KNOWN: tuple[Known, ...] = (
    Known(
        ("bhsd, mask", "bhsd, bias"),
        ("ranges",),
        ("k: NaN", "v: NaN"),
        "the kernel of this layout runs, sees the NaN and leaves the call to another one, which has a range of its own",
    ),
)
"""A difference that is gone fails, as a new one does."""

CASES = [(form, observer) for form in FORMS for observer in OBSERVERS if is_meant(form, observer)]
NOT_PREPARED = (
    "max logit",
    "dropout",
    "key ranges",
    "segments",
    "rows of a cache, bhsd",
    "paged chunk",
    "append_kv, chunk",
    "layer, dropout",
)
"""Forms whose legal calls take the general path on a CPU."""
NOTHING = OBSERVERS["nothing"]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Torch repeats its warnings, context parallelism remembers calls, and the one rank ends with the tests."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with remembered_on_one_rank():
        yield
    torch.set_warn_always(before)
    leave_one_rank()


def differences(form: Form, observer: Observer, faulty: Form | None = None) -> dict[str, str]:
    """What differs between repeated calls and those on the general path, by the names of changes.

    Args:
        faulty: makes the repeated calls in the place of the form.
    """
    changes = changes_of(form, observer)
    with general_path():
        expected = [outcome(form, observer, change) for change in changes]
    outcome(form, NOTHING, legal())
    repeated = form if faulty is None else faulty
    first = [_after_a_legal_call(form, repeated, observer, change) for change in changes]
    second = [outcome(repeated, observer, change) for change in changes]
    found = {}
    for change, right, *actual in zip(changes, expected, first, second, strict=True):
        texts = [each.differences(right) for each in actual]
        if any(texts):
            found[change.name] = next(filter(None, texts))
    return found


def _after_a_legal_call(form: Form, repeated: Form, observer: Observer, change: Change) -> Outcome:
    if change.option is not None:
        outcome(form, NOTHING, change.before())
    return outcome(repeated, observer, change)


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "observer"), CASES)
def test_a_repeated_call_has_the_outcome_of_the_general_path(form: str, observer: str) -> None:
    found = differences(FORMS[form], OBSERVERS[observer])
    known = {change for each in KNOWN if form in each.forms and observer in each.observers for change in each.changes}
    assert found.keys() == known, "\n".join(f"{change}: {text}" for change, text in found.items())


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_call_is_prepared_and_the_general_path_is_not(form: str) -> None:
    right = outcome(FORMS[form], NOTHING, legal())
    assert not right.error
    with prepared_calls() as taken:
        outcome(FORMS[form], NOTHING, legal())
    assert bool(taken) == (form not in NOT_PREPARED)
    with general_path(), prepared_calls() as taken:
        outcome(FORMS[form], NOTHING, legal())
    assert not taken


class Plant(NamedTuple):
    """A fault of a prepared call, and the case that must show it.

    Attributes:
        fault: takes the function of a form and the arguments of a call; returns its results.
        change: the name of the change, "legal" for none.
    """

    fault: Callable[..., Any]
    form: str
    observer: str
    change: str = "legal"


def _inside(context: Callable[[], Any]) -> Callable[..., Any]:
    """A fault that hides an observer from the call."""

    def run(function: Callable[..., Any], **call: Any) -> Any:
        with context():
            return function(**call)

    return run


def _with(**options: Any) -> Callable[..., Any]:
    """A fault that takes other options for the caller's."""
    return lambda function, **call: function(**call | options)


def _detached(function: Callable[..., Any], **call: Any) -> Any:
    return function(**call).detach()


def _renamed(function: Callable[..., Any], **call: Any) -> Any:
    try:
        return function(**call)
    except SpecError as error:
        raise type(error)(str(error).replace("k:", "k_pages:")) from error


def _of_another_type(function: Callable[..., Any], **call: Any) -> Any:
    try:
        return function(**call)
    except SpecError as error:
        raise ValueError(str(error)) from error


def _in_the_last_bit(function: Callable[..., Any], **call: Any) -> Any:
    out = function(**call)
    return out + torch.finfo(out.dtype).eps * out.abs()


def _drawn_twice(function: Callable[..., Any], **call: Any) -> Any:
    torch.rand(1)
    return function(**call)


def _unwritten(function: Callable[..., Any], k_pages: Any, v_pages: Any, **call: Any) -> Any:
    function(k_pages=k_pages.clone(), v_pages=v_pages.clone(), **call)
    return k_pages, v_pages


def _unchecked(function: Callable[..., Any], **call: Any) -> Any:
    try:
        return function(**call)
    except SpecError:
        return call["q"].clone()


def _only_once() -> Callable[..., Any]:
    """A fault of calls that were made before."""
    made: list[Any] = []

    def run(function: Callable[..., Any], **call: Any) -> Any:
        made.append(call)
        return function(**call) if len(made) == 1 else _in_the_last_bit(function, **call)

    return run


def _all_kernels() -> Any:
    kernels = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    return sdpa_kernel([*kernels, SDPBackend.CUDNN_ATTENTION, SDPBackend.OVERRIDEABLE])


PLANTS: dict[str, Plant] = {
    "forgets checks": Plant(_inside(lambda: checks(False)), "dense", "checks", "k: NaN"),
    "forgets checks of a cache": Plant(_inside(lambda: checks(False)), "rows of a cache", "checks", "k: NaN"),
    "ignores autocast": Plant(_inside(lambda: torch.autocast("cpu", enabled=False)), "bhsd", "autocast"),
    "forgets sdpa_kernel": Plant(_inside(_all_kernels), "mask", "sdpa_kernel(MATH)"),
    "forgets use_backend": Plant(_inside(lambda: use_backend("sdpa_flash")), "dense", "use_backend"),
    "hides from a mode": Plant(_inside(_disable_current_modes), "bias", "a dispatch mode"),
    "loses a gradient": Plant(_detached, "sinks", "nothing", "sinks: requires a gradient"),
    "has a gradient without grad": Plant(_inside(torch.enable_grad), "dense", "no_grad", "q: requires a gradient"),
    "takes 1 for True": Plant(_with(causal=True), "documents", "nothing", "causal=1"),
    "takes True for 1.0": Plant(_with(scale=1.0), "paged", "nothing", "scale=True"),
    "takes a float in a window": Plant(_with(window=(1, 0)), "window", "nothing", "window=(1.0, 0)"),
    "runs without memory": Plant(_unchecked, "alibi", "nothing", "k: cut"),
    "names another argument": Plant(_renamed, "bhsd", "nothing", "k: an axis less"),
    "raises another error": Plant(_of_another_type, "kvcache", "nothing", "q: bfloat16"),
    "rounds otherwise": Plant(_in_the_last_bit, "dense", "nothing"),
    "draws twice": Plant(_drawn_twice, "lse", "nothing"),
    "does not write": Plant(_unwritten, "append_kv", "nothing"),
    "is wrong the second time": Plant(_only_once(), "nested", "a function mode"),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_planted_faults_are_found(fault: str) -> None:
    plant = PLANTS[fault]
    form = FORMS[plant.form]
    faulty = form._replace(function=partial(plant.fault, form.function))
    assert plant.change in differences(form, OBSERVERS[plant.observer], faulty)
