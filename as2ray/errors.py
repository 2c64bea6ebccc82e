"""Typed errors: each says what came, what was expected, and how to mend it.

Knows nothing of the other rooms.
"""


class As2rayError(Exception):
    """Base of every error that a user can cause and mend.

    Args:
        came: What came, with its numbers or names.
        expected: What would have been accepted.
        mend: What to do now.
    """

    def __init__(self, came: str, *, expected: str, mend: str) -> None:
        self.came, self.expected, self.mend = came, expected, mend
        super().__init__(f"{came}\n  expected: {expected}\n  to mend:  {mend}")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and errors cross processes.
        return _rebuild, (type(self), self.came, self.expected, self.mend)


def _rebuild(cls: type[As2rayError], came: str, expected: str, mend: str) -> As2rayError:
    return cls(came, expected=expected, mend=mend)


class CorpusError(As2rayError):
    """A raw release or a candidates table cannot be read as what it should be."""


class CountMismatchError(CorpusError):
    """A corpus does not hold the published numbers of questions, pairs and positives."""


class LeakError(CorpusError):
    """A question stands in two splits, or in a transfer and a target corpus."""


class CheckpointError(As2rayError):
    """A checkpoint has unknown, missing or misshapen weights, or is no ranker."""


class RecipeError(As2rayError):
    """A recipe or a command-line value is out of its range."""


class TrainingError(As2rayError):
    """A run of training cannot go on."""


class StageMismatchError(As2rayError):
    """An output folder holds a stage that was made from something else."""


class ResourceError(As2rayError):
    """The cluster cannot give what the resource plan asks."""


class IndexFolderError(As2rayError):
    """An index of documents is missing, broken, of another version, or cannot be written."""


class EvaluationError(As2rayError):
    """Scores and judgements do not fit together."""
