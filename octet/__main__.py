"""The command: `octet`, or `python -m octet`."""

import sys

from octet import must_be_ours


def main() -> None:
    try:
        must_be_ours()
        from trainer.commands.main import main as octet
    except ImportError as error:
        print(f"octet: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("octet: stopped.", file=sys.stderr)
        sys.exit(130)
    octet()


if __name__ == "__main__":
    main()
