"""How many tokens a second agents get that wait between their calls, against an environment that waits as long.

python bench/agents.py [--wait 0.05] [--rows 32] [--repetitions 5]

Both have answers of three turns of the embedded model. They take turns; medians of written tokens by wall time.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from waiting_agent import AGAIN, TURNS, WAIT

from machine import describe
from trainer.config.resolve import resolve
from trainer.machine import quiet
from trainer.model.load import load_model, load_tokenizer, stop_tokens
from trainer.problem.environment import Environments
from trainer.problem.prompts import Prompter
from trainer.problem.task import make_task
from trainer.records import Sampling
from trainer.rollout.agents.sampler import Agents, AgentSampler
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.turns import Stops, TurnTaking


class Waits:
    """The same as an environment."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s, self.left = wait_s, TURNS

    def reset(self, problem):
        return None

    def step(self, text):
        self.left -= 1
        time.sleep(self.wait_s if self.left else 0.0)
        return AGAIN, self.left == 0, 0.0


def samplers(wait_s: float, rows: int) -> dict:
    os.environ[WAIT] = str(wait_s)
    setting = f"{Path(__file__).with_name('waiting_agent.py').resolve()}:run"
    config = resolve("nano", None, [f"task.agent={setting}", f"rollout.rows={rows}", "prompt.max_tokens=128"])
    tokenizer, model = load_tokenizer(config.model), load_model(config.model, "fp32", torch.device("cpu"))
    task, stops = make_task(config.task), Stops(tokenizer, stop_tokens(tokenizer, model))
    found = Environments("bench", Path(__file__), lambda problem: Waits(wait_s))
    plain, told = Prompter(tokenizer, config.prompt, task), Prompter(tokenizer, config.prompt, task, found)
    own = DecodeSampler(model, TurnTaking(stops, told), rows)
    inner = DecodeSampler(model, TurnTaking(stops), rows)
    led = AgentSampler(inner, Agents(setting, print), plain, stops, config)
    prompts = [replace(plain.prompt(problem), place=at) for at, problem in enumerate(task.train()[: 2 * rows // 8])]
    return {"environment": own, "agents": led, "prompts": prompts}


def tokens_a_second(sampler, prompts, seed: int) -> float:
    began = time.perf_counter()
    groups = dict(sampler.sample(prompts, Sampling(8, 1.0, 128, seed)))
    written = sum(one.length for group in groups.values() for one in group)
    return written / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait", type=float, default=0.05)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/agents.json")
    asked = parser.parse_args()
    quiet.quiet()
    made = samplers(asked.wait, asked.rows)
    prompts, found = made.pop("prompts"), {name: [] for name in ("environment", "agents")}
    for seed in range(asked.repetitions + 1):
        for name, sampler in made.items():
            found[name].append(tokens_a_second(sampler, prompts, seed))
    made["agents"].close()
    medians = {name: round(median(values[1:]), 1) for name, values in found.items()}  # without the first, which starts
    result = {"tokens_a_second": medians, "ratio": round(medians["agents"] / medians["environment"], 3)}
    result |= {"rows": asked.rows, "wait_s": asked.wait, "repetitions": asked.repetitions, "machine": describe()}
    asked.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
