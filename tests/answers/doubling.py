"""What a child process of the tests answers: a number twice. It raises Exception for a text, and answers no `None`."""

from collections.abc import Callable


def answerer() -> Callable[[int | str | None], int]:
    def twice(number: int | str | None) -> int:
        if isinstance(number, str):
            raise Exception
        while number is None:
            pass
        return 2 * number

    return twice
