"""Every error that Octet raises on purpose.

    OctetError
    ├── ConfigError      (ValueError)  a setting: key, value seen, why not, what to write instead
    ├── DataError        (ValueError)  a data set, a record, a file of completions
    ├── RewardError      (ValueError)  a reward function that a user wrote
    ├── ModelError       (ValueError)  a model or tokenizer that cannot be had or cannot be used
    ├── CheckpointError                a checkpoint that is missing, half-written or of another run
    ├── TrainingError                  training that must not go on: non-finite loss, adapter that never moved
    ├── ClusterError                   ranks that do not find each other, a job that Slurm refuses
    │   └── LostRank                   a rank that died or stopped to answer in the course of a run
    └── Interrupted                    no error: the run was told to stop, has saved everything, and can go on

The command line prints the message and ends with the error's status, 2; `--debug` adds the traceback.
What a *model* wrote never raises: it scores 0 and is counted.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class OctetError(Exception):
    """Base of all of them: the message is meant for the person who started the run."""

    status = 2  # of the process that ends with it
    is_of_all = False

    def of_all(self) -> OctetError:
        """The same one: every rank ends with it, so rank 0 says it and the others need not."""
        self.is_of_all = True
        return self


class ConfigError(OctetError, ValueError):
    pass


class DataError(OctetError, ValueError):
    pass


class RewardError(OctetError, ValueError):
    pass


class ModelError(OctetError, ValueError):
    pass


class CheckpointError(OctetError):
    pass


class TrainingError(OctetError):
    pass


class ClusterError(OctetError):
    pass


class LostRank(ClusterError):
    status = 76  # job scripts try again, because a node may be to blame


class Interrupted(OctetError):
    status = 75  # "try again later" of sysexits.h: job scripts ask for another start when they see it


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A sentence that names the nearest real one: the same last word in another section, else the closest spelling."""
    leaf = name.rpartition(".")[2]
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    close = same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""
