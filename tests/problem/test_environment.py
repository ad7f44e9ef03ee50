"""What replies to a model: environments of a task, of tools, and of other libraries, the real ones of which need
`pip install verifiers==0.1.14`, or `openenv==0.10.0` and `uvicorn`."""

import asyncio
import io
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import yaml
from transformers.utils import get_json_schema

from tests.conftest import NANO, refuses, templated
from trainer.config.settings import PromptSettings, TaskSettings
from trainer.errors import DataError
from trainer.machine import user_code
from trainer.problem.environment import Environments, environments_of
from trainer.problem.foreign_environments import OpenEnv, Verifiers
from trainer.problem.prompts import Prompter
from trainer.problem.task import make_task
from trainer.problem.word_problems import NanoTask
from trainer.records import Problem

PROBLEM = Problem("p", "How much is 3 * 14?", "42")
GUESSING = """
class Game:
    def reset(self, problem):
        self.secret = int(problem.gold)
        return f"Guess {problem.question}"

    def step(self, text):
        return ("higher" if int(text) < self.secret else "lower"), int(text) == self.secret, 0.5

class Guessing:
    prompt_style = "chat"

    def train(self):
        return [{"question": f"number {n}", "answer": n} for n in range(20)]

    def environment(self, problem):
        return Game()

def build(settings):
    return Guessing()
"""
HERMES = """{%- if tools %}{{ '<|im_start|>system\nTools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}{% if message.role == 'tool' %}\
{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{% else %}\
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def prompter(tokenizer, template=None, task=None, style="chat", **settings):
    task, tokenizer = task or NanoTask(), templated(tokenizer, template) if template else tokenizer
    found = environments_of(task, TaskSettings(**settings), tokenizer.chat_template)
    return Prompter(tokenizer, PromptSettings(style=style), task, found)


@pytest.fixture
def guessing(tmp_path):
    (tmp_path / "guessing.py").write_text(GUESSING)
    return TaskSettings(name=f"{tmp_path}/guessing.py:build")


def test_a_task_of_ones_own_brings_its_environment(guessing, tokenizer):
    task = make_task(guessing)
    environments = environments_of(task, guessing)
    problem = next(one for one in task.train() if one.gold == "7")
    environment, asked = environments.begin(problem)
    assert asked == "Guess number 7"
    assert environments.step(environment, problem, "3") == ("higher", False, 0.5)
    assert environments.step(environment, problem, "7") == ("lower", True, 0.5)
    prompt = Prompter(tokenizer, PromptSettings(), task, environments).prompt(problem)
    assert prompt.text == "<|im_start|>user\nGuess number 7<|im_end|>\n<|im_start|>assistant\n"
    with refuses("task.name", DataError, names="guessing.py, line 8"):
        environments.step(environment, problem, "seven")


def test_a_forgotten_return_of_environment_is_named(tmp_path):
    (tmp_path / "guessing.py").write_text(GUESSING.replace("return Game()", "Game()"))
    settings = TaskSettings(name=f"{tmp_path}/guessing.py:build")
    task = make_task(settings)
    with refuses("task.name", DataError, names="environment() returned None for guessing/train/0"):
        environments_of(task, settings).begin(task.train()[0])


def only(game, **options):
    return Environments("task.name=mine.py:build", Path("mine.py"), lambda problem: game, **options)


def replying(reply, asked=None):
    return only(SimpleNamespace(reset=lambda problem: asked, step=lambda text: reply), may_ask=True)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_reply_may_have_the_numbers_of_numpy(kind):
    environments = replying(kind(("x", numpy.bool_(True), numpy.float32(0.5))))
    environment, _ = environments.begin(PROBLEM)
    assert environments.step(environment, PROBLEM, "") == ("x", True, 0.5)
    for reward in (10**400, float("inf"), "1", None, []):
        wrong = replying(("x", False, reward))
        with refuses("task.name", DataError, names="Return"):
            wrong.step(wrong.begin(PROBLEM)[0], PROBLEM, "")


def test_what_an_async_environment_begins_goes_on_in_its_next_turn():
    class Waits:
        async def reset(self, problem):
            self.said = asyncio.get_running_loop().create_future()
            self.work = asyncio.create_task(self.work_on())

        async def work_on(self):
            await asyncio.sleep(0.05)
            self.said.set_result("done")

        async def step(self, text):
            if text == "stop":
                raise SystemExit(0)
            return await asyncio.wait_for(self.said, 5), False, 0.0

    environments = only(Waits())
    environment, _ = environments.begin(PROBLEM)
    with refuses("task.name", DataError, names="SystemExit"):
        environments.step(environment, PROBLEM, "stop")
    assert environments.step(environment, PROBLEM, "") == ("done", False, 0.0)


def test_a_question_that_does_not_come_is_not_waited_for(tokenizer):
    may_end = threading.Event()
    game = SimpleNamespace(reset=lambda problem: may_end.wait(60), step=lambda text: "")
    with refuses("task.name", DataError, names="rollout.turns.seconds"):
        Prompter(tokenizer, PromptSettings(), NanoTask(), only(game, seconds=0.1, may_ask=True)).prompt(PROBLEM)
    may_end.set()


def test_half_a_character_is_no_question_and_a_reply_may_have_the_mark_of_a_turn_in_it(tokenizer):
    found = Prompter(tokenizer, PromptSettings(), NanoTask(), replying(("x", True, 0.0), asked="half \ud800"))
    assert "half ?" in found.prompt(PROBLEM).text
    assert "one OCTET-TURN two OCTET-TURN-<" in found.reply(PROBLEM, "one OCTET-TURN two OCTET-TURN-")


def test_the_prompt_says_how_to_call_a_tool(tokenizer):
    fenced = prompter(tokenizer, tools=("calculator",)).prompt(PROBLEM).text
    assert "How much is 3 * 14?\n\nYou may call tools." in fenced
    assert "```calculator\n12 * (3 + 4)\n```" in fenced
    talk = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"})
    chat = Problem("p", "q", "42", messages=talk)
    assert "user\nq\n\nYou may call tools." in prompter(tokenizer, tools=("calculator",)).prompt(chat).text
    own = prompter(tokenizer, HERMES, tools=("calculator",)).prompt(PROBLEM).text
    assert '"name": "calculator"' in own
    assert "You may call" not in own
    unread = with_template(tokenizer, "gemma4_v5", {}, has_tools=True)  # its calls have a form that nobody would read
    assert "```calculator" in unread.prompt(PROBLEM).text
    inline = prompter(tokenizer, tools=("calculator",), calls="inline")
    assert inline.prompt(PROBLEM) == prompter(tokenizer).prompt(PROBLEM)
    assert inline.stop_strings == ("=",)


def test_a_reply_stands_in_the_template_as_it_would_in_the_conversation(tokenizer):
    asked = prompter(tokenizer, HERMES, tools=("calculator",))
    said = asked.reply(PROBLEM, "42")
    assert "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n" in said
    messages = [*asked.messages(PROBLEM), {"role": "assistant", "content": "wait"}, {"role": "tool", "content": "42"}]
    options = {"tokenize": False, "add_generation_prompt": True, "tools": list(asked.environments.schemas)}
    whole = asked.tokenizer.apply_chat_template(messages, **options)
    assert asked.prompt(PROBLEM).text + "wait" + said == whole
    begun = Problem("p", "q", "42", messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": "I"}))
    assert asked.reply(begun, "42") == said
    assert prompter(tokenizer, tools=("calculator",), calls="inline").reply(PROBLEM, " 42") == " 42"
    plain = prompter(templated(tokenizer, None), tools=("calculator",))
    assert plain.reply(PROBLEM, "42") == "\n\nQuestion: 42\nAnswer:"


SMOLLM3 = """{% set mode = '/think' if enable_thinking is undefined or enable_thinking else '/no_think' %}\
{{ '<|im_start|>system\nReasoning Mode: ' + mode }}{% for tool in xml_tools or [] %}{{ tool | string }}{% endfor %}\
{{ '<|im_end|>\n' }}{% set begun = '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') %}\
{% for message in messages %}{% if message.role == 'assistant' %}\
{{ begun + message.content.lstrip('\n') + '<|im_end|>\n' }}{% else %}\
{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ begun }}{% endif %}"""
# Whether chat templates, by their names in TRL, keep turns with tools and with an environment, or with which variable.
KEPT = {
    ("yes", "yes"): "qwen2_5 qwen3_instruct_2507 llama3_1 smollm3 gemma gemma3 gemma4_v5 phi3 lfm2",
    ("yes", "no"): "qwen3 qwen3_5_think qwen3_5_nothink",
    ("yes", "preserve_thinking: true"): "qwen3_6 lfm2_2_5_v2",
    ("enable_thinking: false", "enable_thinking: false"): "qwen3_8",
    ("no", "no"): "gptoss",
}
TURNS = {name: kept for kept, names in KEPT.items() for name in names.split()}


def with_template(tokenizer, name, variables, *, has_tools):
    """Return a prompter for a published template, with tools or with an environment that speaks as the user."""
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    text = SMOLLM3 if name == "smollm3" else (folder / f"{name}.jinja").read_text()
    text = text.replace("bos_token", "''")
    found = Environments("task.name", Path("mine.py"), lambda problem: None)
    if has_tools:
        found = environments_of(NanoTask(), TaskSettings(tools=("calculator",)), text)
    settings = PromptSettings(style="chat", template=variables)
    return Prompter(templated(tokenizer, text), settings, NanoTask(), found)


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("name", TURNS)
def test_the_templates_of_models_that_keep_their_turns(tokenizer, name, has_tools):
    kept = TURNS[name][0 if has_tools else 1]
    if kept != "yes":
        with refuses("task.tools" if has_tools else "task.name", names=kept if kept != "no" else "Qwen2.5"):
            with_template(tokenizer, name, {}, has_tools=has_tools)
    if kept != "no":
        variables = {} if kept == "yes" else yaml.safe_load(f"{{{kept}}}")
        assert "42" in with_template(tokenizer, name, variables, has_tools=has_tools).reply(PROBLEM, "42")


def test_a_switch_for_thoughts_decides_whether_they_must_be_kept(tokenizer):
    """Gemma 4 leaves out its own thoughts, which it has only if asked; Qwen3.5 has one in each turn or in none."""
    with refuses("task.name", names="enable_thinking: false"):
        with_template(tokenizer, "gemma4_v5", {"enable_thinking": True}, has_tools=False)
    for thinks in (True, False):
        asked = with_template(tokenizer, "qwen3_5_think", {"enable_thinking": thinks}, has_tools=True)
        begun = "<think>\n" if thinks else "<think>\n\n</think>\n\n"
        assert asked.prompt(PROBLEM).text.endswith(begun)
        assert asked.reply(PROBLEM, "42").endswith(f"42\n</tool_response><|im_end|>\n<|im_start|>assistant\n{begun}")
        assert "/no_think" not in asked.prompt(PROBLEM).text
    text = with_template(tokenizer, "smollm3", {"enable_thinking": False}, has_tools=True).prompt(PROBLEM).text
    assert "/no_think" in text
    assert "calculator" in text


def test_a_client_of_openenv():
    def result(text, reward=None, done=False):
        return SimpleNamespace(observation={"text": text}, reward=reward, done=done)

    calls = {"reset": lambda: result("ready"), "close": lambda: closed.append(client)}
    calls["step"] = lambda action: result(action["message"].upper(), 1.0, action["message"] == "bye")
    client, closed = SimpleNamespace(**calls), []
    environment = OpenEnv(client, lambda text: {"message": text}, lambda observation: observation["text"])
    assert environment.reset(PROBLEM) == "ready"
    assert [environment.step(text) for text in ("hi", "bye")] == [("HI", False, 1.0), ("BYE", True, 1.0)]
    environment.close()
    assert closed == [client]


class Doubts:
    """What an environment of verifiers does; versions differ in what their methods take and return."""

    def __init__(self, returns_state):
        self.returns_state = returns_state
        self.rubric = self

    async def setup_state(self, state, **kwargs):
        return state

    async def is_completed(self, messages, state):
        return [one.role for one in messages] == ["user", "assistant"] * 2  # its own messages have it since 0.1.9

    def env_response(self, messages, state, **kwargs):
        assert not hasattr(messages[0], "model_dump")
        said = [{"role": "user", "content": f"Sure about {messages[-1]['content']}?"}]
        return (said, state) if self.returns_state else said

    async def score_rollout(self, prompt, completion, answer, state):
        reward = float(completion[-1]["content"] == answer)
        state["reward"] = reward
        return SimpleNamespace(reward=reward) if self.returns_state else None


@pytest.mark.parametrize("returns_state", [True, False])
def test_an_environment_of_verifiers(returns_state):
    environment = Verifiers(Doubts(returns_state))
    asyncio.run(environment.reset(replace(PROBLEM, gold="", extra={"answer": "42"})))  # with task.answer=none
    assert asyncio.run(environment.step("41")) == ("Sure about 41?", False, 0.0)
    assert asyncio.run(environment.step("42")) == ("", True, 1.0)
    with pytest.raises(TypeError, match="tools = env"):
        Verifiers(SimpleNamespace(tool_defs=["search"]))


TRL = """
class Counter:
    def reset(self, start, prompt, **columns):
        self.value = start
        return f" Start: {self.value}."

    def add(self, amount: int) -> int:
        '''Add to the counter.

        Args:
            amount: How much to add.
        '''
        self.value += amount
        return self.value

    def get_reward(self):
        return float(self.value)

