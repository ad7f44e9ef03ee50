"""Read YAML that a person, or an accident, has written. Any input gives either a value or one short error."""

from datetime import date
from math import inf
from typing import Any

import yaml

from trainer.machine.safe_text import visible

LONGEST = 1 << 20  # characters
NAME = 80  # characters of a key in a message
NULL = ("null", "Null", "NULL", "~")


class BadYaml(ValueError):
    """Text that cannot be read. The message is one line for people."""


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would keep the last, and aliases, with which a short text can have an
    endless value. Reads 010 as ten and 1:30 as a text, as YAML 1.2 does, not as 8 and 90."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if isinstance(event := self.peek_event(), yaml.AliasEvent):
            raise BadYaml(f"it has an alias (*{event.anchor}). Write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[Any] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in names:
                name = " ".join(visible(key.value).split())[:NAME]
                raise BadYaml(f"{name} is written twice, again in line {key.start_mark.line + 1}. Remove one")
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        return self.DEFAULT_SCALAR_TAG if tag.endswith((":int", ":float")) and ":" in value else tag

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value).replace("_", "")
        return int(text) if text.lstrip("+-").isdigit() else int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_yaml(content: bytes | str) -> Any:
    """Return the value of a YAML text. Raise BadYaml if it cannot be read."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        if len(text) > LONGEST:
            raise BadYaml(f"it has more than {LONGEST:,} characters")
        return yaml.load(text, _Loader)
    except UnicodeDecodeError as error:
        raise BadYaml(f"not UTF-8: byte {error.start + 1} is {error.object[error.start]:#04x}") from None
    except yaml.YAMLError as error:
        raise BadYaml(" ".join(str(error).split())[:300]) from None
    except BadYaml:
        raise
    except RecursionError:
        raise BadYaml("its lists or mappings are too deep") from None
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:  # `!!int x`, 2024-13-45
        why = f" ({str(error)[:100]})" if isinstance(error, ValueError) else ""
        raise BadYaml(f"a value in it is malformed{why}") from None


def read_setting(text: str) -> Any:
    """Return the value of a setting on a command line: in quotes or brackets that of YAML, otherwise a number, a
    boolean, a date, null, or the text as it was typed, from which YAML would drop ` #2`, `&a` and line breaks."""
    value = read_yaml(text)
    if text[:1] not in tuple("\"'[{"):
        return value if isinstance(value, int | float | date) or text in NULL else text
    *events, _, _ = yaml.parse(text, Loader=yaml.SafeLoader)
    end = events[-1].end_mark
    is_whole = end is not None and end.index == len(text.rstrip()) and len(text.splitlines()) == 1
    if not is_whole or any(getattr(event, "tag", None) or getattr(event, "anchor", None) for event in events):
        raise BadYaml("a part of it (a comment, a line break, an anchor or a tag) would be left out")
    return value


class _OneLine(yaml.SafeDumper):
    """Writes line breaks and control characters as escapes."""

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, style if value.isprintable() else '"')


def written(value: Any) -> str:
    """Return a value as it is written on a command line."""
    text = yaml.dump(value, None, _OneLine, default_flow_style=True, width=inf, allow_unicode=True, sort_keys=False)
    return str(text).removesuffix("...\n").strip()
