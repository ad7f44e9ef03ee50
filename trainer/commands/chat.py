"""`octet chat`: a question to the models of a run, answered by each of them."""

from argparse import ArgumentParser, Namespace
from math import inf

from trainer.commands.eval import NO_SERVERS
from trainer.commands.options import add_overrides, add_run
from trainer.config.command_line import resolve
from trainer.errors import ConfigError
from trainer.machine import quiet
from trainer.plan import downloads, preflight
from trainer.run_folder.source import Source


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet chat runs/demo. An empty line asks a held-out problem; Ctrl-D ends it."
    add_run(parser)
    add_overrides(parser, "rollout.max_new_tokens=1024")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0, the most likely answer")


def run(options: Namespace) -> None:
    stored = options.run / "config.yaml"
    if not stored.is_file():
        raise ConfigError(options.run, "there is no config.yaml in it", "Name the folder of a run")
    if not 0 <= options.temperature < inf:
        raise ConfigError(f"--temperature {options.temperature:g}", "it must be 0 or more", "Leave it out for 0")
    source = Source.of(options.run)
    servers = NO_SERVERS if resolve(str(stored)).rollout.uses_servers else ()
    config = resolve(str(stored), None, [*servers, *options.overrides])
    downloads.check(config, needs_data=False)
    quiet.quiet()
    preflight.skip_unused_imports(config)
    from trainer.run import chat

    chat.chat(source, config, options.temperature)
