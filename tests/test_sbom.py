"""The software bill of materials lists what constraints.txt installs."""

import json
import re
import sys

from scripts import make_sbom
from tests.conftest import ROOT, launch


def test_the_bill_lists_every_package_of_the_lock():
    document = json.loads(launch(sys.executable, "-m", "scripts.make_sbom").stdout)
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    listed = {f"{one['name']}=={one['version']}" for one in document["components"]}
    assert listed == set(re.findall(r"^[\w.-]+==[^\s;#]+", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    references = [one["bom-ref"] for one in document["components"]]
    assert len(references) == len(set(references)) > 80
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", one["purl"]) for one in document["components"])


def test_a_condition_of_a_version_is_kept():
    (found,) = make_sbom.components('Py.YAML_x==6.0 ; python_version < "3.11"  # why\n')
    assert (found["purl"], found["version"]) == ("pkg:pypi/py-yaml-x@6.0", "6.0")
    assert found["properties"][0]["value"] == 'python_version < "3.11"'
