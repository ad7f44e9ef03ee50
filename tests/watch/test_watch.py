"""The metrics of a step, and its line on a terminal."""

import json
import re
from dataclasses import replace
from math import exp, log
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import group, row
from trainer.batch.pack import to_tensors
from trainer.config.settings import Algorithm, Correction
from trainer.loss.objectives import tally_batch
from trainer.records import Scores, Turn, Update
from trainer.watch import phases
from trainer.watch.answer_metrics import tally_groups
from trainer.watch.measure import REWARD, STRICT
from trainer.watch.screen import Screen, progress_line
from trainer.watch.tally import Max, Min, Tally
from trainer.watch.update_metrics import Health, metrics_of_updates

ZEROS = torch.zeros(3, 2)


def test_extremes_are_those_of_all_ranks():
    """tests/run/test_ranks.py shows that the other metrics are sums over sums."""
    one, other = Tally(), Tally()
    for tally, value in ((one, -3.0), (one, -1.0), (other, -2.0)):
        tally.merge({"reward/min": Min(value), "reward/max": Max(value)})
    expected = {"reward/min": -3.0, "reward/max": -1.0}
    assert one.means(lambda mine: [mine, json.loads(json.dumps(other.packed()))]) == expected  # as ranks send it


def scored_batch(sampled_logprobs_BT=ZEROS, reference_logprobs_BT=None):
    """Two answers of two tokens and one token; the second row of padding has no weight."""
    batch = to_tensors([row(1, 2, 1.0), row(2, 1, -1.0), row(1, 1, 0.0, weight=0.0)], pad_token=0)
    return replace(
        batch, sampled_logprobs_BT=sampled_logprobs_BT, reference_logprobs_BT=reference_logprobs_BT
    ).measured(ZEROS)


def test_a_batch_becomes_ratios_clips_and_distances():
    """Ratios 1.5, 1 (A = 1) and 0.5 (A = -1); against the sampler e, 1, 1, in a row without weight e^9."""
    batch = scored_batch(
        sampled_logprobs_BT=torch.tensor([[-1.0, 0.0], [0.0, 0.0], [-9.0, 0.0]]),
        reference_logprobs_BT=torch.tensor([[log(1.5), 1.0], [0.0, log(0.5)], [0.0, 0.0]]),
    )
    scores = Scores(torch.tensor([[log(1.5), 0.0], [0.0, log(0.5)], [5.0, 0.0]]), torch.full((3, 2), 0.3))
    tally = Tally()
    tally_batch(tally, batch, scores, Algorithm(correction=Correction(cap=2.0)))
    expected = {"ratio": (1.5 + 1 + 0.5) / 3, "ratio/max": 1.5, "clipped/high": 1 / 3, "clipped/low": 1 / 3}
    expected |= {"sampler_difference": 1 / 3, "sampler_difference/max": 1.0, "sampler_kl": (exp(1) - 1 - 1) / 3}
    expected |= {"sampler_ratio/raw": (exp(1) + 2) / 3, "sampler_ratio/corrected": (2 + 2) / 3}
    expected |= {"kl": (exp(1) - 2) / 3}  # d = -1 for the second token, 0 for the others
    expected |= {"entropy": 0.3, "advantage/mean": 0.0, "advantage/std": 1.0}
    means = tally.means(lambda sums: [sums])
    assert {name: means[name] for name in expected} == pytest.approx(expected)


def test_gspo_is_judged_by_the_ratio_of_the_answer():
    scores, tally = Scores(torch.tensor([[log(2), log(0.5)], [0.0, 0.0], [0.0, 0.0]]), ZEROS), Tally()
    tally_batch(tally, scored_batch(), scores, Algorithm(loss="gspo"))
    assert tally.means(lambda sums: [sums])["ratio/max"] == pytest.approx(1.0)


def test_a_batch_without_weight_is_not_logged():
    batch = to_tensors([row(1, 2, 1.0, weight=0.0)], pad_token=0)
    batch, tally = batch.measured(torch.zeros(1, 2)), Tally()
    tally_batch(tally, batch, Scores(torch.zeros(1, 2), torch.zeros(1, 2)), Algorithm())
    assert tally.sums == {}


