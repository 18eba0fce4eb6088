"""FlashAttention 3's forward operator as a program that XLA runs without Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attn_core.backends.shared import dry_run, operator_library
from attn_core.backends.shared.flash3_operators import operators
from attn_core.backends.shared.kernel_programs import Buffer, KernelProgram, Place, Unrecordable, operator_step
from attn_core.call.spec import AttentionSpec


def refusals(spec: AttentionSpec, device: str) -> Iterator[str]:
    """Yields why a supported call has no program: torch operations around its kernel, or the library is missing."""
    if device != "sm90":
        yield f"{device}: proven on sm90 only"
    if spec.paged is not None:
        yield "keys and values in pages: torch operations make tables safe before the kernel"
    if spec.sinks:
        yield "sinks: added by torch operations after the kernel"
    if spec.needs_backward:
        yield "gradients: only the forward has been proven, as no installed build has a backward"
    library = operator_library.missing()
    if library is not None:
        yield library


def program(spec: AttentionSpec, settings: Mapping[str, Any], as_one: bool) -> KernelProgram:
    """Returns the program of a forward at the kernel's widths.

    Args:
        settings: the operator's arguments that are no tensors, by name.

    Raises:
        Unrecordable: for a call that the operator cannot express.
    """
    if as_one:
        raise Unrecordable("q, k and v in one array: a callback reads them in place")
    operator = operators().forward
    offsets = ("cu_seqlens_q", "cu_seqlens_k") if spec.packed else ()
    buffers = [Buffer(name, shape, spec.dtype) for name, shape in zip("qkv", dry_run.shapes(spec), strict=True)]
    buffers += [Buffer(name, ((spec.documents or 0) + 1,), "int32") for name in offsets]
    buffers.append(Buffer("out", spec.out_shape, spec.dtype))
    places = {buffer.name: number for number, buffer in enumerate(buffers)}
    writes: tuple[int, ...] = (places["out"],)
    copied: dict[int, int] = {}
    if spec.return_lse:  # the operator returns it as its second result, and a copy takes a kernel of its own
        buffers.append(Buffer("lse", spec.lse_shape, "float32"))
        writes, copied = (places["out"], len(buffers) - 1), {1: len(buffers) - 1}
    schema = operator._schema
    arguments = [
        Place(places[each.name]) if each.name in places else settings.get(each.name, each.default_value)
        for each in schema.arguments
    ]
    reads = tuple(place for name, place in places.items() if name != "out")
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return KernelProgram(tuple(buffers), (operator_step(name, tuple(arguments), reads, writes, copied),))
