"""Ctrl-C inside a callback of the bridge, brought to the user's own code."""

from __future__ import annotations

import _thread

from attn_core.errors import BridgeError


class Interrupted(BridgeError):
    """What a callback raises instead of KeyboardInterrupt, of which XLA would make an error like any other.

    XLA reads the message and drops the error. Then the error interrupts the main thread, which raises KeyboardInterrupt
    as soon as it runs Python code again: when the program that called back has failed. The interruption cannot come
    sooner, because Python code that makes the message would raise it and lose it.
    """

    def __init__(self) -> None:
        super().__init__("interrupted by Ctrl-C inside attention; KeyboardInterrupt follows")

    # Written in C and called without self. A function in Python would raise KeyboardInterrupt itself.
    __del__ = _thread.interrupt_main
