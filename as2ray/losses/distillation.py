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

from as2ray.errors import ConfigError, TrainingError
from as2ray.losses.base import StepContext, StepLoss
from as2ray.losses.pointwise import cross_entropy
from as2ray.tables.schema import TEACHER_LOGITS

TeacherAssignment = Literal["own", "sum", "in_turn"]
"""Who teaches: each head its own teacher (CERBERUS); all teachers every head (KD_Sum); one teacher
after the other, step by step (KD_RR)."""


@dataclass(frozen=True)
class DistillationLoss:
    """Distillation of one head or several. `teacher` names one teacher for all heads."""

    alpha: float = 0.5
    """Weight of the labels; the paper's grid is 0, 0.1, 0.5, 0.9."""
    temperature: float = 1.0
    """tau; the paper's grid is 1, 3, 5."""
    teacher_assignment: TeacherAssignment = "own"
    """Who teaches whom."""
    teacher_index: int | None = None
    """Number of the one teacher of all heads, from 0, in place of `lesson`."""
    head_weights: tuple[float, ...] | None = None
    """lambda of each head; 1 by default, as in the paper."""
    unscaled_soft_loss: bool = False
    """Leave tau^2 out where alpha is 0, as the paper's toolkit did and its equation does not."""

    def __post_init__(self) -> None:
        if not (0 <= self.alpha <= 1 and self.temperature > 0):
            raise ConfigError(
                f"alpha {self.alpha}, temperature {self.temperature}"
                "; expected alpha from 0 to 1, a temperature above 0",
            )
        if self.teacher_assignment not in get_args(TeacherAssignment):
            raise ConfigError(
                f"lesson {self.teacher_assignment!r}"
                f"; expected one of {get_args(TeacherAssignment)}",
            )

    def for_step(self, context: StepContext) -> StepLoss:
        """The loss of a moment, of all exits."""
        asked = {"exits": range(context.num_exits)} if context.num_exits > 1 else {}
        return StepLoss(
            partial(self._compute_loss, context.step, max(0, context.num_exits - 1)), asked
        )

    def _compute_loss(
        self, step: int, num_exits: int, logits: Tensor, targets: Mapping[str, Tensor]
    ) -> Tensor:
        """Summed over the batch.

        Args:
            step: Steps done.
            exits: Partial classifiers before the heads.
            logits: Of each exit, then of each head, [sequences, exits + heads, 2], or
                [sequences, 1 or 2] of a single one.
            targets: `label` [sequences] and `teacher_logits` [sequences, 2 * teachers].
        """
        outputs = [logits] if logits.ndim == 2 else list(logits.unbind(1))
        heads, teachers = outputs[num_exits:], _read_teacher_logits(targets)
        self.check_counts(len(heads), len(teachers))
        parts = [
            weight * self._head_loss(head, teacher, targets)
            for number, (head, weight) in enumerate(
                zip(heads, self.head_weights or [1.0] * len(heads))
            )
            for teacher in self._select_teachers(number, step, teachers)
        ]
        of_exits = teachers if self.teacher_index is None else [teachers[self.teacher_index]]
        parts += [
            self._head_loss(output, teacher, targets) / len(of_exits)
            for output in outputs[:num_exits]
            for teacher in of_exits
        ]
        return torch.stack(parts).sum()

    def check_counts(self, num_ranking_heads: int, num_teachers: int) -> None:
        """Refuses a student and teachers that do not go with these settings.

        Args:
            heads: Of the student; one where it has no more than its classifier.
            teachers: How many teach it.

        Raises:
            RecipeError: Other heads than weights or, where each has its own, than teachers; no
                such teacher.
        """
        if self.head_weights is not None and len(self.head_weights) != num_ranking_heads:
            raise ConfigError(
                f"{len(self.head_weights)} weights for {num_ranking_heads} heads"
                "; expected a weight for each head",
            )
        if self.teacher_index is not None and not 0 <= self.teacher_index < num_teachers:
            raise ConfigError(
                f"teacher {self.teacher_index} of {num_teachers}"
                f"; expected a number from 0 to {num_teachers - 1}",
            )
        if (
            self.teacher_index is None
            and self.teacher_assignment == "own"
            and num_ranking_heads != num_teachers
        ):
            raise ConfigError(
                f"{num_ranking_heads} heads and {num_teachers} teachers"
                "; expected a teacher for each head",
                fix="give as many teachers as heads, name one `teacher`, or take lesson 'sum'",
            )

    def _select_teachers(
        self, head_index: int, step: int, teacher_logits: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        if self.teacher_index is not None:
            return [teacher_logits[self.teacher_index]]
        if self.teacher_assignment == "sum":
            return teacher_logits
        return [
            teacher_logits[
                step % len(teacher_logits) if self.teacher_assignment == "in_turn" else head_index
            ]
        ]

    def _head_loss(
        self, student_logits: Tensor, teacher_logits: Tensor, targets: Mapping[str, Tensor]
    ) -> Tensor:
        """Equation 1 of one head and one teacher."""
        tau = self.temperature
        if (
            student_logits.shape[-1] == 1
        ):  # a binary logit: of (not an answer, answer) the first is 0
            student_logits = functional.pad(student_logits, (1, 0))
        soft = functional.kl_div(
            (student_logits.float() / tau).log_softmax(-1),
            (teacher_logits.float() / tau).log_softmax(-1),
            reduction="sum",
            log_target=True,
        )
        scale = 1.0 if self.unscaled_soft_loss and self.alpha == 0.0 else tau**2
        return (
            self.alpha * cross_entropy(student_logits, targets) + (1.0 - self.alpha) * scale * soft
        )


def _read_teacher_logits(targets: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Logits of each teacher, [sequences, 2]."""
    if TEACHER_LOGITS not in targets:
        raise TrainingError(
            f"batches with {sorted(targets)}"
            f"; expected {TEACHER_LOGITS!r}, the stored logits of the teachers",
            fix="score the training tables with the teachers first",
        )
    logits = targets[TEACHER_LOGITS]
    bad = int((~torch.isfinite(logits)).flatten(1).any(1).sum())
    if bad:
        raise TrainingError(
            f"{bad} of {len(logits)} sequences whose teachers' logits are missing or not finite"
            "; expected finite logits of every teacher for every candidate",
            fix="score the table again with the teachers, in fp32 if they overflow",
        )
    return logits.unflatten(1, (-1, 2)).unbind(1)  # type: ignore[no-untyped-call, no-any-return]
