"""`octet completion`: a script that lets a shell complete commands, options, presets, recipes and settings."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from trainer.commands.main import COMMANDS, parser_of
from trainer.config.arguments import PRESETS, RECIPES, names_in
from trainer.config.sections.task import BUILT_IN
from trainer.config.settings import Config, fields, is_section

FOR_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
# bash splits a line at the `=` of a setting, zsh does not. Without words, the shell completes names of files.
SCRIPT = """_octet() {{
    local settings="{settings}" setting="" before=""
    local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD - 1]}}"
    local words="{commands} --help --version"
    [ "$COMP_CWORD" -eq 1 ] || case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
    esac
    case "${{COMP_WORDS[1]}} $previous" in
{options}
    esac
    if [ "$word" = "=" ]; then
        setting="$previous" word=""
    elif [ "$previous" = "=" ]; then
        setting="${{COMP_WORDS[COMP_CWORD - 2]}}"
    elif [[ "$word" == *=* ]]; then
        setting="${{word%%=*}}" before="${{word%%=*}}=" word="${{word#*=}}"
    fi
    [ -z "$setting" ] || case "$setting" in
{values}
    *) words="" ;;
    esac
    COMPREPLY=($(compgen -P "$before" -W "$words" -- "$word"))
    if [[ "${{COMPREPLY[0]:-}}" == *= ]] && type compopt >/dev/null 2>&1; then compopt -o nospace; fi
}}
complete -o bashdefault -o default -F _octet octet
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet completion bash >> ~/.bashrc"
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(options: Namespace) -> None:
    parsers = {name: parser_of(name) for name in COMMANDS}
    words = {
        "commands": " ".join(COMMANDS),
        "cases": "\n".join(_case(name, " ".join(_words(parser))) for name, parser in parsers.items()),
        "options": "\n".join(_case(*pair) for name, parser in parsers.items() for pair in _options(name, parser)),
        "settings": " ".join(f"{name}=" for name in fields()),
        "values": "\n".join(_case(*pair) for pair in _values(Config)),
    }
    print((FOR_ZSH if options.shell == "zsh" else "") + SCRIPT.format(**words), end="")


def _case(pattern: str, words: str) -> str:
    return f'    {pattern}) words="{words}" ;;'


def _words(parser: ArgumentParser) -> Iterator[str]:
    """Yield the options of a command, the words that it accepts, and the settings if it takes some. Where the first
    word names a run, the settings come after it."""
    takes_a_run = parser.prog == "octet eval" or any(action.metavar == "RUN" for action in parser._actions)
    for action in parser._actions:  # argparse has no other way to list them
        yield from (option for option in action.option_strings if option.startswith("--") and option != "--local_rank")
        if not action.option_strings:
            yield from map(str, action.choices or ())
        if action.dest == "overrides":
            yield "$([ $COMP_CWORD -eq 2 ] || echo $settings)" if takes_a_run else "$settings"


def _options(command: str, parser: ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the options that need a value, with the values where they are known."""
    known = {"--preset": names_in(PRESETS), "--recipe": names_in(RECIPES), "--task": BUILT_IN}
    for action in parser._actions:
        for option in action.option_strings:
            if action.nargs is None:
                yield f'"{command} {option}"', " ".join(map(str, action.choices or known.get(option, ())))


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings whose values are known, with the values."""
    for key, info in section.model_fields.items():
        name = f"{prefix}{info.alias or key}"
        if is_section(info.annotation):
            yield from _values(info.annotation, f"{name}.")
        elif name == "task.name":
            yield name, " ".join(BUILT_IN)
        elif info.annotation is bool:
            yield name, "false true"
        elif get_origin(info.annotation) is Literal:
            yield name, " ".join(map(str, get_args(info.annotation)))
