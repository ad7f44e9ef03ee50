"""Suggest the right name for a setting that does not exist."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import yaml

OTHER_NAMES = Path(__file__).parent / "other_names.yaml"


def setting_for(name: str) -> str:
    """Return a sentence that names the setting for one of another program; "" if it is not known."""
    leaf = name.rpartition(".")[2]
    if leaf.endswith("dropout"):
        return " Leave it out: with dropout, the policy that is trained would not be the one that sampled."
    if leaf in ("partition", "account", "qos", "constraint", "reservation"):
        return f" Write export SBATCH_{leaf.upper()}=NAME into slurm/site.env."
    table = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
    elsewhere = {one: setting for setting, names in table.items() for one in names.split(", ")}
    meant = elsewhere.get(name) or elsewhere.get(leaf)
    return f" Write {meant}." if meant else ""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a sentence that names the nearest known name: the same key of another section, or the closest one."""
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == name.rpartition(".")[2]]
    lower_case = {candidate.lower(): candidate for candidate in known}
    close = same_leaf or difflib.get_close_matches(name.lower(), lower_case, n=1, cutoff=0.6)
    return f" Did you mean {lower_case.get(close[0], close[0])}?" if close else ""
