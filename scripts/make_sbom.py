"""Print a software bill of materials (CycloneDX 1.6, JSON) of the packages in constraints.txt.

python -m scripts.make_sbom > sbom.json
"""

import json
import re
from pathlib import Path
from typing import Any

import trainer

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


def components(constraints: str) -> list[dict[str, Any]]:
    """Return a component for each package and version. The condition behind a version is one of its properties."""
    found = []
    for line in filter(None, (line.partition("#")[0].strip() for line in constraints.splitlines())):
        requirement, _, condition = (part.strip() for part in line.partition(";"))
        name, version = requirement.split("==")
        url = f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{version}"
        component: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
        if condition:
            component["properties"] = [{"name": "octet:condition", "value": condition}]
        found.append(component)
    return found


def document() -> dict[str, Any]:
    own = {"type": "application", "name": "octet-grpo", "version": trainer.__version__}
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": own}}
    return {**head, "components": components(CONSTRAINTS.read_text())}


if __name__ == "__main__":
    print(json.dumps(document(), indent=2))
