"""Functions of a user: called as TRL calls them, and never believed blindly."""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.conftest import launch, program, ran, refuses
from tests.forks import forked
from tests.rewarding import PROBLEM, PROMPT, answer, scorer_of, scores_of
from trainer.config.resolve import resolve
from trainer.errors import RewardError
from trainer.machine import user_code
from trainer.problem.task import make_task
from trainer.records import Prompt
from trainer.reward.make import rehearse_functions
from trainer.reward.scorer import Scorer


@pytest.fixture
def mine(tmp_path):

    def write(body: str, *overrides: str) -> Scorer:
        (tmp_path / "my_rewards.py").write_text(body)
        return scorer_of(f"reward.custom={tmp_path}/my_rewards.py:score", *overrides)

    return write


def grades(scorer: Scorer, *texts: str) -> list[float | None]:
    return [score.components["score"] for score in scores_of(scorer, *texts)]


SEEN = "seen = {}\ndef score(**columns):\n    seen.update(columns)\n    return [0.5] * len(columns['completions'])\n"


def seen_by(scorer: Scorer) -> dict[str, list[object]]:
    return scorer.graders[0].function.__globals__["seen"]


def test_it_gets_what_trl_gives_and_the_columns_of_the_record_first(mine):
    scorer = mine(SEEN)
    assert grades(scorer, "a", "b") == [0.5, 0.5]
    one = {"prompts": "Question: What is 3 * 4?", "completion_ids": [0, 1, 2], "question": "What is 3 * 4?"}
    one |= {"answer": "12", "gold": "12", "solution": "3 * 4 = 12\n#### 12", "problem_id": "p/7", "level": "easy"}
    assert seen_by(scorer) == {"completions": ["a", "b"], **{name: [value] * 2 for name, value in one.items()}}
    problem = replace(PROBLEM, extra={"answer": "twelve", "prompt": "not a column"})
    scorer.score(Prompt(problem, "text", ()), [answer("a")])
    assert seen_by(scorer)["answer"] == ["twelve"]
    assert "prompt" not in seen_by(scorer)
    other = Prompt(replace(PROBLEM, extra={"topic": "sums"}), "", ())
    scorer.scores([(PROMPT, answer("a")), (other, answer("b"))])
    assert (seen_by(scorer)["level"], seen_by(scorer)["topic"]) == (["easy", None], [None, "sums"])


@pytest.mark.parametrize(("column", "asked"), [("Frage", ["What is 3 * 4?"]), ("prompt", None)])
def test_it_gets_the_question_under_the_name_of_its_column(mine, column, asked):
    """Not under those names that TRL does not pass."""
    scorer = mine(SEEN, "task.name=records", f"task.question={column}", "task.path=here.jsonl")
    assert grades(scorer, "a") == [0.5]
    assert seen_by(scorer).get(column) == asked


def test_a_problem_without_a_gold_answer_has_none_to_compare_with(mine):
    """An empty one would be in every completion."""
    scorer = mine("def score(completions, answer, gold): return [float(answer == gold == [None])]")
    prompt = Prompt(replace(PROBLEM, gold="", solution=""), "", ())
    assert scorer.score(prompt, [answer("a")]).rewards_G == (1.0,)


def test_what_only_trl_passes_may_have_a_default(mine):
    assert grades(mine("def score(completions, environments=None, log_metric=None): return [1.0]"), "a") == [1.0]


CHAT = [{"role": "user", "content": "3 * 4?"}]


@pytest.mark.parametrize("setting, messages, prompt", [
    ("auto", tuple(CHAT), CHAT),
    ("chat", (), [{"role": "user", "content": "What is 3 * 4?"}]),
])  # fmt: skip
def test_functions_for_chats_run_unchanged(mine, setting, messages, prompt):
    """The reward of TRL's documentation, word for word in its way of reading a completion."""
    scorer = mine(
        "import re\nseen = {}\n"
        "def score(completions, **kwargs):\n"
        "    seen.update(kwargs)\n"
        "    contents = [completion[0]['content'] for completion in completions]\n"
        "    return [1.0 if re.match(r'^<think>.*?</think>', content) else 0.0 for content in contents]\n",
        f"reward.custom_format={setting}",
    )
    problem = Prompt(replace(PROBLEM, messages=messages), "text", ())
    scores = scorer.score(problem, [answer("<think>a</think>b"), answer("b")]).scores
    assert [score.components["score"] for score in scores] == [1.0, 0.0]
    assert seen_by(scorer)["prompts"] == [prompt] * 2

    texts = mine(SEEN, "reward.custom_format=text")
    texts.score(Prompt(replace(PROBLEM, messages=tuple(CHAT)), "text", ()), [answer("a")])
    assert (seen_by(texts)["prompts"], seen_by(texts)["completions"]) == (["text"], ["a"])


