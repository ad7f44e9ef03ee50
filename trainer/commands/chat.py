"""`octet chat`: ask the base and the trained model of a run the same questions."""

import re
from argparse import ArgumentParser, Namespace
from math import inf

from trainer.commands.eval import NO_SERVERS
from trainer.commands.shared_options import add_overrides, add_run
from trainer.config.resolve import resolve
from trainer.errors import ConfigError
from trainer.plan import downloads, preflight
from trainer.run_folder.model_source import Source
from trainer.run_folder.reader import read_run


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = 'example: octet chat runs/demo "What is 2 + 3?". Without a question, it prompts for some.'
    add_run(parser, "a run folder, or an adapter or a model in it")
    add_overrides(parser, "rollout.max_new_tokens=1024, or the words of a question")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: the most likely answer")
    parser.add_argument("--json", action="store_true", help="print the answers to a question as a line of JSON")


def run(options: Namespace) -> None:
    source = Source.of(options.run)
    stored = read_run(source.run or options.run).folder / "config.yaml"
    if not 0 <= options.temperature < inf:
        raise ConfigError(f"--temperature {options.temperature:g}", "it must be 0 or more", "Leave it out for 0")
    servers = NO_SERVERS if resolve(str(stored)).rollout.uses_servers else ()
    settings = [text for text in options.overrides if re.match(r"[a-z]\w*\.[\w.]+=", text)]
    question = " ".join(text for text in options.overrides if text not in settings)
    question = question.encode(errors="replace").decode()  # as in the conversation, for bytes that are not UTF-8
    config = resolve(str(stored), None, [*servers, *settings])
    downloads.check(config, needs_data=False)
    if not any(text.startswith("model.name=") for text in settings):
        source.must_have_its_base(config.model)
    preflight.import_libraries(config)
    from trainer.run import chat

    chat.chat(source, config, options.temperature, question, options.json)
