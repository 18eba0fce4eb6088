"""Advice on an installation: known-bad combinations of packages, and what to install next and why.

Everything here but ``find_machine`` is a pure function of a ``Machine``, so every GPU can be tested on a laptop.
"""

from attn_core.cli.advice.advise import Advice, advise
from attn_core.cli.advice.machine import Machine, find_machine
from attn_core.cli.advice.problems import Problem, problems

__all__ = ["Advice", "Machine", "Problem", "advise", "find_machine", "problems"]
