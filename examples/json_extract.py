"""A task that is not mathematics: the model reads an order mail, and writes JSON with three fields.

    python examples/json_extract.py            SmolLM2-135M-Instruct from the hub
    python examples/json_extract.py smollm2    a folder with it, as `python scripts/smollm2.py smollm2` makes it

The data have no column with answers: the reward reads the fields of each record from columns of their own. Further
arguments are settings, such as run.steps=30.

After 10 steps the mean reward of greedy answers to 32 held-out mails had risen from 0.211 to 0.859 (95 % interval of
the gain +0.506 to +0.791), in 12 minutes on two CPU cores that other programs kept busy. The mail at the end, whose
name, product and city are in no training mail, was answered by {"name": "Olga", "product": "kettles", "city": "Ghent"}.
One seed was run.
"""

import json
import random
import sys
from itertools import product

from octet import resolve, train

MAILS = [
    "Hi, this is {name}. Please send {count} {product} to my flat in {city}. Thanks!",
    "Dear shop, I would like to order {count} {product}. My address is in {city}. Best wishes, {name}",
    "{name} from {city} here. Could I have {count} {product} by Friday?",
    "Hello, we are moving to {city} and need {count} {product}. Yours, {name}",
]
NAMES = ["Ann", "Ben", "Cara", "Daniel", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas"]
PRODUCTS = ["lamps", "chairs", "blue mugs", "towels", "bookshelves", "garden tools", "plates", "candles"]
CITIES = ["Bonn", "Lyon", "Oslo", "Porto", "Vienna", "Dublin", "Gdansk", "New York"]
FIELDS = ("name", "product", "city")
ASKED = """Mail: Hello, I need 3 soft cushions. Please send them to me in Milan. Kate
JSON: {{"name": "Kate", "product": "soft cushions", "city": "Milan"}}

Mail: {mail}
JSON:"""


def orders():
    """Return mails with their fields, in an order of their own."""
    rng = random.Random(0)
    found = []
    for mail, name, what, city in product(MAILS, NAMES, PRODUCTS, CITIES):
        text = mail.format(name=name, product=what, city=city, count=rng.randint(2, 9))
        found.append({"question": ASKED.format(mail=text), "name": name, "product": what, "city": city})
    rng.shuffle(found)
    return found


def score(completions, name, product, city, **columns):
    """Pay a quarter for a JSON object, and a quarter for each right field in it."""
    return [worth(text, right) for text, right in zip(completions, zip(name, product, city))]


def worth(text, right):
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    return 0.25 + 0.25 * sum(found.get(field) == value for field, value in zip(FIELDS, right))


def ask(model, question):
    """Return the most likely answer of a model in a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    messages = [{"role": "user", "content": question}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = network.generate(**tokens, max_new_tokens=60, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True)


def main(model="HuggingFaceTB/SmolLM2-135M-Instruct", *settings):
    few = ["rollout.problems=4", "rollout.temperature=0.7", "rollout.max_new_tokens=40", "run.steps=10"]
    few += ["eval.problems=32", f"model.name={model}"]
    result = train(resolve("smollm2", None, [*few, *settings]), reward=score, data=orders())
    # its name, product and city are in no training mail
    mail = "Good morning, please bring 4 kettles to our office in Ghent. Regards, Olga"
    print(ask(result.model, ASKED.format(mail=mail)))


if __name__ == "__main__":
    main(*sys.argv[1:])
