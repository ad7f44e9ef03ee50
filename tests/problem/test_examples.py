"""The environments in examples/: what can be found in them is the gold answer."""

import pytest

from tests.conftest import ROOT, said_by
from trainer.config.settings import TaskSettings
from trainer.problem.environment import environments_of
from trainer.problem.task import make_task


def shipped(name):
    settings = TaskSettings(name=f"{ROOT}/examples/{name}.py:build")
    task = make_task(settings)
    return task.train(), environments_of(task, settings)


@pytest.mark.parametrize(("name", "column", "fence"), [("database", "query", "sql"), ("files", "program", "python")])
def test_what_is_run_there_prints_the_gold_answer(name, column, fence):
    problems, environments = shipped(name)
    kinds = {tuple(one.question.splitlines()[-1].split()[:3]): one for one in problems}
    assert len(kinds) >= 4
    for problem in kinds.values():
        session, _ = environments.begin(problem)
        for wrong in ("DROP TABLE orders", "SELEC" if fence == "sql" else "1 / 0"):
            assert not environments.step(session, problem, f"```{fence}\n{wrong}\n```")[1]
        told, is_done, _ = environments.step(session, problem, f"```{fence}\n{problem.extra[column]}\n```")
        assert (told.splitlines()[-1], is_done) == (problem.gold, False)
        assert environments.step(session, problem, f"#### {problem.gold}") == ("", True, 0.0)


def test_a_walk_ends_at_the_chest_or_at_a_wall():
    problems, environments = shipped("maze")
    for problem in problems[:50]:
        start, doors = problem.extra["start"], problem.extra["doors"]
        paths = [(start,)]
        while paths[0][-1] != int(problem.gold):
            paths += [(*paths[0], room) for room in doors[str(paths[0][-1])] if room not in paths[0]]
            del paths[0]
        walk, _ = environments.begin(problem)
        ends = [environments.step(walk, problem, f"#### {room}")[1:] for room in paths[0][1:]]
        assert ends == [(False, 0.1)] * (len(ends) - 1) + [(True, 0.1)]
        assert len(ends) == problem.extra["steps"]
        walk, _ = environments.begin(problem)
        assert environments.step(walk, problem, "perhaps left")[1:] == (False, 0.0)
        assert environments.step(walk, problem, f"#### {start}") == ("", True, 0.0)


@pytest.mark.parametrize("name", ["database", "files", "maze"])
def test_no_wrong_answer_is_paid(name, capsys, monkeypatch):
    monkeypatch.setattr("trainer.reward.exploits.SLOW_S", 99)  # on a busy machine it takes longer
    code, said, _ = said_by(capsys, "reward", "test", f"task.name={ROOT}/examples/{name}.py:build")
    assert code == 0
    assert "nothing found: every right text is paid and no wrong one" in said
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < 120
