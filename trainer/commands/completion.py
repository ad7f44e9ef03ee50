"""`octet completion`: a script that lets a shell complete commands, options, presets, recipes and settings."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from trainer.commands.main import COMMANDS, parser_of
from trainer.config.arguments import PRESETS, RECIPES, names_in
from trainer.config.settings import fields

FOR_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
SCRIPT = """_octet() {{
    local settings="{settings}"
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="{commands} --help --version"
    [ "$COMP_CWORD" -eq 1 ] || case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
    esac
    case "${{COMP_WORDS[COMP_CWORD - 1]}}" in
    --preset) words="{presets}" ;;
    --recipe) words="{recipes}" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ "${{COMPREPLY[0]:-}}" == *= ]] && type compopt >/dev/null 2>&1; then compopt -o nospace; fi
}}
complete -o bashdefault -o default -F _octet octet
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet completion bash >> ~/.bashrc"
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(options: Namespace) -> None:
    words = {
        "commands": " ".join(COMMANDS),
        "cases": "\n".join(f'    {name}) words="{" ".join(_words(parser_of(name)))}" ;;' for name in COMMANDS),
        "settings": " ".join(f"{name}=" for name in fields()),
        "presets": " ".join(names_in(PRESETS)),
        "recipes": " ".join(names_in(RECIPES)),
    }
    print((FOR_ZSH if options.shell == "zsh" else "") + SCRIPT.format(**words), end="")


def _words(parser: ArgumentParser) -> Iterator[str]:
    """Yield the options of a command, the words that it accepts, and the settings if it takes some."""
    for action in parser._actions:  # argparse has no other way to list them
        yield from (option for option in action.option_strings if option.startswith("--") and option != "--local_rank")
        yield from map(str, action.choices or ())
        if action.dest == "overrides":
            yield "$settings"
