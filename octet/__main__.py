"""The command: `octet`, or `python -m octet`."""

import sys

from octet import must_be_ours


def main() -> None:
    try:
        must_be_ours()
    except ImportError as error:
        print(f"octet: {error}", file=sys.stderr)
        sys.exit(2)
    from trainer.commands.main import main as octet

    octet()


if __name__ == "__main__":
    main()
