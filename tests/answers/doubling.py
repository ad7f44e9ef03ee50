"""What a child process of the tests answers: a number twice. It never answers `None`."""

from collections.abc import Callable


def answerer() -> Callable[[int | None], int]:
    def twice(number: int | None) -> int:
        while number is None:
            pass
        return 2 * number

    return twice
