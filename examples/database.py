"""A shop's database: the model asks it in SQL as often as it likes, and then answers the question.

octet task show examples/database.py:build -n 1
octet train task.name=examples/database.py:build

Each problem has a database of its own, so that no answer can be known before it is asked. A turn with a block of SQL is
answered with rows, any other turn ends the answer. SQLite runs in the sandbox, and each query has a fresh database.
"""

import random
import re

from trainer.problem.tools import PYTHON

TABLES = """CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, item TEXT, quantity INTEGER, price INTEGER);"""
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lea")
CITIES = ("Bern", "Lyon", "Oslo", "Porto")
ITEMS = ("apples", "books", "chairs", "drums", "eggs")
MOST_ROWS = 20
# The database is made in the same program that runs a query, and the query is data to it.
PROGRAM = """
import sqlite3
database = sqlite3.connect(":memory:")
database.executescript({tables!r})
database.executemany("INSERT INTO customers VALUES (?, ?, ?)", {customers!r})
database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", {orders!r})
found = database.execute({query!r})
print(" | ".join(column[0] for column in found.description or [["done"]]))
rows = found.fetchmany({most} + 1)
for row in rows[:{most}]:
    print(" | ".join(map(str, row)))
if rows[{most}:]:
    print("... and more rows")
"""


def spent(orders):
    return sum(quantity * price for _, _, _, quantity, price in orders)


def of_city(shop, city):
    found = {number for number, _, place in shop["customers"] if place == city}
    return [order for order in shop["orders"] if order[1] in found]


def largest(shop):
    """Return who has spent most, if that is one customer."""
    totals = {name: spent([one for one in shop["orders"] if one[1] == number]) for number, name, _ in shop["customers"]}
    best = max(totals.values())
    names = [name for name, total in totals.items() if total == best]
    return names[0] if len(names) == 1 else None


# What is asked, how Python finds the answer, and how SQL does
CITY = "FROM orders JOIN customers ON customers.id = customer_id WHERE city = '{city}'"
QUESTIONS = {
    "How many orders came from {city}?": (
        lambda shop, city, item: len(of_city(shop, city)),
        f"SELECT count(*) {CITY}",
    ),
    "How much did customers from {city} spend in total (quantity times price)?": (
        lambda shop, city, item: spent(of_city(shop, city)),
        f"SELECT coalesce(sum(quantity * price), 0) {CITY}",
    ),
    "How many {item} were sold?": (
        lambda shop, city, item: sum(order[3] for order in shop["orders"] if order[2] == item),
        "SELECT coalesce(sum(quantity), 0) FROM orders WHERE item = '{item}'",
    ),
    "How many different customers from {city} bought {item}?": (
        lambda shop, city, item: len({order[1] for order in of_city(shop, city) if order[2] == item}),
        f"SELECT count(DISTINCT customer_id) {CITY} AND item = '{{item}}'",
    ),
    "Which customer spent most in total (quantity times price)?": (
        lambda shop, city, item: largest(shop),
        "SELECT name FROM customers JOIN orders ON customers.id = customer_id GROUP BY name "
        "ORDER BY sum(quantity * price) DESC LIMIT 1",
    ),
}


class Session:
    """The queries of one answer."""

    def reset(self, problem):
        self.shop = problem.extra["shop"]

    def step(self, text):
        queries = re.findall(r"```sql\n(.*?)(?:```|\Z)", text, re.DOTALL)
        if not queries:
            return "", True, 0.0
        return PYTHON.use(PROGRAM.format(**self.shop, tables=TABLES, query=queries[-1], most=MOST_ROWS)), False, 0.0


class Shops:
    prompt_style = "gsm8k"

    def train(self):
        return [record for number in range(2000) if (record := shop_of(number))["answer"] is not None]

    def environment(self, problem):
        return Session()


def shop_of(number):
    rng = random.Random(number)
    customers = [(at, name, rng.choice(CITIES)) for at, name in enumerate(rng.sample(NAMES, 8), 1)]
    orders = [(at, rng.randint(1, 8), rng.choice(ITEMS), rng.randint(1, 9), rng.randint(2, 20)) for at in range(1, 41)]
    shop, (asked, (answer, query)) = {"customers": customers, "orders": orders}, rng.choice([*QUESTIONS.items()])
    city, item = rng.choice(CITIES), rng.choice(ITEMS)
    told = "To ask the database, end your message with a block ```sql, and its rows come back."
    question = f"Shop {number} has a SQLite database:\n{TABLES}\n{told}\n{asked.format(city=city, item=item)}"
    found = {"question": question, "answer": answer(shop, city, item), "shop": shop}
    return found | {"query": query.format(city=city, item=item)}


def build(settings):
    return Shops()
