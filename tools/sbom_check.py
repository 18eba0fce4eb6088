"""Checks the list of what a wheel needs (SBOM): ``python -m tools.sbom_check WHEEL COPY``. ``make release-check`` runs
it in an environment that has the packages of the extra release.

The wheel must have one SBOM; CycloneDX's schema must accept it; it must name the package, the version and every
requirement of the wheel's metadata, and nothing else. A copy of it is written for the release.
"""

from __future__ import annotations

import json
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.sbom import REQUIREMENT


def differences(sbom: dict[str, Any], metadata: Message) -> list[str]:
    """Returns what an SBOM says otherwise than the metadata of its wheel: one sentence for each difference."""
    found = []
    component = sbom["metadata"]["component"]
    for key, field in (("name", "Name"), ("version", "Version")):
        if component.get(key) != metadata[field]:
            found.append(f"the SBOM is of {key} {component.get(key)}, the wheel of {metadata[field]}")
    declared = {str(Requirement(text)) for text in metadata.get_all("Requires-Dist", [])}
    listed = set()
    for part in sbom["components"]:
        texts = [one["value"] for one in part["properties"] if one["name"] == REQUIREMENT]
        listed |= set(texts)
        required = any("extra ==" not in text for text in texts)
        if part["scope"] != ("required" if required else "optional"):
            found.append(f"{part['name']} has the scope {part['scope']}, and the metadata has {texts}")
        if {canonicalize_name(Requirement(text).name) for text in texts} != {part["name"]}:
            found.append(f"{part['name']} has the requirements {texts}")
    found += [f"the SBOM lacks {text}" for text in sorted(declared - listed)]
    found += [f"the SBOM has {text}, the metadata does not" for text in sorted(listed - declared)]
    (root, *_) = [entry for entry in sbom["dependencies"] if entry["ref"] == component["bom-ref"]]
    missing = {part["bom-ref"] for part in sbom["components"]} ^ set(root["dependsOn"])
    return found + [f"the dependencies of the package and the components differ in {ref}" for ref in sorted(missing)]


def read(wheel: Path) -> tuple[str, Message]:
    """Returns the text of the one SBOM in a wheel, and the wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        sboms = [name for name in names if ".dist-info/sboms/" in name]
        assert len(sboms) == 1, f"the wheel has {len(sboms)} SBOMs: {sboms}"
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        return archive.read(sboms[0]).decode(), message_from_bytes(archive.read(metadata))


def main(wheel: Path, copy: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text, metadata = read(wheel)
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert error is None, f"the schema of CycloneDX 1.6 refuses the SBOM: {error}"
    found = differences(json.loads(text), metadata)
    assert not found, "\n".join(found)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
