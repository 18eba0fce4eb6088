"""What an error of a kernel says about its call: the backend and the sizes, and the remedy if memory ran out."""

from __future__ import annotations

import sys

MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "resource_exhausted")
"""Words of torch, its CPU allocator and XLA, in lower case, in errors of exhausted memory."""

MEMORY_REMEDY = "memory ran out: docs/how_to/out_of_memory.md says what a call needs and what helps"
SHARED_GPU = "JAX reserves 75 % of a GPU when it starts; set XLA_PYTHON_CLIENT_PREALLOCATE=false before its first use"


def note_call(error: BaseException, name: str) -> None:
    """Adds a note with the call to an error of its kernel, once. The error keeps its type and its words.

    Args:
        name: the call's ``range_name``, which begins with the backend.
    """
    for note in notes_of(error, name):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def notes_of(error: BaseException, name: str) -> tuple[str, ...]:
    """Returns the notes of an error of a call's kernel."""
    notes: tuple[str, ...] = (f"in the call {name}",)
    if is_out_of_memory(error):
        notes += (MEMORY_REMEDY,)
        if "jax" in sys.modules and "cuda" in str(error).lower():
            notes += (SHARED_GPU,)
    return notes


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error says that memory ran out, of the host or of a device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(word in text for word in MEMORY_WORDS)
