from trainer.config.command_line import resolve as resolve
from trainer.config.settings import Config as Config
from trainer.run.python import train as train

__version__: str
