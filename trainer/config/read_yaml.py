"""Read YAML that a person, or an accident, has written: whatever it is, it is a value or one short error."""

from __future__ import annotations

from typing import Any

import yaml

from trainer.machine.visible import visible

DEEPEST = 32  # of lists and mappings inside of each other; settings have four
LONGEST = 1 << 20
NAME = 80  # characters of a key that are shown


class BadYaml(ValueError):
    """Text that cannot be read. Its message is a line for people."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[Any] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in names:
                name = " ".join(visible(key.value).split())[:NAME]
                raise BadYaml(f"{name} is written twice, again in line {key.start_mark.line + 1}. Remove one")
            names.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(content: bytes | str) -> Any:
    """Return the value of a YAML text. Raise BadYaml if it has none, or if it has aliases, with which a short text can
    have an endless value."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        if len(text) > LONGEST:
            raise BadYaml(f"it has more than {LONGEST:,} characters")
        _refuse_depth_and_aliases(text)
        return yaml.load(text, _Loader)
    except UnicodeDecodeError as error:
        raise BadYaml(f"not UTF-8: byte {error.start + 1} is {error.object[error.start]:#04x}") from None
    except yaml.YAMLError as error:
        raise BadYaml(" ".join(str(error).split())[:300]) from None
    except BadYaml:
        raise
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:  # `!!int x`, 2024-13-45
        why = f" ({str(error)[:100]})" if isinstance(error, ValueError) else ""
        raise BadYaml(f"a value in it is not of its kind{why}") from None


def _refuse_depth_and_aliases(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise BadYaml(f"it has lists or mappings more than {DEEPEST} deep")
        if isinstance(event, yaml.AliasEvent):
            raise BadYaml(f"it has an alias (*{event.anchor}). Write the value out")
