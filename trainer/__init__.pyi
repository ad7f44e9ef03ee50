from trainer.commands.eval import evaluate as evaluate
from trainer.commands.export import export as export
from trainer.config.resolve import resolve as resolve
from trainer.config.settings import Config as Config
from trainer.errors import Interrupted as Interrupted
from trainer.errors import OctetError as OctetError
from trainer.problem.foreign_environments import OpenEnv as OpenEnv
from trainer.problem.foreign_environments import Verifiers as Verifiers
from trainer.run.python_api import train as train

__version__: str
