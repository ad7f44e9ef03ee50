"""The agent of bench/studies/parallel_agent.yaml: it asks twice in parallel, and its reward is how much is right."""

import re
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI


def run(problem):
    client = OpenAI()

    def asked(_):
        messages = [{"role": "user", "content": problem.question}]
        reply = client.chat.completions.create(model="octet", messages=messages).choices[0].message.content
        return re.findall(r"#### *(-?\d{1,9})\s*$", reply) == [problem.gold]

    with ThreadPoolExecutor() as pool:
        return sum(pool.map(asked, range(2))) / 2
