"""Interrupted: carries a Ctrl-C from inside a callback of the bridge to the user's own code."""

from __future__ import annotations

import _thread

from attn_core.errors import BridgeError


class Interrupted(BridgeError):
    """The error that a callback raises instead of KeyboardInterrupt, which XLA would turn into an ordinary error.

    XLA reads the message and drops the error object. Its ``__del__`` then interrupts the main thread, which raises
    KeyboardInterrupt as soon as it runs Python code again: after the program that called back has failed. The
    interruption cannot come sooner, because the Python code that builds the message would raise it, and it would be
    lost.
    """

    def __init__(self) -> None:
        super().__init__("interrupted by Ctrl-C inside attention; KeyboardInterrupt follows")

    # Written in C and called without self. A function in Python would raise KeyboardInterrupt itself.
    __del__ = _thread.interrupt_main
