"""Suggest the right name for a setting that does not exist."""

import difflib
from collections.abc import Sequence

ELSEWHERE = {  # the names of settings in other programs
    "load_in_4bit": "model.quantize=nf4",
    "load_in_8bit": "model.quantize=int8",
    "learning_rate": "algorithm.lr",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "prompt.max_tokens",
    "beta": "algorithm.kl.coef",
    "output_dir": "run.dir",
    "output": "run.dir",
    "max_steps": "run.steps",
    "num_train_epochs": "run.epochs",
    "per_device_train_batch_size": "optim.tokens_per_micro_batch",
    "warmup.source": "warmup.from",  # its name in Python, where `from` is a keyword
}
SLURM_OPTIONS = ("partition", "account", "qos", "constraint", "reservation")
ELSEWHERE |= {name: f"export SBATCH_{name.upper()}=NAME into slurm/site.env" for name in SLURM_OPTIONS}


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a sentence that names the nearest known name: the same key of another section, or the closest one."""
    leaf = name.rpartition(".")[2]
    if meant := ELSEWHERE.get(name) or ELSEWHERE.get(leaf):
        return f" Write {meant}."
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    lower_case = {candidate.lower(): candidate for candidate in known}
    close = same_leaf or difflib.get_close_matches(name.lower(), lower_case, n=1, cutoff=0.6)
    return f" Did you mean {lower_case.get(close[0], close[0])}?" if close else ""
