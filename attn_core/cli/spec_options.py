"""The command-line options that describe an attention call, their conversion to a spec, and errors in their words."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import wraps
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
import typer

from attn_core import masks
from attn_core.backends.support import half_dtype
from attn_core.call.arguments import ONE_ROW, ArrayFacts, Arrays, build_spec
from attn_core.call.functions import named, trace
from attn_core.call.key_ranges import check_values
from attn_core.call.options import HEADS_FIRST_HINT, OPTIONS, PLAIN, Option, Options, check_options
from attn_core.call.segments import Segments, Visible, without_segments
from attn_core.call.seq_info import SeqInfo, check_cu_seqlens
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from attn_core.selection.choice import wrapped

SHAPE, CHOICE, DOCUMENTS = "Shapes", "Attention options", "Packed documents"

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
"""Short words for dtypes."""


class Defaults(NamedTuple):
    """The dtype and the number of tokens in a row of a call that states neither."""

    dtype: str
    length: int


ON_CPU = Defaults("float32", 128)


def defaults_on(device: str) -> Defaults:
    """Returns the defaults on a device. Most GPU kernels take no float32, and calls on a GPU are rarely short."""
    return ON_CPU if device == "cpu" else Defaults(half_dtype(device), 2048)


def _option(*names: str, panel: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The options that say the shapes of a call."""

    heads: Annotated[int, _option(panel=SHAPE, help="Query heads.")] = 8
    kv_heads: Annotated[int | None, _option(panel=SHAPE, help="Key/value heads. Default: --heads.")] = None
    head_dim: Annotated[int, _option(panel=SHAPE, help="Channels of q and k.")] = 64
    value_dim: Annotated[int | None, _option(panel=SHAPE, help="Channels of v. Default: --head-dim.")] = None
    q_len: Annotated[
        int | None, _option(panel=SHAPE, help="Queries in a row. Default: 128, in explain on a GPU 2048.")
    ] = None
    kv_len: Annotated[int | None, _option(panel=SHAPE, help="Keys in a row. Default: --q-len.")] = None
    batch: Annotated[int, _option(panel=SHAPE, help="Number of rows.")] = 1
    dtype: Annotated[
        str | None,
        _option(
            panel=SHAPE,
            help="fp64, fp32, bf16 or fp16. Default: fp32; in explain and compare bf16 on a GPU, fp16 before sm80.",
        ),
    ] = None


def _field_of(option: Option) -> tuple[str, Any, Any]:
    """Returns the dataclass field of an option of ``attention`` that is a flag or a number."""
    flags = (_dashed(option.name),) if option.kind == "bool" else ()
    note = " Write W, or LEFT,RIGHT such as 5,none." if option.name == "window" else ""
    described = _option(*flags, panel=CHOICE, help=option.meaning + note)
    return option.name, Annotated[_TYPES[option.kind], described], option.default


_TYPES = {"bool": bool, "str": str, "float": float, "float | None": float | None, "str | None": str | None}
_TYPES["Window"] = str | None


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


_Choices = make_dataclass(
    "_Choices", [_field_of(each) for each in OPTIONS if each.name in PLAIN], bases=(_Sizes,), frozen=True, kw_only=True
)


