"""Text in lines of at most 80 columns, the usual width of a terminal."""

from __future__ import annotations

import re
from textwrap import fill

COLUMNS = 80
COMMAND = re.compile(r"pip install '[^']*'( --[a-z-]+)*")
NO_BREAK = "\N{NO-BREAK SPACE}"


def wrapped(line: str, indent: str = "", hanging: str = "") -> str:
    """Returns a line broken at spaces to 80 columns. Commands, and words such as a path, stay whole for copying."""
    whole = COMMAND.sub(lambda command: command[0].replace(" ", NO_BREAK), line)
    lines = fill(
        whole,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(NO_BREAK, " ")
