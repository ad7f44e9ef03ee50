"""What a child process of the tests answers: a number twice. It never answers `None`, and raises Exception for a text."""

from collections.abc import Callable


def answerer() -> Callable[[int | str | None], int]:
    def twice(number: int | str | None) -> int:
        if isinstance(number, str):
            raise Exception
        while number is None:
            pass
        return 2 * number

    return twice
