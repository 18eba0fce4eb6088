"""The list of what a wheel needs (SBOM), as a CycloneDX 1.6 document. ``tools/sbom_hook.py`` puts it into every wheel.

A wheel pins nothing, so a component has no version: it has the requirements that the metadata of the wheel declares.
The document depends on the declarations alone, so that the same sources make the same wheel.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENT = "attn-core:requirement"
"""The name of a component's property: a requirement, as the wheel's metadata declares it. Each extra has its own."""


def document(
    name: str, version: str, about: dict[str, str], dependencies: list[str], optional: dict[str, list[str]]
) -> dict[str, Any]:
    """Returns the SBOM of one package as plain data.

    Args:
        name: of the package, such as ``"attn-core"``.
        version: of the package.
        about: its ``description``, ``license`` (an SPDX expression) and ``supplier``.
        dependencies: the requirements that every installation has, such as ``"numpy>=1.26"``.
        optional: the requirements of each extra. They have the scope "optional", unless ``dependencies`` has the same
            package.
    """
    root = purl(name, version)
    components: dict[str, dict[str, Any]] = {}
    for extra, requirements in [("", dependencies), *sorted(optional.items())]:
        for text in requirements:
            add(components, Requirement(text), extra)
    contents: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": root,
                "supplier": {"name": about["supplier"]},
                "name": name,
                "version": version,
                "description": about["description"],
                "licenses": [{"expression": about["license"]}],
                "purl": root,
            }
        },
        "components": [components[package] for package in sorted(components)],
        "dependencies": [
            {"ref": root, "dependsOn": [purl(package) for package in sorted(components)]},
            *({"ref": purl(package)} for package in sorted(components)),
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(contents, sort_keys=True))  # the same for the same contents
    return contents | {"serialNumber": f"urn:uuid:{serial}"}


def add(components: dict[str, dict[str, Any]], requirement: Requirement, extra: str) -> None:
    """Adds a requirement of an extra to the components; ``""`` is what every installation has."""
    package = canonicalize_name(requirement.name)
    component = components.setdefault(
        package,
        {
            "type": "library",
            "bom-ref": purl(package),
            "name": package,
            "scope": "optional" if extra else "required",
            "purl": purl(package),
            "properties": [],
        },
    )
    if extra:
        others = f"({requirement.marker}) and " if requirement.marker else ""
        requirement.marker = Marker(f'{others}extra == "{extra}"')
    component["properties"].append({"name": REQUIREMENT, "value": str(requirement)})


def purl(package: str, version: str = "") -> str:
    """Returns the address of a package for tools (package URL)."""
    return f"pkg:pypi/{canonicalize_name(package)}" + (f"@{version}" if version else "")