@dataclass(frozen=True, kw_only=True)
class SpecOptions(_Choices):  # type: ignore[misc, valid-type]
    """The options of a command that describe a call. ``spec`` builds an AttentionSpec from them."""

    mask: Annotated[bool, _option("--mask", panel=CHOICE, help="Add a random mask (batch, 1, q_len, kv_len).")] = False
    padding: Annotated[bool, _option("--padding", panel=CHOICE, help="Add a mask of keys (batch, 1, 1, kv_len).")] = (
        False
    )
    segment_ids: Annotated[
        bool, _option("--segment-ids", panel=CHOICE, help="Add q_segment_ids (batch, q_len), and kv_segment_ids.")
    ] = False
    key_ranges: Annotated[
        str | None,
        _option(panel=CHOICE, help="A mask of attn_core.masks, e.g. 'shared_prefix(4, [3, 3])'; sets --q-len."),
    ] = None
    bias: Annotated[bool, _option("--bias", panel=CHOICE, help="Add a bias (1, heads, q_len, kv_len).")] = False
    alibi: Annotated[bool, _option("--alibi", panel=CHOICE, help="Add ALiBi slopes, one per head.")] = False
    sinks: Annotated[bool, _option("--sinks", panel=CHOICE, help="Add an attention sink for each head.")] = False
    backward: Annotated[bool, _option("--backward", panel=CHOICE, help="Require gradients.")] = False
    documents: Annotated[
        int | None, _option(panel=DOCUMENTS, help="Pack this many documents of about equal length in one row.")
    ] = None
    lengths: Annotated[str | None, _option(panel=DOCUMENTS, help="Query length of each document, e.g. 3,4,5.")] = None
    kv_lengths: Annotated[
        str | None, _option(panel=DOCUMENTS, help="Key length of each document. Default: --lengths.")
    ] = None
    cu_seqlens: Annotated[
        str | None, _option(panel=DOCUMENTS, help="Cumulative lengths instead of lengths, such as 0,3,7,12.")
    ] = None

    def filled(self, defaults: Defaults) -> SpecOptions:
        """Returns the options with a dtype and, unless the documents have lengths, a number of queries."""
        given = (self.q_len, self.lengths, self.cu_seqlens, self.key_ranges)
        has_lengths = any(value is not None for value in given)
        dtype = defaults.dtype if self.dtype is None else DTYPES.get(self.dtype, self.dtype)
        changed: dict[str, Any] = {"dtype": dtype, "q_len": self.q_len if has_lengths else defaults.length}
        return replace(self, **changed)

    def seq_info(self) -> SeqInfo | None:
        """Returns the packed documents with numpy offsets, or None.

        Raises:
            SpecError, ShapeError: if the options contradict each other or do not describe documents.
        """
        named = [n for n in ("documents", "lengths", "cu_seqlens") if getattr(self, n) is not None]
        if len(named) > 1:
            raise SpecError(f"{' and '.join(_dashed(n) for n in named)}: expected only one of these options")
        if self.kv_lengths is not None and named != ["lengths"]:
            raise SpecError("--kv-lengths: expected --lengths as well, with as many documents")
        if self.lengths is not None:
            keys = None if self.kv_lengths is None else _ints("--kv-lengths", self.kv_lengths)
            return SeqInfo.from_lengths(_ints("--lengths", self.lengths), keys)
        if self.cu_seqlens is not None:
            numbers, limit = _ints("--cu-seqlens", self.cu_seqlens), int(np.iinfo(np.int32).max)
            if max(map(abs, numbers)) > limit:
                raise SpecError(f"--cu-seqlens={self.cu_seqlens}: expected offsets of at most {limit}")
            offsets = np.asarray(numbers, np.int32)
            # The largest int32 as a limit: the longest document follows from these offsets.
            check_cu_seqlens(offsets, limit, side="q")
            return SeqInfo.from_lengths(np.diff(offsets).tolist())
        if self.documents is None:
            return None
        if self.documents < 1:
            raise SpecError(f"--documents={self.documents}: expected at least 1")
        parts = (np.array_split(range(tokens), self.documents) for tokens in self._lengths())
        return SeqInfo.from_lengths(*([len(part) for part in each] for each in parts))

    def ranges(self) -> np.ndarray | None:
        """Returns the key ranges, or None. Raises SpecError if the text is no call of a constructor."""
        return None if self.key_ranges is None else _key_ranges(self.key_ranges)

    def _lengths(self) -> tuple[int, int]:
        ranges = self.ranges()
        tokens = ON_CPU.length if ranges is None else ranges.shape[2]
        queries = tokens if self.q_len is None else self.q_len
        return queries, queries if self.kv_len is None else self.kv_len

    def spec(self, device: str = "cpu", *, needs_backward: bool = False) -> AttentionSpec:
        """Builds the call's spec. An option that is missing has its default of ON_CPU.

        Raises:
            SpecError: if the options do not describe a call.
        """
        dtype, seq_info = str(self.filled(ON_CPU).dtype), self.seq_info()
        q_len, kv_len = self._lengths()
        if seq_info is not None:
            q_len, kv_len = int(seq_info.cu_seqlens_q[-1]), int(seq_info.cu_seqlens_k[-1])
            for name, requested, sum_of in (("--q-len", self.q_len, q_len), ("--kv-len", self.kv_len, kv_len)):
                if requested is not None and requested != sum_of:
                    raise SpecError(f"{name}={requested}: expected the documents' {sum_of} tokens; leave {name} out")

        def facts(*shape: int, dtype: str = dtype) -> ArrayFacts:
            return ArrayFacts(shape, dtype, device)

        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        offsets = None if seq_info is None else facts(len(seq_info.cu_seqlens_q), dtype="int32")
        ranges, has_mask = self.ranges(), self.mask or self.padding
        if ranges is not None:
            check_values(ranges, q_len)
        if self.mask and self.padding:
            raise SpecError("--mask and --padding: expected only one of these options")
        arrays = Arrays(
            q=facts(self.batch, q_len, self.heads, self.head_dim),
            k=facts(self.batch, kv_len, kv_heads, self.head_dim),
            v=facts(self.batch, kv_len, kv_heads, value_dim),
            mask=facts(self.batch, 1, q_len if self.mask else 1, kv_len, dtype="bool") if has_mask else None,
            bias=facts(1, self.heads, q_len, kv_len) if self.bias else None,
            alibi_slopes=facts(self.heads, dtype="float32") if self.alibi else None,
            sinks=facts(self.heads, dtype="float32") if self.sinks else None,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            key_ranges=None if ranges is None else facts(*ranges.shape, dtype="int32"),
        )
        options = Options(**{name: getattr(self, name) for name in PLAIN})._replace(window=_window(self.window))
        if seq_info is not None:
            options = options._replace(max_len_q=seq_info.max_len_q, max_len_k=seq_info.max_len_k)
        if self.segment_ids:
            mask_mod, ids = _segments(arrays, seq_info)
            arrays = arrays._replace(**named([facts(*each.shape, dtype="int32") for each in ids]))
            options = options._replace(mask_mod=mask_mod)
        return build_spec(arrays, check_options(options), needs_backward=self.backward or needs_backward)