def test_several_updates_of_a_step_in_one_line():
    measured = replace(updated(0.5), measured={**updated(0.5).measured, "update_size": 0.1})  # the last of ten
    updates = [measured, updated(7.0, skipped=True), updated(1.5, lr=2e-3)]
    assert metrics_of_updates(updates) == {"lr": 2e-3, "skipped": 1.0, "grad_norm": 1.0, "gradreg/first_norm": 1.0}
    assert metrics_of_updates([]) == {}


def test_groups_become_reward_accuracy_and_length():
    tally = Tally()
    wrong = group([0, 0])
    elsewhere = replace(wrong, scores=(replace(wrong.scores[0], correct_lenient=True), wrong.scores[1]))
    tally_groups(tally, [group([1, 0, None, 1], lengths=[2, 4, 6, 8]), elsewhere])
    # rewards are of five: the answer without one is left out
    expected = {"reward/mean": 2 / 5, "reward/std": (2 / 5 - (2 / 5) ** 2) ** 0.5, "dead_groups": 0.5}
    expected |= {"reward/min": 0, "reward/max": 1}
    expected |= {"accuracy/strict": 2 / 6, "accuracy/lenient": 3 / 6, "length": 26 / 6}
    means = tally.means(lambda sums: [sums])
    assert {name: means[name] for name in expected} == pytest.approx(expected)
    assert "turns" not in means
    assert "dead_groups/wrong" in means


def test_the_best_and_the_worst_answer_are_shown_with_their_parts(capsys):
    alike, one = group([1.0, 1.0]), group([0.1, 0.9, None, 0.5])
    scores = [replace(score, components={"own": 2.0, "length": None, "format": 1.0}) for score in one.scores]
    long = replace(one.completions[1], text="so\n" + "far " * 99 + "\x1b 7")
    one = replace(one, scores=tuple(scores), completions=(one.completions[0], long, *one.completions[2:]))
    Screen(9).answers([alike, one], {"own": 0.25, "length": 1.0, "format": 0.0})
    best, worst = capsys.readouterr().out.splitlines()
    assert best.startswith("best answer, own 0.5: ...far")
    assert best.endswith("far ␛ 7")
    assert worst == "worst answer, own 0.5: #### 0"
    assert len(best) <= 120
    Screen(9).answers([], {})
    assert capsys.readouterr().out == ""


def test_accuracy_is_counted_beside_the_reward_and_groups_that_only_correct_kills_are_counted():
    unequal = replace(group([0.2, 0.5]), dead_by="correct_strict")  # both are right
    for gold, keys in (("1", {"accuracy/strict", "accuracy/lenient"}), ("", set())):
        problem = replace(unequal.prompt.problem, gold=gold)
        one, tally = replace(unequal, prompt=replace(unequal.prompt, problem=problem)), Tally()
        tally_groups(tally, [one, replace(one, scores=one.scores[:1] * 2)], REWARD)
        means = tally.means(lambda sums: [sums])
        assert {name for name in means if name.startswith("accuracy")} == keys
        assert (means["dead_groups"], means["dead_groups/unequal"]) == (1, 0.5)
        assert "dead_groups/right" not in means


def test_what_an_environment_says_and_a_thought_that_the_prompt_begins_are_counted_for_what_they_are():
    one, tally, new = group([0.1] * 3, lengths=[60] * 3), Tally(), (*range(60),)
    replies = {"5": "no", "6": "12\nError: no"}
    turns = [(Turn("model", one), Turn("environment", reply), Turn("model", "7")) for one, reply in replies.items()]
    talk = {"tokens": (*new, *[1] * 300), "written": (True,) * 60 + (False,) * 300, "text": "7"}
    answers = [replace(one.completions[0], turns=turn, **talk) for turn in turns]
    answers.append(replace(one.completions[0], text="so", truncated=True))
    tally_groups(tally, [replace(one, prompt=replace(one.prompt, text="q <think>"), completions=tuple(answers))])
    expected = {"distinct": 1.0, "repetitive": 0.0, "turns": 2.0, "observed": 300.0, "unfinished_thinking": 1 / 3}
    # the deviation is 0 though the mean square of three 0.1 is below the squared mean
    expected |= {"tool_errors": 1 / 2, "length": 60.0, "reward/std": 0.0}
    means = tally.means(lambda sums: [sums])
    assert {name: means[name] for name in expected} == pytest.approx(expected)


