"""Tests every type of transformers' text and vision models: equal to ``eager``, or refused at construction.

``make test`` runs one of 20 types, ``make sweep`` all. Types that
cannot run are listed with their reasons in transformers_lists, so a type that starts or stops running is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import transformers_lists as lists
import transformers_types as types
from transformers_models import check_slopes, slopes_of

from attn_core.errors import SpecError
from torch_frontend import huggingface

pytestmark = pytest.mark.sampled

LENGTH, NEW = 9, 5


@pytest.fixture(autouse=True, scope="module")
def quiet(registered: None) -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def inputs(kind: str, made: Any, side: str | None) -> tuple[dict[str, Any], torch.Tensor]:
    """A batch of two for a model, with padding on one side of its first row, and which tokens are real."""
    generator = torch.Generator().manual_seed(1)
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    if kind == "vision":
        config = getattr(made.config, "vision_config", made.config)
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.randn(2, config.num_channels, size, size, generator=generator)}, keep
    ids = torch.randint(2, types.VOCABULARY - 1, (2, LENGTH), generator=generator)
    if side is not None:
        keep[0, slice(0, 3) if side == "left" else slice(-3, None)] = 0
        ids = ids.masked_fill(keep == 0, 0)
    given = {"input_ids": ids}
    if side is not None:
        given["attention_mask"] = keep
    if made.config.is_encoder_decoder and kind == "seq2seq":
        given["decoder_input_ids"] = torch.randint(2, types.VOCABULARY - 1, (2, LENGTH), generator=generator)
        keep = torch.ones_like(keep)
    return given, keep


def logits(made: Any, **given: Any) -> torch.Tensor:
    actual = made(**given)
    return actual.logits if "logits" in actual else next(each for each in actual.values() if torch.is_tensor(each))


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, share: float = 1e-3) -> None:
    size = float(expected.abs().max())
    error = float((actual - expected).abs().max())
    assert error <= share * size + 1e-6, f"{what}: off by {error} of {size}"


def gradients(made: Any, given: dict[str, Any], keep: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of real tokens, and the gradient of every parameter."""
    actual = logits(made, **given)
    if actual.dim() == 3 and actual.shape[:2] == keep.shape:
        actual = actual[keep.bool()]
    return actual.detach(), slopes_of(made, actual)


def compare_forward_and_gradients(kind: str, eager: Any, ours: Any, side: str | None) -> None:
    given, keep = inputs(kind, eager, side)
    (expected, slopes), (actual, mine) = (gradients(each, given, keep) for each in (eager, ours))
    assert expected.isfinite().all() and expected.abs().max() > 0
    close(actual, expected, f"logits, padding {side}")
    check_slopes(mine, slopes, f", padding {side}")


def compare_generated(kind: str, eager: Any, ours: Any, cache: str) -> None:
    given, _ = inputs(kind, eager, "right" if kind == "seq2seq" else "left")
    given.pop("decoder_input_ids", None)
    limits = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    limits |= {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    try:
        expected = eager.generate(**given, **limits)
    except Exception:
        return  # this model has no such cache
    actual = ours.generate(**given, **limits)
    close(torch.stack(actual.logits), torch.stack(expected.logits), f"generate with a {cache} cache")
    assert torch.equal(actual.sequences, expected.sequences), f"generate with a {cache} cache"


def compare_packed(eager: Any, ours: Any, how: str) -> None:
    """A packed row compared with its documents alone, through eager."""
    lengths = (4, 1, 5)
    ids = torch.randint(2, types.VOCABULARY - 1, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    first = lists.FIRST.get(eager.config.model_type, 0)
    positions = torch.cat([torch.arange(length) for length in lengths])[None] + first
    given: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    if how == "offsets":
        bounds = torch.tensor([0, 4, 5, 10], dtype=torch.int32)
        given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    with torch.no_grad():
        actual = logits(ours, input_ids=ids, **given)
        if eager.config.model_type in lists.MIXED and how == "positions":
            return close(actual, logits(eager, input_ids=ids, **given), f"documents told by {how}, as eager has them")
        alone = [logits(eager, input_ids=part, use_cache=False) for part in ids.split(lengths, 1)]
    close(actual, torch.cat(alone, 1), f"documents told by {how}")


def trials(kind: str, eager: Any, ours: Any) -> Iterator[Callable[[], None]]:
    """The comparisons for a kind of model."""
    yield lambda: compare_forward_and_gradients(kind, eager, ours, None)
    if kind == "vision":
        return
    yield lambda: compare_forward_and_gradients(kind, eager, ours, "right")
    if kind == "causal":
        yield lambda: compare_forward_and_gradients(kind, eager, ours, "left")
    if kind != "encoder":
        yield lambda: compare_generated(kind, eager, ours, "dynamic")
        yield lambda: compare_generated(kind, eager, ours, "static")
    if kind == "causal" and types.accepts(eager, "position_ids"):
        yield lambda: compare_packed(eager, ours, "positions")
        if eager.config.model_type not in lists.MIXED:
            yield lambda: compare_packed(eager, ours, "offsets")


def pair(kind: str, name: str) -> tuple[Any, Any]:
    """A type's model on ``eager`` and on our attention.

    Raises:
        Unbuildable: also for a model that does not run on ``eager``.
        SpecError: for a model that is refused at construction.
    """
    ours = types.model(kind, name, huggingface.NAME)
    eager = types.model(kind, name, "eager")
    try:
        with torch.no_grad():
            logits(eager, **inputs(kind, eager, None)[0])
    except Exception as error:
        raise types.Unbuildable(f"{type(error).__name__}: {error}") from error
    return eager, ours


def small(kind: str, name: str) -> tuple[Any, Any] | None:
    """The pair of a type; None if the lists say that it is refused by name or cannot be built."""
    known = lists.UNBUILDABLE.get(f"{kind} {name}")
    try:
        made = pair(kind, name)
    except SpecError as error:
        assert "computes attention in its own code" in str(error)
        assert known is None, "this type is refused: take it off the list UNBUILDABLE"
        return None
    except types.Unbuildable as error:
        if known is None and transformers.__version__ != lists.VERSION:
            pytest.skip(f"the lists are of transformers {lists.VERSION}: {error}")
        assert known is not None, f"neither on the list UNBUILDABLE nor built: {error}"
        return None
    assert known is None, "this type can be built and run: take it off the list UNBUILDABLE"
    return made


@pytest.mark.parametrize(("kind", "name"), types.CASES, ids=[f"{kind}-{name}" for kind, name in types.CASES])
def test_a_type_is_right_or_refused(kind: str, name: str) -> None:
    """Logits, gradients, generated tokens and packed rows equal ``eager``, or an error at construction says why
    not."""
    made = small(kind, name)
    if made is None:
        return
    for trial in trials(kind, *made):
        trial()


def test_the_lists_name_only_existing_types() -> None:
    if transformers.__version__ != lists.VERSION:
        pytest.skip(f"the lists are of transformers {lists.VERSION}")
    known = {f"{kind} {name}" for kind, name in types.CASES}
    assert set(lists.UNBUILDABLE) <= known
    assert {f"causal {name}" for name in lists.MIXED} <= known
    assert all(lists.UNBUILDABLE.values()) and len(lists.UNBUILDABLE) < len(known) / 8
