"""The errors that Octet raises for its users.

The command line prints the message and exits with the error's status, usually 2; `--debug` adds the traceback.
Text written by a *model* never raises: it scores 0 and is counted.
"""

import re
from dataclasses import dataclass
from typing import Literal


class OctetError(Exception):
    """Base class of errors whose message is for the person who started the run. `named` is the culprit as the user
    writes it: `rollout.group_size=1`, `--out FOLDER`, or a path. An error without a culprit is a single text."""

    status = 2  # exit status of the command
    is_of_all = False  # True if every rank raises it, so that only rank 0 prints it

    def __init__(self, named: object, reason: str = "", remedy: str = "") -> None:
        culprit = str(named) if reason or remedy else ""
        parts = re.fullmatch(r"([\w.]+(?==)|--[\w-]+)[= ](.*)", culprit, re.DOTALL)
        self.key, self.value = parts.groups() if parts else (culprit, "")
        self.reason, self.remedy = reason, remedy
        start = f"{named}:" if reason else f"{named} cannot be used." if remedy else named
        sentences = [part if part[-1] in ".?" else f"{part}." for part in (reason, remedy) if part]
        super().__init__(" ".join([str(start), *sentences]))

    def of_all(self) -> "OctetError":
        """Mark the error as one that every rank raises, and return it."""
        self.is_of_all = True
        return self


class ConfigError(OctetError, ValueError): ...  # a setting: its key and value, the reason, and what to write instead


class DataError(OctetError, ValueError): ...  # a data set, a record, a file of completions


class RewardError(OctetError, ValueError): ...  # a reward function of the user


class ModelError(OctetError, ValueError): ...  # a model or tokenizer that cannot be found or used


class CheckpointError(OctetError): ...  # a checkpoint that is missing, incomplete or from another run


class MergeError(OctetError):  # a merged model that differs from the trained model
    status = 1  # everything was written, but it is wrong


class TrainingError(OctetError): ...  # training that must not continue: non-finite loss, adapter that never changed


class EndedByAlarm(TrainingError):  # an alarm about the health of a run, with run.strict_health=true
    status = 5  # training works, but something is wrong with what it learns; NotLearned has 3 and 4


class NotLearned(OctetError):  # a complete run that has not learned, with run.strict_verdict=true
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ClusterError(OctetError): ...  # ranks that cannot connect, a job that Slurm refuses


class LostRank(ClusterError):  # a rank that died or stopped responding during a run
    status = 76  # job scripts requeue the job, because a node may be the cause


class Interrupted(OctetError):  # no error: the run was asked to stop, has saved everything, and can continue
    status = 75  # EX_TEMPFAIL of sysexits.h; job scripts requeue the job


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check of the machine, the settings or a run. A note needs no action, a warning names a remedy,
    and with `end` a run cannot start or continue."""

    severity: Literal["note", "warn", "end"]
    name: str
    seen: str
    remedy: str = ""
    why: str = ""

    @classmethod
    def of(cls, severity: Literal["warn", "end"], name: str, text: str) -> "Finding":
        """Return a finding whose remedy begins with the second sentence of a text."""
        return cls(severity, name, *re.split(r"\. (?=[A-Z`])", text, maxsplit=1))

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(part for part in (f'{self.seen}.', self.why, self.remedy) if part)}"


def counted(number: int, noun: str) -> str:
    """Return `1 step`, or `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