async def double(number: float) -> float:
    '''Double a number.

    Args:
        number: The number.
    '''
    return number * 2

class Mine:
    prompt_style = "chat"
    environment_factory = Counter
    tools = [double]

    def train(self):
        system = {"role": "system", "content": "Count."}
        return [{"prompt": [system, {"role": "user", "content": f"Reach {n}."}], "start": n} for n in range(9)]

def build(settings):
    return Mine()
"""


def of_trl(tmp_path, text=TRL):
    (tmp_path / "mine.py").write_text(text)
    return make_task(TaskSettings(name=f"{tmp_path}/mine.py:build", answer="none"))


def test_what_trl_takes_as_environment_and_tools_is_used_as_it_is(tokenizer, tmp_path):
    task = of_trl(tmp_path)
    asked = prompter(tokenizer, HERMES, task)
    problem = next(one for one in task.train() if one.question == "Reach 4.")
    text = asked.prompt(problem).text
    shown = ('"name": "add"', "How much to add.", '"name": "double"', "system\nCount.", "user\nReach 4. Start: 4.<|")
    assert [part for part in shown if part not in text] == []
    environment, _ = asked.environments.begin(problem)
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    said = call % ("add", '{"amount": 3}') + call % ("double", '{"number": 1.5}')
    assert asked.environments.step(environment, problem, said) == ("7\n3.0", False, 0.0)
    said = call % ("add", "{}") + call % ("reset", '{"start": 99}') + call % ("get_reward", "{}")
    told, done, _ = asked.environments.step(environment, problem, said)
    assert (done, told.count("Error: "), "there is no tool 'reset'" in told) == (False, 3, True)
    assert asked.environments.step(environment, problem, "I am there.") == ("", True, 7.0)


def test_the_tools_of_trl_are_called_in_fenced_blocks_if_the_chat_template_has_no_tools(tokenizer, tmp_path):
    asked = prompter(tokenizer, None, of_trl(tmp_path))
    problem = replace(PROBLEM, extra={"start": 4})
    text = asked.prompt(problem).text
    assert "3 * 14? Start: 4.\n\nYou may call" in text
    assert "add: Add to the counter. Write amount (integer): How much to add." in text
    environment, _ = asked.environments.begin(problem)
    said = "```add\n3\n``` and ```double\n1.5\n``` and ```add\nten\n```"
    told, done, _ = asked.environments.step(environment, problem, said)
    assert (told.splitlines()[:2], "Error: amount: " in told, done) == (["7", "3.0"], True, False)
    assert asked.environments.step(environment, problem, "I am there.") == ("", True, 7.0)


@pytest.mark.filterwarnings("ignore")  # of TRL, about its own arguments
def test_trl_shows_a_model_the_same_tools_and_gives_the_same_reward(tmp_path, tokenizer, monkeypatch):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    task = of_trl(tmp_path)
    own = user_code.load("task.name", f"{tmp_path}/mine.py:build")(None)
    template = Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja"
    monkeypatch.setattr(tokenizer, "chat_template", template.read_text())
    options = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 1}
    options |= {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 2}
    own = {"environment_factory": own.environment_factory, "tools": own.tools, "train_dataset": own.train()[6:7]}
    own["train_dataset"] = datasets.Dataset.from_list(own["train_dataset"])
    theirs = trl.GRPOTrainer(str(NANO), args=trl.GRPOConfig(**options), processing_class=tokenizer, **own)
    assert tuple(map(get_json_schema, theirs.tools)) == environments_of(task, task.settings, HERMES).schemas
    theirs.train()
    assert theirs.state.log_history[-1]["rewards/Counter/mean"] == 6.0


def test_tools_of_trl_that_cannot_be_described_are_refused(tokenizer, tmp_path):
    with refuses("task.name", names="cannot be described"):
        prompter(tokenizer, HERMES, of_trl(tmp_path, TRL.replace("amount: How", "other: How")))


def test_user_code_in_several_threads_leaves_standard_output_as_it_was(monkeypatch, capfd):
    """The first to enter is the first to leave, so what each would put back is not what was there before."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    before, entered, may_leave = sys.stdout, threading.Event(), threading.Event()

    def first():
        with user_code.contained:
            entered.set()
            may_leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    with user_code.contained:
        may_leave.set()
        thread.join(10)
        print("from user code")
    assert sys.stdout is before
    print("from Octet")
    assert before.getvalue() == "from Octet\n"


