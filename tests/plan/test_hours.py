"""The seconds of a run, worked out by hand for one shape, and what corrects them."""

import re
from dataclasses import replace

import pytest

from trainer.config.resolve import resolve
from trainer.machine import hardware
from trainer.machine.hardware import Gpu, Hardware
from trainer.model.families import BY_TYPE
from trainer.model.shapes import Shape, shape_of
from trainer.plan.cards import CARDS, Speed
from trainer.plan.hours import BETWEEN, DECOMPOSITION, H100, Duration, Ratio, at_start, measured
from trainer.plan.planner import DRAW, Planner

# 1,000 weights in each of 2 layers: q and o 10 x 10, k and v 10 x 10, three of the feed-forward part 10 x 20
SHAPE = Shape(BY_TYPE["llama"], 10, 2, 2, 2, 5, 20, 50, True, 512)
WEIGHTS, HEAD = 2 * (4 * 100 + 3 * 200), 50 * 10
PASSED = BETWEEN * 4 * 2 * (4 * 20 + 3 * 30)  # bytes of a token that linear layers and those around them move
SETTINGS = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "prompt.max_tokens=6"]
SETTINGS += ["rollout.rows=4", "rollout.dead_groups=keep", "model.dtype=fp32", "eval.problems=4", "lora.r=1"]
SLOW = Speed(flops=1e6, bandwidth=1e6, latency=0.0)


def duration(*settings: str, speed: Speed = SLOW, length: float = 8.0, ranks: int = 1) -> Duration:
    return Duration(Planner(SHAPE, resolve("nano", None, [*SETTINGS, *settings]), ranks, 0), speed, length)


def test_a_rollout_reads_prompts_and_decodes_in_waves():
    """8 answers in 2 waves of 4 rows, on average over 6 + 8 / 2 places."""
    reading = 2 * (2 * WEIGHTS * 6 + 4 * 2 * 10 * 6 * 6 / 2)  # of 2 prompts
    decoding = 4 * (2 * (WEIGHTS + HEAD) + 4 * 2 * 10 * 10)  # of 4 rows
    norms = 2 * 2 * 10 + 10
    moved = 4 * (WEIGHTS + HEAD + norms) + 4 * (2 * 2 * 10 * 4 * 10 + 50 * (4 + DRAW) + PASSED)
    arithmetic = Speed(flops=1e6, bandwidth=1e12, latency=0.0)
    assert duration(speed=arithmetic).rollout == pytest.approx((reading + 16 * decoding) / 1e6, rel=1e-4)
    traffic = Speed(flops=1e12, bandwidth=1e6, latency=0.0)
    assert duration(speed=traffic).rollout == pytest.approx(reading / 1e12 + (12 * PASSED + 16 * moved) / 1e6)
    waits = Speed(flops=1e15, bandwidth=1e15, latency=0.01)
    assert duration(speed=waits).rollout == pytest.approx(16 * 2 * 0.01, rel=1e-6)
    # with shorter answers too, as one of them is as long as it may be
    assert duration(speed=waits, length=4.0).rollout == pytest.approx(16 * 2 * 0.01, rel=1e-6)
    assert duration(speed=arithmetic, length=4.0).rollout < 0.6 * duration(speed=arithmetic).rollout
    assert duration(ranks=2).rollout == pytest.approx(duration().rollout / 2)
    assert duration("model.quantize=nf4", speed=traffic).rollout > duration(speed=traffic).rollout


