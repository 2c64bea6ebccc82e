"""Knowledge distillation from stored logits of teachers (CERBERUS, equations 1 to 4).

Knows logits of students and teachers. Must not know models, or where the logits are stored.

    L_KD = alpha CE(student, label) + (1 - alpha) tau^2 KL(p || q)
    p = softmax(teacher / tau), q = softmax(student / tau)

and, over the heads of a student, L = sum of lambda_i L_KD(head i, its teacher). Where the student's
body has exits, the partial classifier of each, which is to foresee what the heads say together,
adds the mean of its L_KD over the teachers; no paper has such a student.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from as2ray.errors import RecipeError, TrainingError
from as2ray.objectives.base import Moment, Task
from as2ray.objectives.pointwise import cross_entropy

TEACHERS = "teacher_logits"
"""What belongs to each sequence: its teachers' logits, one pair after the other, shape [sequences,
2 * teachers]."""

Lesson = Literal["own", "sum", "in_turn"]
"""Who teaches: each head its own teacher (CERBERUS); all teachers every head (KD_Sum); one teacher
after the other, step by step (KD_RR)."""


@dataclass(frozen=True)
class Distillation:
    """Distillation of one head or several. `teacher` names one teacher for all heads."""

    alpha: float = 0.5
    """Weight of the labels; the paper's grid is 0, 0.1, 0.5, 0.9."""
    temperature: float = 1.0
    """tau; the paper's grid is 1, 3, 5."""
    lesson: Lesson = "own"
    """Who teaches whom."""
    teacher: int | None = None
    """Number of the one teacher of all heads, from 0, in place of `lesson`."""
    weights: tuple[float, ...] | None = None
    """lambda of each head; 1 by default, as in the paper."""
    as_torchdistill: bool = False
    """Leave tau^2 out where alpha is 0, as the paper's toolkit did and its equation does not."""

    def __post_init__(self) -> None:
        if not (0 <= self.alpha <= 1 and self.temperature > 0):
            raise RecipeError(
                f"alpha {self.alpha}, temperature {self.temperature}",
                expected="alpha from 0 to 1, a temperature above 0",
                mend="correct the recipe",
            )
        if self.lesson not in get_args(Lesson):
            raise RecipeError(
                f"lesson {self.lesson!r}", expected=f"one of {get_args(Lesson)}", mend="choose one"
            )

    def at(self, moment: Moment) -> Task:
        """The loss of a moment, of all exits."""
        asked = {"exits": range(moment.exits)} if moment.exits > 1 else {}
        return Task(partial(self._loss, moment.step, max(0, moment.exits - 1)), asked)

    def _loss(self, step: int, exits: int, logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Summed over the batch.

        Args:
            step: Steps done.
            exits: Partial classifiers before the heads.
            logits: Of each exit, then of each head, [sequences, exits + heads, 2], or
                [sequences, 1 or 2] of a single one.
            targets: `label` [sequences] and `teacher_logits` [sequences, 2 * teachers].
        """
        outputs = [logits] if logits.ndim == 2 else list(logits.unbind(1))
        heads, teachers = outputs[exits:], _teachers(targets)
        self.check(len(heads), len(teachers))
        parts = [
            weight * self._pair(head, teacher, targets)
            for number, (head, weight) in enumerate(zip(heads, self.weights or [1.0] * len(heads)))
            for teacher in self._taught_by(number, step, teachers)
        ]
        of_exits = teachers if self.teacher is None else [teachers[self.teacher]]
        parts += [
            self._pair(output, teacher, targets) / len(of_exits)
            for output in outputs[:exits]
            for teacher in of_exits
        ]
        return torch.stack(parts).sum()

    def check(self, heads: int, teachers: int) -> None:
        """Refuses a student and teachers that do not go with these settings.

        Args:
            heads: Of the student; one where it has no more than its classifier.
            teachers: How many teach it.

        Raises:
            RecipeError: Other heads than weights or, where each has its own, than teachers; no
                such teacher.
        """
        if self.weights is not None and len(self.weights) != heads:
            raise RecipeError(
                f"{len(self.weights)} weights for {heads} heads",
                expected="a weight for each head",
                mend="correct the recipe's weights",
            )
        if self.teacher is not None and not 0 <= self.teacher < teachers:
            raise RecipeError(
                f"teacher {self.teacher} of {teachers}",
                expected=f"a number from 0 to {teachers - 1}",
                mend="correct the recipe's teacher",
            )
        if self.teacher is None and self.lesson == "own" and heads != teachers:
            raise RecipeError(
                f"{heads} heads and {teachers} teachers",
                expected="a teacher for each head",
                mend="give as many teachers as heads, name one `teacher`, or take lesson 'sum'",
            )

    def _taught_by(self, head: int, step: int, teachers: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.teacher is not None:
            return [teachers[self.teacher]]
        if self.lesson == "sum":
            return teachers
        return [teachers[step % len(teachers) if self.lesson == "in_turn" else head]]

    def _pair(self, student: Tensor, teacher: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Equation 1 of one head and one teacher."""
        tau = self.temperature
        if student.shape[-1] == 1:  # a binary logit: of (not an answer, answer) the first is 0
            student = functional.pad(student, (1, 0))
        soft = functional.kl_div(
            (student.float() / tau).log_softmax(-1),
            (teacher.float() / tau).log_softmax(-1),
            reduction="sum",
            log_target=True,
        )
        scale = 1.0 if self.as_torchdistill and self.alpha == 0.0 else tau**2
        return self.alpha * cross_entropy(student, targets) + (1.0 - self.alpha) * scale * soft


def _teachers(targets: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Logits of each teacher, [sequences, 2]."""
    if TEACHERS not in targets:
        raise TrainingError(
            f"batches with {sorted(targets)}",
            expected=f"{TEACHERS!r}, the stored logits of the teachers",
            mend="score the training tables with the teachers first",
        )
    logits = targets[TEACHERS]
    bad = int((~torch.isfinite(logits)).flatten(1).any(1).sum())
    if bad:
        raise TrainingError(
            f"{bad} of {len(logits)} sequences whose teachers' logits are missing or not finite",
            expected="finite logits of every teacher for every candidate",
            mend="score the table again with the teachers, in fp32 if they overflow",
        )
    return logits.unflatten(1, (-1, 2)).unbind(1)  # type: ignore[no-untyped-call, no-any-return]
