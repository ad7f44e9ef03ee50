"""Environments as their own packages make them: `pip install verifiers==0.1.14`, or `openenv==0.10.0` and `uvicorn`.

tests/problem/test_environment.py has what these classes do, where the packages are not installed.
"""

import asyncio
import threading

import pytest

from trainer.problem.adapters import OpenEnv, Verifiers
from trainer.records import Problem

PROBLEM = Problem("p", "How many?", "42")


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
