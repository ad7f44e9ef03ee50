"""Write the table of docs/training.md: what works with each family of models. `python -m scripts.make_models_table`.

The cells are what `trainer/model/families.py` and tables of tests say: tests/model/test_families.py holds them true.
"""

from itertools import groupby

from scripts.count import ROOT
from tests.problem.test_environment import TURNS
from trainer.model.families import ROWS, Family

PAGE = ROOT / "docs/training.md"
HEAD = "| family | decoder | tree | plan | GGUF | turns |\n| --- | --- | --- | --- | --- | --- |\n"
END = "| others | `generate` | if exact | no | no | asked |\n"
# The chat template of a family in TURNS; those of others are not at hand, and each run asks its own.
TEMPLATES = {"qwen2": "qwen2_5", "qwen3": "qwen3", "qwen3_moe": "qwen3", "llama": "llama3_1", "smollm3": "smollm3"}
TEMPLATES |= {"phi3": "phi3", "gemma": "gemma", "gemma3_text": "gemma3", "gemma4_text": "gemma4_v5"}
TEMPLATES |= {"qwen3_5_text": "qwen3_5_think", "lfm2": "lfm2", "gpt_oss": "gptoss"}
SAID = {("yes", "yes"): "yes", ("yes", "no"): "tools", ("no", "no"): "no"}


def cells(row: Family) -> tuple[str, ...]:
    turns = SAID[TURNS[TEMPLATES[row.model_type]]] if row.model_type in TEMPLATES else "asked"
    return (
        "yes" if row.decodes else "`generate`",
        "no" if row.is_eager else "yes",
        "yes",
        "yes" if row.arch else "no",
        turns,
    )


def table() -> str:
    alike = groupby(sorted(ROWS, key=cells, reverse=True), key=cells)
    lines = [(", ".join(f"`{row.model_type}`" for row in rows), *of_all) for of_all, rows in alike]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines) + END


def main() -> None:
    before, _, rest = PAGE.read_text().partition(HEAD)
    PAGE.write_text(before + table() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
