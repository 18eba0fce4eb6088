"""Puts the list of what the wheel needs (SBOM) into ``.dist-info/sboms`` of every wheel that hatchling builds."""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SbomHook(BuildHookInterface):
    """Writes the SBOM to a temporary folder before the build, and removes the folder after it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        core = self.metadata.core
        # A build has no path to the packages of the project, so the file is run by its name.
        document = runpy.run_path(str(Path(self.root) / "tools/sbom.py"))["document"]
        about = {
            "description": core.description,
            "license": core.license_expression,
            "supplier": core.authors_data["name"][0],
        }
        sbom = document(core.name, self.metadata.version, about, core.dependencies, core.optional_dependencies)
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / f"{core.name}.cdx.json"
        path.write_text(json.dumps(sbom, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()
