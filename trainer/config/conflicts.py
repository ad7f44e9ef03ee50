"""A table of settings that exclude each other. The sections refuse values that are wrong by themselves."""

from collections.abc import Callable
from functools import reduce
from math import inf
from operator import getitem
from typing import Any

from trainer.config.read_yaml import written
from trainer.config.sections.model import Lora
from trainer.config.sections.rollout import SERVED_RANKS
from trainer.errors import ConfigError

Config = Any  # the class in settings.py, which imports this file


def _makes_another_base(lora: Lora) -> str:
    """Return the setting that changes the weights of the base; "" if they stay unchanged."""
    return "lora.enabled=false" if not lora.enabled else f"lora.init={lora.init}" if lora.init != "zero" else ""


# Each row has the setting that the error names, a condition, the reason and the remedy, which may quote settings of c.
# fmt: off
RULES: list[tuple[str, Callable[[Config], object], str, str]] = [
    ("model.activation_offload", lambda c: c.model.activation_offload and not c.model.gradient_checkpointing,
     "it moves what gradient checkpointing stores, and that is switched off",
     "Write model.gradient_checkpointing=true as well"),
    ("task.calls", lambda c: c.task.calls == "inline" and c.task.tools != ("calculator",),
     "it is for the calculator alone", "Write task.tools=[calculator]"),
    ("task.calls", lambda c: c.task.calls != "auto" and not c.task.tools,
     "it says how tools are called", "Write task.tools=[calculator] as well"),
    ("task.agent", lambda c: c.task.agent and c.task.tools,
     "an agent has its own tools and cannot use those of task.tools", "Leave one of the two out"),
    ("task.agent", lambda c: c.task.agent and c.warmup.source == "samples" and c.warmup.steps,
     "a warm-up cannot train on answers of agents", "Write warmup.from=solutions, or warmup.steps=0"),
    ("task.name", lambda c: c.task.name == "mix" and not c.task.mix,
     "a mix needs parts", "Write task.mix='{{gsm8k: 2, nano: 1}}'"),
    ("task.gym", lambda c: c.task.gym and not any("reasoning_gym:" in name for name in (c.task.name, *c.task.mix)),
     "these are parameters of a generator", "Write task.name=reasoning_gym:GENERATOR as well"),
    ("task.name", lambda c: c.task.name.partition(":")[0] in ("nano", "addition", "reasoning_gym") and c.task.own_data,
     "it makes up its own problems and reads no task.{c.task.own_data[0]}",
     "Write task.name=records, or task.{c.task.own_data[0]}=null"),
    ("task.name", lambda c: c.task.name == "records" and not c.task.own_data,  # data from Python may name columns alone
     "records are read from your own data", "Write task.path=FILE or task.data_dir=FOLDER"),
    ("task.answer", lambda c: c.task.answer == "none" and c.task.name in ("gsm8k", "gsm8k-renumbered", "math",
                                                                          "multiple_choice"),
     "task.name={c.task.name} compares with gold answers", "Write task.name=records as well"),
    ("task.path", lambda c: c.task.path is not None and c.task.data_dir is not None,
     "problems come from one source, and task.data_dir={c.task.data_dir} is another", "Write one of the two"),
    ("task.path", lambda c: c.task.path is None and (
        c.task.test_path or c.task.subset or c.task.test_split or c.task.split != "train"),
     "task.test_path, task.subset, task.split and task.test_split belong to it", "Write task.path as well"),
    ("prompt.template", lambda c: {*c.prompt.template} - {"enable_thinking"} and c.prompt.style == "r1_zero",
     "prompt.style=r1_zero uses no chat template", "Leave prompt.template out, or choose another style"),
    ("reward.weights", lambda c: not any(c.reward.all_weights.values()),
     "no reward has a weight, so there is nothing to learn", "Write reward.weights={{correct: 1.0}}"),
    ("reward.weights.correct", lambda c: c.reward.weights.get("correct", 0) < 0,
     "a negative weight pays wrong answers", "Write reward.weights.correct=1.0"),
    ("reward.weights.judge", lambda c: "judge" in c.reward.weights
     and not (c.reward.judge.url and c.reward.judge.model),
     "it needs reward.judge.url and reward.judge.model", "Write both"),
    ("reward.judge.url", lambda c: c.reward.judge.url and "judge" not in c.reward.weights,
     "the judge has no weight", "Write reward.weights.judge=1.0"),
    ("rollout.group_size", lambda c: c.rollout.group_size < 2,
     "GRPO compares answers to the same problem, so it needs at least 2", "Try 8"),
    ("run.steps", lambda c: (c.run.steps is None) == (c.run.epochs is None),
     "a run has either run.steps or run.epochs", "Write one of them, such as run.steps=100"),
    ("eval.patience", lambda c: c.eval.patience is not None and (c.eval.every is None or not c.eval.problems),
     "it counts evaluations during the run, and there are none", "Write eval.every=50, and eval.problems above 0"),

    *((f"algorithm.kl.{key}", lambda c, key=key: getattr(c.algorithm.kl, key) and c.algorithm.kl.coef == 0,
       "it has no effect while algorithm.kl.coef=0", "Write algorithm.kl.coef=0.04 as well")
      for key in ("target", "refresh")),
    ("algorithm.kl.estimator",
     lambda c: c.algorithm.kl.estimator == "k1" and c.algorithm.kl.coef and c.algorithm.kl.where == "loss",
     "as a loss, its gradient is zero on average, so it does not constrain the policy",
     "Write algorithm.kl.estimator=k2, or algorithm.kl.where=reward"),
    ("algorithm.dual_clip", lambda c: c.algorithm.dual_clip and c.algorithm.loss not in ("grpo_clip", "gspo"),
     "it has no effect on algorithm.loss={c.algorithm.loss}", "Write algorithm.dual_clip=null"),
    ("algorithm.dual_clip", lambda c: (c.algorithm.dual_clip or inf) <= 1 + c.algorithm.clip_high,
     "it is inside the first bound, 1 + algorithm.clip_high", "Write a larger one; 3 is usual"),
    ("algorithm.kl.refresh", lambda c: c.algorithm.kl.refresh == 1 and (
        c.algorithm.kl.where == "reward" or c.algorithm.epochs * c.algorithm.minibatches == 1),
     "it makes the policy its own reference, so the KL is always 0",
     "Write algorithm.kl.refresh=50, or with algorithm.kl.where=loss algorithm.epochs=2"),

    *((f"teacher.{key}", lambda c, key=key, usual=usual: getattr(c.teacher, key) not in (None, usual) and (
        c.teacher.url or c.teacher.name is None),
       "it is for a model that the run itself loads as its teacher, and there is none",
       f"Write teacher.name and no teacher.url, or teacher.{key}={usual}")
      for key, usual in (("revision", "null"), ("quantize", "none"))),
    ("teacher.adapter", lambda c: c.teacher.adapter and c.teacher.url,
     "it has no effect on the server at teacher.url", "Start the server with it, and write teacher.adapter=null"),
    ("teacher.adapter", lambda c: c.teacher.adapter and c.teacher.name is None and not c.shares_base,
     "it is over the base of this run, and {changed} changes the base",
     "Write teacher.name={c.model.name} as well, which loads the base again"),
    ("rollout.temperature", lambda c: c.teacher.url and c.rollout.temperature != 1,
     "the server at teacher.url gives log-probs at a temperature of 1 only",
     "Write rollout.temperature=1, or teacher.name=MODEL without teacher.url"),
    ("teacher.form", lambda c: c.teacher.is_there and c.teacher.form == "loss" and not c.algorithm.kl.is_reverse,
     "the teacher is the reference of the reverse KL in the loss, whose gradient k2 has",
     "Write algorithm.kl.coef=1 algorithm.kl.estimator=k2, and leave algorithm.kl.where and algorithm.kl.refresh out"),
    ("teacher.form", lambda c: c.teacher.is_there and c.teacher.form == "advantage" and (
        c.algorithm.loss in ("reinforce", "gspo")),
     "algorithm.loss={c.algorithm.loss} has no advantages of single tokens",
     "Write algorithm.loss=reinforce_baseline"),
    ("rollout.dead_groups", lambda c: c.teacher.is_there and c.rollout.dead_groups == "refill",
     "a teacher grades every answer, so no group is dead", "Write rollout.dead_groups=keep"),

    ("warmup.steps", lambda c: c.warmup.only and not c.warmup.steps,
     "a warm-up alone needs steps", "Write warmup.steps=200"),
    ("warmup.rounds", lambda c: c.warmup.rounds > max(1, c.warmup.steps),
     "each round needs a step, and warmup.steps={c.warmup.steps}", "Write warmup.steps={c.warmup.rounds} or more"),
    ("warmup.rounds", lambda c: c.warmup.rounds > 1 and c.warmup.source == "solutions",
     "worked solutions are the same in all rounds", "Write warmup.from=samples, or warmup.rounds=1"),
    ("warmup.patience", lambda c: c.warmup.patience is not None and (c.warmup.every is None or not c.eval.problems),
     "it counts evaluations during the warm-up, and there are none",
     "Write warmup.every=20, and eval.problems above 0"),
    ("eval.metric", lambda c: c.eval.metric == "loss" and not c.warmup.only,
     "only a warm-up has held-out solutions to measure it on", "Write eval.metric=accuracy"),
    ("warmup.then", lambda c: c.warmup.then == "same" and c.warmup.steps and not c.warmup.only
     and c.lora.enabled and c.lora.init != "zero",
     "with lora.init={c.lora.init} the adapter of the warm-up is exported with twice its rank",
     "Write warmup.then=merged"),
    ("warmup.then", lambda c: c.warmup.then == "merged" and c.warmup.steps and not c.warmup.only
     and c.rollout.uses_servers and c.rollout.vllm.urls,
     "the servers at rollout.vllm.urls would go on to serve the base before the warm-up",
     "Write rollout.vllm.start=true without rollout.vllm.urls, or warmup.then=same with lora.init=zero"),
    ("lora.start", lambda c: c.lora.start is not None and _makes_another_base(c.lora),
     "an adapter is trained further, and {changed} does not allow that", "Leave one of the two out"),

    ("model.quantize", lambda c: c.model.quantize != "none" and not c.lora.enabled,
     "quantised weights cannot be trained, only an adapter over them",
     "Write lora.enabled=true, or model.quantize=none"),
    ("model.quantize", lambda c: c.model.quantize == "bf16" and c.model.dtype in ("bf16", "fp16"),
     "it is for computing in fp32, and model.dtype={c.model.dtype} stores all weights in 16 bits",
     "Leave one of the two out"),
    ("lora.init", lambda c: c.model.quantize != "none" and c.lora.init != "zero",
     "PiSSA changes the weights of the base, and model.quantize={c.model.quantize} does not allow that",
     "Write lora.init=zero, or model.quantize=none"),
    *((f"model.{key}", lambda c, key=key, usual=usual, of=of: getattr(c.model, key) != usual and (
        not c.lora.enabled or of in c.lora.named_layers),
       f"it is for a layer that is not trained, and {of} is",
       f"Write model.{key}={usual}, or train an adapter of other layers")
      for key, usual, of in (("embeddings", "device", "embed_tokens"), ("quantize_head", "none", "lm_head"))),
    ("lora.dora", lambda c: c.lora.dora and c.model.quantize in ("int8", "bf16"),
     "PEFT cannot measure the rows of model.quantize={c.model.quantize} reliably",
     "Write model.quantize=nf4, or lora.dora=false"),

    ("rollout.dead_groups", lambda c: c.algorithm.loss == "reinforce" and c.rollout.dead_groups == "refill",
     "algorithm.loss=reinforce learns from the raw reward, so a group of equal rewards is not dead",
     "Write rollout.dead_groups=keep"),
    ("rollout.dead_by", lambda c: c.rollout.dead_by == "correct" and c.task.answer == "none" and (
        "code" not in c.reward.weights),
     "with task.answer=none no answer is right, so every group is dead", "Write rollout.dead_by=reward"),
    ("rollout.dead_by", lambda c: c.rollout.dead_by == "correct" and not c.drops_dead_groups,
     "algorithm.loss={c.algorithm.loss} with rollout.dead_groups={c.rollout.dead_groups} trains on dead groups too, so "
     "it has no effect", "Write rollout.dead_by=reward"),
    ("algorithm.minibatches", lambda c: c.algorithm.minibatches > c.rollout.problems,
     "groups stay whole, and a step has rollout.problems={c.rollout.problems}",
     "Write algorithm.minibatches={c.rollout.problems} or less"),

    ("rollout.vllm.urls", lambda c: c.rollout.vllm.urls and c.rollout.vllm.start,
     "these servers run already, and rollout.vllm.start=true starts others", "Write one of the two"),
    ("rollout.vllm.devices", lambda c: len({device for device in c.rollout.vllm.devices if device >= 0}) < len(
        c.rollout.vllm.devices),
     "they are not the numbers of different cards", "Write numbers such as 0,1"),
    ("rollout.vllm.devices", lambda c: len(c.rollout.vllm.devices) % c.rollout.vllm.tensor_parallel,
     "they cannot be divided by rollout.vllm.tensor_parallel={c.rollout.vllm.tensor_parallel}",
     "Name a multiple of it"),
    ("rollout.engine", lambda c: c.rollout.engine == "vllm_server" and not c.rollout.names_servers,
     "no server is named", "Write rollout.vllm.urls=http://127.0.0.1:8000, or rollout.vllm.start=true"),
    ("rollout.engine", lambda c: c.rollout.engine not in ("auto", "vllm_server") and c.rollout.names_servers,
     "this engine uses no server, and rollout.vllm names one", "Write rollout.engine=vllm_server"),
    ("rollout.ahead", lambda c: c.rollout.ahead and not c.rollout.uses_servers,
     "only a server samples while the policy trains", "Write rollout.engine=vllm_server"),
    ("rollout.ahead", lambda c: c.rollout.ahead and c.algorithm.correction.level == "none",
     "the answers come from the previous policy, and algorithm.correction.level=none does not correct for that",
     "Write algorithm.correction.level=token"),
    ("rollout.weights", lambda c: c.rollout.weights != "same"
     and (c.rollout.uses_vllm or c.rollout.engine == "hf"),
     "only Octet's decoder supports such weights", "Write rollout.engine=decode, or rollout.weights=same"),
    ("rollout.weights", lambda c: c.rollout.weights != "same" and not c.lora.enabled,
     "they are a copy of a frozen base, and with lora.enabled=false the base is trained",
     "Write lora.enabled=true, or rollout.weights=same"),
    ("rollout.weights", lambda c: c.rollout.weights != "same" and c.model.quantize != "none",
     "model.quantize={c.model.quantize} has rounded the weights already",
     "Write model.quantize=none, or rollout.weights=same"),
    ("rollout.weights", lambda c: c.rollout.weights != "same" and c.lora.dora,
     "DoRA rescales the weights themselves, and the copy of the base stays as it is",
     "Write lora.dora=false, or rollout.weights=same"),
    ("rollout.weights", lambda c: c.rollout.weights != "same" and c.algorithm.correction.level == "none",
     "the answers come from rounded weights, and algorithm.correction.level=none does not correct for that",
     "Write algorithm.correction.level=token"),
    ("rollout.vllm.urls", lambda c: c.rollout.vllm.urls and not c.lora.enabled,
     "the weights of a whole model (lora.enabled=false) go only to servers that the run started",
     "Write rollout.vllm.start=true"),
    ("rollout.engine", lambda c: c.lora.dora and c.lora.enabled and c.rollout.uses_vllm,
     "vLLM serves no DoRA", "Write lora.dora=false, or rollout.engine=decode"),
    ("lora.targets", lambda c: c.lora.named_ends and c.lora.enabled and c.rollout.uses_vllm,
     "vLLM serves no adapter of {c.lora.named_ends[0]}, except for a few models",
     "Write lora.targets=all, which leaves it out, or rollout.engine=decode"),
    ("lora.r", lambda c: c.lora.served_rank > SERVED_RANKS[-1] and c.lora.enabled and c.rollout.uses_vllm,
     f"vLLM serves ranks up to {SERVED_RANKS[-1]}, and this adapter is exported with rank {{c.lora.served_rank}}",
     f"Write lora.r={SERVED_RANKS[-1] // 2} or less"),
]
# fmt: on


def check(c: Config) -> None:
    """Raise ConfigError for the first rule that the settings break. It names the setting as on a command line."""
    for key, is_broken, reason, remedy in RULES:
        if is_broken(c):
            value = reduce(getitem, key.split("."), c.model_dump(mode="json"))
            texts = (text.format(c=c, changed=_makes_another_base(c.lora)) for text in (reason, remedy))
            raise ConfigError(key if value is None else f"{key}={written(value)}", *texts)
