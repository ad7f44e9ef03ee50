"""Which of its own answers a model is taught."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.conftest import refuses
from trainer.config.command_line import resolve
from trainer.errors import CheckpointError, DataError
from trainer.loop import Lessons
from trainer.records import Completion, Problem, Prompt, Score, ScoredGroup, TrainingRow, Turn
from trainer.rollout import self_training

CONFIG = resolve("nano", None, ["warmup.only=true", "warmup.from=samples", "warmup.steps=5", "warmup.rounds=2"])
PAYS = f"correct_{CONFIG.reward.answer}"


def answers(*found: tuple[str, int, bool]) -> ScoredGroup:
    """A group of answers: the text, how many tokens it has, and whether it is right."""
    completions = tuple(Completion(tuple(range(n)), (-0.5,) * n, text, truncated=n > 9) for text, n, _ in found)
    scores = tuple(Score(float(right), {}, "1", "1", right, right) for *_, right in found)
    return ScoredGroup(Prompt(Problem("p", "q", "1"), "q", (5, 6)), completions, scores)


def test_the_shortest_right_answers_that_differ_are_kept():
    group = answers(("a", 5, True), ("b", 2, False), ("c", 4, True), ("c ", 4, True), ("d", 3, True), ("e", 10, True))
    found = [*self_training.distinct(group, PAYS)]
    assert [len(row.completion) for row in self_training.kept(found, 2)] == [3, 4]
    assert [len(row.completion) for row in self_training.kept(found * 2, 4)] == [3, 4, 5]


def test_conversations_that_end_alike_are_different_answers():
    group = answers(("18", 5, True), ("18", 4, True), ("18", 3, True))
    said = ([Turn("model", text), Turn("model", "18")] for text in ("a", "b", "b"))
    group = replace(
        group, completions=tuple(replace(one, turns=tuple(turns)) for one, turns in zip(group.completions, said))
    )
    assert [len(row.completion) for row in kept(group)] == [4, 5]


def kept(group: ScoredGroup) -> list[TrainingRow]:
    return self_training.kept(self_training.distinct(group, PAYS), CONFIG.warmup.keep)


def test_a_row_has_an_advantage_of_1_and_no_probability_of_a_sampler():
    (row,) = kept(answers(("a", 2, True)))
    assert (row.prompt, row.completion, row.logprobs) == ((5, 6), (0, 1), (0.0, 0.0))
    assert (row.advantage, row.weight) == (1.0, 1.0)


def test_what_an_environment_said_is_not_taught():
    group = answers(("a", 3, True))
    written = (True, False, True)
    (row,) = kept(replace(group, completions=(replace(group.completions[0], written=written),)))
    assert row.mask == written
    assert {sum(one.mask) for one in Lessons(CONFIG, [row]).of(0)} == {2}  # what the loss is divided by


@pytest.mark.parametrize(("right", "remedy"), [(True, "rollout.max_new_tokens"), (False, "easier problems")])
def test_a_round_without_rows_says_why(monkeypatch, right, remedy):
    monkeypatch.setattr(self_training, "collect", lambda *_: [answers(("a", 10, right), ("b", 3, False))])
    asked = SimpleNamespace(problems=[Problem("p", "q", "1")])
    rollouts = SimpleNamespace(config=CONFIG, curriculum=asked, sampler=None, scorer=None)
    rollouts.prompts = rollouts.sampling_of = lambda *_: []
    with refuses("warmup.from", DataError, names=remedy):
        self_training.sample(rollouts, 0, 0)


def test_the_steps_are_divided_among_the_rounds():
    found = [self_training.round_of(CONFIG.warmup, step) for step in range(5)]
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_the_answers_of_a_round_are_read_back_as_they_were_written(tmp_path):
    rows = kept(answers(("a", 2, True), ("b", 3, True)))
    self_training.write(tmp_path, 0, rows)
    found = self_training.read(tmp_path, 0)
    assert [(*row.prompt, *row.completion) for row in found] == [(5, 6, 0, 1), (5, 6, 0, 1, 2)]
    with refuses(tmp_path / "samples/round_002.jsonl", CheckpointError):
        self_training.read(tmp_path, 1)
