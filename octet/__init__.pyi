from trainer import Config as Config
from trainer import Interrupted as Interrupted
from trainer import OctetError as OctetError
from trainer import OpenEnv as OpenEnv
from trainer import Verifiers as Verifiers
from trainer import __version__ as __version__
from trainer import evaluate as evaluate
from trainer import export as export
from trainer import resolve as resolve
from trainer import train as train

def must_be_ours() -> None: ...