def _segments(arrays: Arrays, seq_info: SeqInfo | None) -> tuple[Any, tuple[Any, ...]]:
    """Returns the mask function of segment ids, and one array of them if queries and keys are equally many, else two.

    Raises:
        SpecError: beside packed documents.
    """
    shapes = arrays.q.shape, arrays.k.shape
    queries, keys = (np.broadcast_to(np.int32(0), shape[:2]) for shape in shapes)  # of any length without memory
    ids = Segments(queries, queries if keys.shape == queries.shape else keys)
    visible = without_segments(ids, Visible(False, None, None, ()), shapes, {"seq_info": seq_info})
    mask_mod, _, aux = trace(visible.mask_mod, None, ())
    return mask_mod, aux


def takes_spec(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: adds every field of SpecOptions as an option, and passes a SpecOptions as first argument."""
    hints = get_type_hints(SpecOptions, include_extras=True)
    names = [field.name for field in fields(SpecOptions)]
    # Without the first parameter: it is the SpecOptions, which its fields replace on the command line.
    of_command = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(SpecOptions)
    ]
    parameters = [*shared, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in of_command)]

    @wraps(command)
    def run(**values: Any) -> None:
        command(SpecOptions(**{name: values.pop(name) for name in names}), **values)

    del run.__wrapped__  # type: ignore[attr-defined]  # typer would read the wrapped command's signature instead
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _ints(name: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SpecError(f"{name}={text!r}: expected whole numbers separated by commas, such as 3,4,5") from None


def _window(text: str | None) -> Any:
    """Converts ``"W"`` to an int and ``"LEFT,RIGHT"`` to a pair. ``none`` or an empty word leaves a side unbounded."""
    if text is None or text.lower() == "none":
        return None
    words = [word.strip().lower() for word in text.split(",")]
    try:
        sides = tuple(None if word in ("", "none") else int(word) for word in words)
    except ValueError:
        raise SpecError(f"--window={text!r}: expected W, or LEFT,RIGHT such as 5,0 or none,3") from None
    # check_options refuses three or more, with the option's name.
    return sides[0] if len(sides) == 1 else sides


def _key_ranges(text: str) -> np.ndarray:
    """Returns what a call of a constructor of ``attn_core.masks`` with literals gives: ``"prefix_lm(3, 64)"``."""
    expected = f"--key-ranges={text[:200]!r}: expected a call such as 'shared_prefix(4, [3, 3])'"
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpecError(f"{expected}, got no Python expression") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in masks.__all__:
        raise SpecError(f"{expected}, of one of {', '.join(masks.__all__)}")
    try:
        arguments = [ast.literal_eval(each) for each in call.args]
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise SpecError(f"{expected}, whose arguments are numbers, lists, True, False or None") from None
    try:
        ranges: np.ndarray = getattr(masks, call.func.id)(*arguments, **keywords)
    except TypeError as error:  # too many arguments, or too few
        raise SpecError(f"{expected}: {error}") from None
    return ranges


# Errors in the words of a command

_WORDS = {
    HEADS_FIRST_HINT: "change --heads or --kv-heads",
    "cast q, k and v to one of them": "name one by --dtype",
    f"reshape to {ONE_ROW} if no row has padding, else unpad(attention_mask, q, k, v)": "leave --batch out",
    "seq_info: expected None with q_segment_ids": "--segment-ids: expected no packed documents",
    "seq_info.cu_seqlens_q:": "--cu-seqlens:",
    "lengths_q:": "--lengths:",
    "lengths_k:": "--kv-lengths:",
    "None is unbounded": "none is unbounded",
    "None switches it off": "leave it out to switch it off",
    "None gives": "leave it out for",
}
"""What the library says about its arguments -> the same about options of a command."""


def complain(message: object) -> None:
    """Prints an error to stderr, in lines of at most 80 columns."""
    for line in f"attn: {message}".splitlines():
        typer.echo(wrapped(line), err=True)


def in_options(message: object, names: Iterable[str]) -> str:
    """Returns a message of the library in the words of a command: ``causal=True`` is ``--causal`` there.

    Args:
        names: of the command's parameters.
    """
    text = str(message)
    for words, ours in _WORDS.items():
        text = text.replace(words, ours)

    def option(found: re.Match[str]) -> str:
        name, value = "--" + found[1].replace("_", "-"), found[2]
        if value == "True":
            return name
        return f"{name}={value.strip('()').replace(' ', '').replace('None', 'none')}"

    return re.sub(rf"(?<![-\w.])({'|'.join(names)})=(True\b|\([^()]*\)|)", option, text)
