"""Parts of regular expressions."""


def any_of(words: str) -> str:
    """Return a pattern for any of the words. `_` stands for the space in a phrase: `twice up_to`."""
    return "(?:" + "|".join(words.split()).replace("_", r"\s+") + ")"