def test_an_environment_of_verifiers_as_its_package_makes_it():
    vf, datasets = pytest.importorskip("verifiers"), pytest.importorskip("datasets")
    if not hasattr(vf, "MultiTurnEnv"):
        pytest.skip("verifiers 0.4 has other classes")

    class Doubts(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "Sure?"}]

    async def right(completion, answer, **kwargs):
        return float(completion[-1]["content"] == answer)

    data = datasets.Dataset.from_list([{"question": "How many?", "answer": "42"}])
    environment = Verifiers(Doubts(dataset=data, rubric=vf.Rubric(funcs=[right]), max_turns=2))

    async def play():
        await environment.reset(PROBLEM)
        return [await environment.step(text) for text in ("41", "42")]

    assert asyncio.run(play()) == [("Sure?", False, 0.0), ("", True, 1.0)]


def test_a_server_of_openenv_as_its_package_makes_it():
    core, uvicorn = pytest.importorskip("openenv.core"), pytest.importorskip("uvicorn")
    from openenv.core.env_server import http_server, interfaces, types

    class Say(types.Action):
        message: str

    class Heard(types.Observation):
        text: str = ""

    class Echo(interfaces.Environment):
        state = types.State()

        def reset(self, seed=None, episode_id=None, **others):
            return Heard(text=f"ready {seed}", done=False)

        def step(self, action, **others):
            return Heard(text=action.message.upper(), done=action.message == "bye", reward=1.0)

    app = http_server.create_fastapi_app(Echo, Say, Heard)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = core.GenericEnvClient(base_url=f"http://127.0.0.1:{port}").sync()
    begin = lambda client, problem: client.reset(seed=7)  # noqa: E731  as a user writes it
    environment = OpenEnv(client, lambda text: {"message": text}, lambda seen: seen["text"], begin)
    assert environment.reset(PROBLEM) == "ready 7"
    assert [environment.step(text) for text in ("hi", "bye")] == [("HI", False, 1.0), ("BYE", True, 1.0)]
    environment.close()
    server.should_exit = True
    thread.join()