def test_an_answer_that_has_to_repeat_itself_is_no_loop():
    def share(gold: str) -> float:
        one, tally = group([0], lengths=[99]), Tally()
        looped = tuple(replace(answer, tokens=(1, 2, 3) * 33) for answer in one.completions)
        prompt = replace(one.prompt, problem=replace(one.prompt.problem, gold=gold))
        tally_groups(tally, [replace(one, prompt=prompt, completions=looped)])
        return tally.means(lambda sums: [sums])["repetitive"]

    assert (share("7"), share("[[0,0,0,0,0,0,0,0,0,0],[0,0,0,0,0,0,1,0,0,0],[0,0,0,0,0,0,0,0,0,0]]")) == (1.0, 0.0)


def updated(norm: float = 1.0, skipped: bool = False, lr: float = 1e-3) -> Update:
    return Update(norm, lr, skipped, {"gradreg/first_norm": norm})


def health(tmp_path, *fingerprints, fresh=True):
    return Health(tmp_path, SimpleNamespace(bad_updates_allowed=3, fingerprint=iter(fingerprints).__next__), fresh)


def test_the_first_update_alone_is_looked_at(tmp_path):
    assert health(tmp_path, 1.0, 1.0).of(1, [updated()], [])["unchanged"]
    watch = health(tmp_path, 1.0, 2.0)  # a third look would raise StopIteration
    assert [watch.of(step, [updated()], []).get("unchanged") for step in (1, 2)] == [False, None]
    for idle in ([], [updated(0.0)], [updated(skipped=True)]):  # nothing to learn from yet
        assert "unchanged" not in health(tmp_path, 1.0, 1.0).of(1, idle, [])
    assert "unchanged" not in health(tmp_path, fresh=False).of(2801, [updated()], [])  # at the end of its schedule


def test_batches_whose_gradient_is_not_finite_are_kept_and_counted(tmp_path):
    watch, rows = health(tmp_path, 1.0, 2.0), [row(2, 3, 1.0)]
    bad, good = updated(skipped=True), updated()
    counts = [watch.of(step, updates, rows)["bad_updates"] for step, updates in enumerate(([bad], [], [bad], [good]))]
    assert counts == [1, 1, 2, 0]
    kept = json.loads((tmp_path / "bad_update_step_000002_rank_0.json").read_text())
    assert kept[0]["completion"] == list(rows[0].completion)


def test_a_sandbox_that_reports_no_peak_has_the_memory_of_the_moment(tmp_path, monkeypatch):
    """As gVisor writes its status."""
    (tmp_path / "status").write_text("Name:\tpython\nVmSize:\t900 kB\nVmRSS:\t400 kB\n")
    monkeypatch.setattr(phases, "STATUS", tmp_path / "status")
    assert phases.peak().allocated == 400 * 1024


def test_model_text_is_printed_as_it_is(capsys):
    Screen().say("[bold]not markup[/bold] [/oops]")
    assert "[bold]not markup[/bold] [/oops]" in capsys.readouterr().out


PARTS = {200: "rollout reward correct dead loss entropy step grad", 110: "rollout reward correct dead step"}
PARTS |= {88: "rollout reward correct dead", 80: "rollout reward correct", 60: "reward correct"}


@pytest.mark.parametrize(("width", "parts"), PARTS.items())
def test_a_step_is_one_line_of_a_terminal(width, parts):
    metrics = {"time/rollout": 10.0, "length": 200.0, "reward/mean": 0.25, "accuracy/strict": 0.25, "dead_groups": 0.5}
    metrics |= {"loss": 0.001, "entropy": 0.4, "time/step": 12.5, "grad_norm": 0.5}
    line = progress_line(3, 4000, metrics, 36_000, STRICT, width)
    number, *shown, left = re.split("  +", line.strip())
    assert (number, left) == ("3/4000", "10:00:00 left")
    assert [part.split()[0] for part in shown] == parts.split()
    assert len(line) <= width