@pytest.mark.parametrize("score", [
    "async def score(completions, **columns): return await asyncio.gather(*map(one, completions))",
    "def score(completions, **columns): return [asyncio.run(one(text)) for text in completions]",
])  # fmt: skip
def test_async_functions(mine, score):
    one = "async def one(text):\n    await asyncio.sleep(0.01)\n    return float(len(text))\n"
    assert grades(mine(f"import asyncio\n{one}{score}"), "a", "bcd") == [1.0, 3.0]


def test_none_leaves_a_sample_out_of_its_group(mine):
    scorer = mine("def score(completions, **columns): return [None if c == 'skip' else 1 for c in completions]")
    group = scorer.score(PROMPT, [answer("skip"), answer("#### 12"), answer("no")])
    assert group.rewards_G == (None, 1.0, 1.0)


def test_a_weight_and_several_functions(tmp_path):
    (tmp_path / "a.py").write_text("def one(completions, **c): return [1.0]\ndef two(completions, **c): return [10]")
    scorer = scorer_of(f"reward.custom=[{tmp_path}/a.py:one,{tmp_path}/a.py:two]", "reward.weights={two: 0.5}")
    assert scores_of(scorer, "x")[0].reward == pytest.approx(6.0)
    assert {"time/reward/one", "time/reward/two"} <= set(scorer.drain())


@pytest.mark.parametrize("returned, grade", [
    ("[True]", 1.0), ("(1,)", 1.0), ("iter([0.25])", 0.25), ("decimal.Decimal('0.5'),", 0.5),
    ("[numpy.float32(0.5)]", 0.5), ("[torch.tensor(2)]", 2.0),
    ("[os.waitstatus_to_exitcode(os.waitpid(os.fork() or os._exit(5), 0)[1])]", 5.0),  # a fork may end
])  # fmt: skip
def test_numbers_of_any_kind(mine, returned, grade):
    body = f"import decimal, numpy, os, torch\ndef score(completions, **c): return {returned}"
    assert grades(mine(body), "a") == [grade]


def test_what_a_function_prints_is_no_result(mine, capsys):
    """Results are on standard output; closing it has no effect on them."""
    body = "import sys\nprint('loaded')\ndef score(completions):\n    print('scored')\n    sys.stdout.close()\n"
    assert grades(mine(f"{body}    return [1]\n"), "a") == [1]
    print("result")
    out, err = capsys.readouterr()
    assert (out, err.split()) == ("result\n", ["loaded", "scored"])


def test_standard_output_may_be_an_object_of_a_script(mine, monkeypatch):
    bare = SimpleNamespace(write=len, flush=list)
    monkeypatch.setattr(sys, "stdout", bare)
    assert grades(mine("def score(completions): return [1]"), "a") == [1]
    assert sys.stdout is bare


def test_a_limit_that_a_function_sets_is_its_own_and_what_is_new_in_the_environment_stays(mine, monkeypatch):
    monkeypatch.delenv("OCTET_OF_A_REWARD", raising=False)
    limit = sys.getrecursionlimit()
    change = "    sys.setrecursionlimit(5000)\n    os.environ['OCTET_OF_A_REWARD'] = '1'\n"
    assert grades(mine(f"import os, sys\ndef score(completions):\n{change}    return [1]"), "a") == [1]
    assert (sys.getrecursionlimit(), os.environ["OCTET_OF_A_REWARD"]) == (limit, "1")


def test_a_change_of_the_whole_process_is_named_with_the_function(mine):
    """Changes that have the same message on every machine are in tests/data/refusals.yaml."""
    change = "torch.set_num_threads(torch.get_num_threads() + 1)"
    scorer = mine(f"import torch\ndef score(completions):\n    {change}\n    return [1.0]")
    with refuses("reward.custom", RewardError, names="get_num_threads"):
        grades(scorer, "a")


@pytest.mark.parametrize("body, told", [
    # the first call imports torch, and the second would find it as the first has left it
    ("def score(completions):\n    import torch\n    torch.set_default_dtype(torch.float64)\n    return [1.0]\n",
     "after the call it is torch.float64 for the whole process. Sample: problem"),
    ("import torch\ntorch.set_default_dtype(torch.float64)\ndef score(): pass",
     "mine.py:score: the file cannot be imported: RuntimeError: torch.get_default_dtype() was"),
])  # fmt: skip
def test_a_setting_of_torch_that_is_changed_while_torch_is_imported_is_named(tmp_path, body, told):
    (tmp_path / "mine.py").write_text(body)
    scoring = f"scores_of(scorer_of('reward.custom={tmp_path}/mine.py:score'), 'a')"
    assert told in ran(sys.executable, "-c", f"from tests.rewarding import *; {scoring}").stderr