def test_an_update_goes_forward_and_back_over_prompts_and_answers():
    """64 tokens of answers, and 12 of the prompts, which the answers of a group share."""
    pairs = 2 * 6 * 6 / 2 + 64 * (6 + 8 / 2)
    layers, head = 2 * WEIGHTS * 76 + 4 * 2 * 10 * pairs, 2 * HEAD * 64
    trained = 2 * (4 * 20 + 3 * 30)  # an adapter of rank 1
    only_flops = Speed(flops=1e6, bandwidth=1e15, latency=0.0)
    plain = duration("engine.ds_config=zero2", speed=only_flops)
    assert plain.planner.trained == trained
    assert plain.update == pytest.approx((2 * layers + 2 * head + 6 * trained * 76) / 1e6)
    saved = duration("engine.ds_config=zero2", "model.gradient_checkpointing=true", speed=only_flops)
    assert saved.update - plain.update == pytest.approx((layers + 2 * trained * 76) / 1e6)
    whole = duration("engine.ds_config=zero2", "lora.enabled=false", speed=only_flops)
    assert whole.update == pytest.approx((3 * layers + 4 * head) / 1e6)
    scored = duration("engine.ds_config=zero2", "algorithm.kl.coef=0.1", speed=only_flops)
    assert scored.update - plain.update == pytest.approx((layers + head) / 1e6)
    twice = duration("engine.ds_config=zero2", "algorithm.epochs=2", speed=only_flops)
    assert twice.update == pytest.approx(2 * plain.update)
    assert replace(plain, live=0.5).update == pytest.approx(plain.update / 2, rel=1e-6)
    muon = duration("engine.ds_config=zero2", "lora.enabled=false", "optim.name=muon", speed=only_flops)
    decomposed = 2 * 7 * 10**3 + 10**3  # seven matrices of each layer, and the embedding, which is the output layer
    assert muon.update - whole.update == pytest.approx(DECOMPOSITION * decomposed)
    twice_each = duration("engine.ds_config=zero2", "algorithm.gradreg.strength=0.01", speed=only_flops)
    assert twice_each.update == pytest.approx(2 * plain.update)


KL, K2 = "algorithm.kl.coef=0.1", "algorithm.kl.estimator=k2"
TAUGHT = ["teacher.adapter=x", "algorithm.loss=reinforce_baseline"]
PASSES = [([KL], 1), ([KL, "algorithm.kl.where=reward"], 2), ([KL, "algorithm.minibatches=2"], 1.5)]
PASSES += [(["algorithm.minibatches=2"], 0.5), (["algorithm.top_entropy=0.5", "algorithm.minibatches=2"], 1)]
PASSES += [(TAUGHT, 1), ([*TAUGHT, KL, K2, "teacher.form=loss"], 1), ([*TAUGHT, KL], 2), (["algorithm.epochs=2"], 0)]


@pytest.mark.parametrize(("settings", "passes"), PASSES)
def test_passes_before_an_update_are_those_that_a_run_makes(settings, passes, monkeypatch):
    monkeypatch.setattr(Planner, "_teacher_adapter", {})
    found = duration(*settings)
    assert found.passes + found.of_teacher / found.of_pass == pytest.approx(passes)


def test_a_teacher_beside_the_policy_takes_the_pass_of_its_own_shape():
    """The shape of the embedded model is not that of this policy."""
    found = duration("teacher.name=nano", "teacher.quantize=int8", "algorithm.loss=reinforce_baseline")
    teacher = Planner(shape_of("nano"), found.planner.config, 1, 0)
    assert found.of_teacher == pytest.approx(Duration(teacher, SLOW, 8.0).of_pass)


def test_a_warm_up_is_part_of_the_run():
    alone, both = duration("warmup.steps=7", "warmup.only=true"), duration("warmup.steps=7")
    rows = replace(alone, planner=replace(alone.planner, config=alone.planner.config.warmed_up_in(None)))
    assert alone.run(10) == pytest.approx(7 * rows.update + 3 * alone.evaluation)
    assert both.run(10) == pytest.approx(alone.run(0) - alone.evaluation + duration().run(10))  # it merges once
    assert replace(both, live=0.5).run(0) == pytest.approx(both.run(0)), "a warm-up trains on all solutions"
    sampled = duration("warmup.steps=7", "warmup.only=true", "warmup.from=samples", "warmup.asked=6", "warmup.rounds=2")
    assert sampled.run(0) - alone.run(0) == pytest.approx(2 * alone._sampling(24, 4))
    assert duration("warmup.steps=7", "warmup.only=true", "eval.samples=3").run(0) == alone.run(0)  # greedy ones only


def test_what_is_between_layers_and_the_optimizer_states_move_through_memory():
    """States that are offloaded go to the CPU and back, and nothing else does."""
    states, passed = 28 * 2 * (4 * 20 + 3 * 30), 2 * 76 * PASSED
    fast = Speed(flops=1e18, bandwidth=1e3, latency=0.0)
    assert duration("engine.ds_config=zero2", speed=fast).update == pytest.approx((states + passed) / 1e3)
    assert duration("engine.ds_config=zero2_offload", speed=fast).update == pytest.approx(states / 1e10 + passed / 1e3)
    halves = duration("engine.ds_config=zero2", "algorithm.minibatches=2", speed=fast)  # and a pass before the second
    assert halves.update == pytest.approx((2 * states + 1.25 * passed) / 1e3)


