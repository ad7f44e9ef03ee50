"""Train until an evaluation on the held-out problems reaches an accuracy."""

from trainer.config.command_line import Request
from trainer.config.settings import Config
from trainer.evaluation.best import Milestone
from trainer.loop import train
from trainer.machine.quiet import no_progress_bars
from trainer.run import assemble


def until(goal: float, config: Config) -> Milestone:
    """Return the evaluation that reached the goal, or that after the last step."""
    no_progress_bars()
    with assemble.process_group(config):
        run = assemble.build(Request(config, "speedrun", "", json=True))  # progress goes to standard error
        run.evaluator.history.goal = goal
        try:
            train(config, *run)
        finally:
            run.rollouts.close()
            run.log.close()
        return run.evaluator.history.milestones[-1]
