"""Typed errors. Each states the problem and, where it is not obvious, how to fix it."""


class As2rayError(Exception):
    """Base of every error that a user can cause and fix.

    Args:
        problem: What is wrong, with its numbers or names, and what is accepted.
        fix: What to do about it.
    """

    def __init__(self, problem: str, fix: str | None = None) -> None:
        self.problem, self.fix = problem, fix
        super().__init__(problem, fix)

    def __str__(self) -> str:
        return self.problem if self.fix is None else f"{self.problem}\n  fix: {self.fix}"


class CorpusError(As2rayError):
    """A raw release or a candidates table cannot be read as what it should be."""


class CountMismatchError(CorpusError):
    """A corpus does not hold the published numbers of questions, pairs and positives."""


class LeakError(CorpusError):
    """A question stands in two splits, or in a transfer and a target corpus."""


class CheckpointError(As2rayError):
    """A checkpoint has unknown, missing or misshapen weights, or is no ranker."""


class ConfigError(As2rayError):
    """A recipe or a command-line value is out of its range."""


class TrainingError(As2rayError):
    """A run of training cannot go on."""


class StaleStageError(As2rayError):
    """An output folder holds a stage that was made from something else."""


class ResourceError(As2rayError):
    """The cluster cannot give what the resource plan asks."""


class SentenceIndexError(As2rayError):
    """An index of documents is missing, broken, of another version, or cannot be written."""


class EvaluationError(As2rayError):
    """Scores and judgements do not fit together."""
