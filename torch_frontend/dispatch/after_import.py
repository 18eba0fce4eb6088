"""after_import: runs a function once somebody imports a module, without importing the module.

Some parts of torch want to know about attention: its compiler and its counter of FLOPs. They take seconds to import,
and most processes use neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], None]) -> None:
    """Runs ``action`` now if the module ``name`` is imported already, else directly after its import.

    An error of ``action`` is an error of the import.
    """
    if name in sys.modules:
        action()
    else:
        # First, because the finders behind it find the module and would end the search.
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, and runs an action after the module's own code."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # those before have passed; to ask them would recurse
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in behind)), None)
        if spec is not None and spec.loader is not None:
            self._run_after(spec.loader)
        return spec

    def _run_after(self, loader: Any) -> None:
        """Makes a loader run the action after its module."""
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            # Looking for a spec is no import, so the finder stays until the module has run.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        loader.exec_module = exec_module