RESTORED = [
    "os.environ.clear()", "os.environ['PATH'] = ''", "del os.environ['PATH']", "os.environ = {}",
    "sys.stderr = None", "sys.stdout = None",
    "warnings.simplefilter('error')", "warnings.filterwarnings('error', category=FutureWarning)",
    "os.fork()", "os.fork(); os.fork()", "os.fork() or time.sleep(0.2)", "os.environ.clear(); raise ValueError",
    "sys.path.clear()", "sys.path = []", "os.chdir('/')",
]  # fmt: skip
STATE = """
import os, sys, warnings
from pathlib import Path
from tests.rewarding import scorer_of, scores_of
from trainer.errors import RewardError

def state():
    strict = [one for one in warnings.filters if one[0] == "error"]
    return dict(os.environ), os.popen("echo $PATH").read(), strict, [*sys.path], os.getcwd()

for number, change in enumerate(CHANGES):
    body = f"import os, sys, time, warnings\\ndef score(completions):\\n    {change}\\n    return [1.0]"
    Path(f"mine{number}.py").write_text(body)
    scorer = scorer_of(f"reward.custom=mine{number}.py:score")
    before = state()
    try:
        scores_of(scorer, "a")
    except RewardError:
        pass
    assert state() == before, (change, state(), before)
    warnings.warn(f"a warning {number}", FutureWarning)
    print(change, flush=True)
    print("said", file=sys.stderr)
"""


def test_a_change_of_the_process_is_put_back(tmp_path):
    """The program goes on with what it had, and no process that was forked goes on beside it."""
    done = launch(*forked(), "-c", f"CHANGES = {RESTORED}{STATE}", folder=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, RESTORED), done.stderr
    assert done.stderr.count("said") == len(RESTORED)


def test_code_that_never_lets_go_of_the_interpreter_ends_the_process(tmp_path):
    body = "import re\ndef score(completions, **c):\n    return [re.match('(a+)+$', 'a' * 40 + 'b')]\n"
    (tmp_path / "mine.py").write_text(body)
    quick = "from trainer.machine import user_code; user_code.GRACE_S = 0.2"
    scorer = f"scorer_of('reward.custom={tmp_path}/mine.py:score', 'reward.timeout=0.2')"
    done = ran(sys.executable, "-c", f"from tests.rewarding import *; {quick}; scores_of({scorer}, 'a')")
    assert done.returncode == 1
    assert f'"{tmp_path}/mine.py", line 3 in score' in done.stderr


def test_a_file_may_import_its_neighbour_and_define_dataclasses(tmp_path, mine):
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 0.25")
    body = "from __future__ import annotations\nfrom neighbour_of_mine import VALUE\nfrom dataclasses import dataclass"
    body += "\n@dataclass\nclass A:\n    x: int\ndef score(completions, **c): return [VALUE]"
    assert grades(mine(body), "a") == [0.25]


@pytest.mark.parametrize(("body", "early"), [
    ("def score(prompts, completions, **c): return [1.0]", True),
    ("def score(prompts, completions): return [p[0] for p in prompts]", False),
    ("def score(completions, **c): return [1.0 for _ in c['prompts']]", False),
    ("def around(f): return lambda **c: f(**c)\n@around\ndef score(prompts, completions): return [1.0]", False),
    ("def score(completions, completion_ids): return [ids[-1] for ids in completion_ids]", False),  # none is empty
])  # fmt: skip
def test_a_wrong_number_of_rewards_is_found_before_torch_unless_prompts_are_read(tmp_path, body, early):
    (tmp_path / "mine.py").write_text(body)
    config = resolve("nano", None, [f"reward.custom={tmp_path}/mine.py:score"])
    task = make_task(config.task)
    with refuses("reward.custom", RewardError, names="1 rewards for 4") if early else nullcontext():
        rehearse_functions(config, task, PROBLEM)


def test_a_run_rehearses_before_the_model_is_loaded(tmp_path, monkeypatch, alone):
    from trainer.config.request import Request
    from trainer.run import assemble

    (tmp_path / "mine.py").write_text("def score(completions, **c): raise ValueError('bad')")
    config = resolve("nano", None, [f"reward.custom={tmp_path}/mine.py:score", f"run.dir={tmp_path}/run"])
    monkeypatch.setattr(assemble, "load_model", lambda *arguments: pytest.fail("the model was loaded"))
    with refuses("reward.custom", RewardError, names="ValueError: bad (mine.py, line 1"):
        assemble.build(Request(config, "nano", ""))


def test_files_of_one_name_are_both_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    one = "def score(completions): return [1.0]\n"
    files = [program(tmp_path / folder / "game.py", one) for folder in ("m1", "m2")]
    functions = [user_code.load("reward.custom", f"{file}:score") for file in files]
    assert [sys.modules[one.__module__].__file__ for one in functions] == [*map(str, files)]
