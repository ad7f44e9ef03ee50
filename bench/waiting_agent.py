"""The agent of bench/agents.py, which waits between its calls."""

import http.client
import json
import os
import time
from urllib.parse import urlsplit

TURNS, AGAIN, WAIT = 3, "Say it again.", "OCTET_BENCH_WAIT"


def run(problem):
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(address.hostname, address.port)
    messages = [{"role": "user", "content": problem.question}]
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    for turn in range(TURNS):
        time.sleep(float(os.environ[WAIT]) if turn else 0.0)
        connection.request("POST", f"{address.path}/chat/completions", json.dumps({"messages": messages}), headers)
        messages.append(json.load(connection.getresponse())["choices"][0]["message"])
        messages.append({"role": "user", "content": AGAIN})
    connection.close()
