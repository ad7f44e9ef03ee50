"""The versions of the policy that vLLM engines read from disk.

vLLM identifies an adapter by its name and path, not by its content: if either is reused, it answers with status 200 and
the tokens of the old policy. So every version gets a new folder and a new name.
"""

import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.machine import disk
from trainer.plan.planner import ADAPTERS
from trainer.ranks import distributed
from trainer.rollout.interface import Exportable
from trainer.run_folder import lock

MODE = "processed_logprobs"  # log-probs of the distribution that is sampled from, including the temperature
# A new adapter is loaded before the old one is removed. With a single slot it would replace the old one, which is right
# only if no request for the old one is in flight. The memory plan counts this number of adapters.
SLOTS = ADAPTERS


@dataclass(frozen=True, slots=True)
class Published:
    """One version of the policy on disk."""

    name: str
    path: Path
    version: int | None


class Publisher:
    """Writes versions of the policy into a folder, and deletes each one version late: vLLM may read it until then."""

    def __init__(self, folder: Path) -> None:
        run = f"octet-{secrets.token_hex(4)}"  # random, because a restarted run must not reuse earlier names
        self.run, place = distributed.gather((run, str(folder.resolve())))[0]
        self.folder = Path(place)
        self._kept: list[Published] = []
        self._count = 0
        if distributed.is_main() and lock.is_ours(folder.parent):
            shutil.rmtree(self.folder, ignore_errors=True)  # left by an earlier start of this run that was killed

    def publish(self, policy: Exportable, version: int | None) -> Published:
        """Write a version. Every rank calls it. The base model is published only if the whole model is trained."""
        self._count += 1
        name = f"{self.run}-{self._count}-" + ("base" if version is None else f"v{version}")
        published = Published(name, self.folder / name, version)
        if distributed.is_main():
            partial = published.path.with_suffix(".tmp")
            with disk.writing(partial, "the policy for vLLM", "Make room; `--resume` then continues."):
                policy.write_model(partial)
            partial.rename(published.path)
        self._kept.append(published)
        if len(self._kept) > 2:
            self._delete(self._kept.pop(0))
        distributed.barrier()
        return published

    def close(self) -> None:
        while self._kept:
            self._delete(self._kept.pop())
        if distributed.is_main():
            with suppress(OSError):  # nothing was published, or another run uses the folder
                self.folder.rmdir()

    def _delete(self, published: Published) -> None:
        if distributed.is_main():
            shutil.rmtree(published.path, ignore_errors=True)