def test_a_run_has_its_steps_and_evaluations():
    one = duration()
    assert one.evaluation == pytest.approx(one._sampling(4, 1))
    steps = 10 * (one.rollout + one.update)
    assert one.run(10) == pytest.approx(steps + 3 * one.evaluation)  # of base, trained and merged model
    assert duration("run.merge=false").run(10) == pytest.approx(steps + 2 * one.evaluation)
    assert duration("eval.every=5").run(10) == pytest.approx(steps + 4 * one.evaluation)
    assert duration("eval.problems=0").run(10) == pytest.approx(steps)
    # three more for each problem, twice, and the last greedy ones again
    assert duration("eval.samples=3").run(10) == pytest.approx(steps + 10 * one.evaluation)
    assert replace(one, rounds=3).rollout == pytest.approx(3 * one.rollout)


def test_the_steps_of_a_run_correct_what_is_computed():
    records = [{"length": 99.0, "time/rollout": 99.0, "time/step": 99.0}]  # the first one is not counted
    records += [{"length": 4.0, "dead_groups": 0.5, "time/rollout": 3.0, "time/step": 1.0, "time/batch": 0.5}]
    records[1] |= {"time/reward/x": 9.0}
    own = measured(duration(), records)
    assert (own.length, own.live) == (4.0, 1.0)
    assert (own.rollout, own.update) == (pytest.approx(3.0), pytest.approx(1.5))
    assert measured(duration("rollout.dead_groups=drop"), records).live == 0.5


def test_an_h100_takes_what_it_took():
    """32 answers of 256 tokens with 1.5 B parameters: 1.00 s to sample and 1.19 s to train on."""
    settings = ["rollout.problems=4", "rollout.rows=32", "rollout.dead_groups=keep", "model.name=Qwen/Qwen2.5-1.5B"]
    config = resolve("8gb", None, settings)
    found = Duration(Planner(shape_of(config.model.name), config, 1, 80 * 10**9), CARDS["H100"].speed, 256)
    assert found.rollout == pytest.approx(1.00, rel=0.2)
    assert replace(found, ratio=Ratio(1.0, H100.update)).update == pytest.approx(1.19, rel=0.25)


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda: Hardware((Gpu(0, "GPU-0", "NVIDIA GeForce RTX 4060", 8.6),), 8))


def test_a_run_says_at_its_start_how_long_it_takes(card):
    said = at_start(resolve("8gb"), 0, 100, 1)
    assert re.fullmatch(r"about 1\.5 h \(between 1 and 2\.\d\) for 100 steps on NVIDIA .*, until \d\d:\d\d", said)
    assert at_start(resolve("8gb"), 50, 100, 1).startswith("about 46 min ")
    assert at_start(resolve("8gb"), 100, 100, 1) is None


def test_a_long_run_says_how_many_steps_take_an_evening(card):
    """It goes on by itself, because run.epochs was written."""
    said = at_start(resolve("8gb", None, ["run.epochs=3"]), 0, 2802, 1)
    steps = int(re.search(r"\. run\.steps=(\d+) would take about 4 h$", said)[1])
    assert at_start(resolve("8gb"), 0, steps, 1).startswith("about 4")
    assert "run.steps" not in at_start(resolve("8gb", None, ["run.epochs=3"]), 100, 2802, 1)


def test_what_is_left_of_a_warm_up_is_said_and_its_length_is_not_that_of_grpo(card):
    warmup = resolve("8gb", None, ["warmup.only=true", "warmup.steps=100000"])
    assert "run.steps" not in at_start(warmup, 0, 100_000, 1)
    assert " for 100 steps " in at_start(warmup, 99_900, 100_000, 1)


def test_what_nobody_knows_is_not_said(card, monkeypatch):
    assert at_start(resolve("8gb", None, ["model.name=somebody/else"]), 0, 100, 1) is None
    monkeypatch.setattr(hardware, "detect", lambda: Hardware((), 8))
    assert at_start(resolve("8gb"), 0, 100, 1) is None
