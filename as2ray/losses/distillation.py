"""Knowledge distillation from stored logits of teachers (CERBERUS, equations 1 to 4).

    L_KD = alpha CE(student, label) + (1 - alpha) tau^2 KL(p || q)
    p = softmax(teacher / tau), q = softmax(student / tau)

Over the heads of a student, L = sum of lambda_i L_KD(head i, its teacher). If the student's encoder
also has exits, each partial classifier, which predicts what the heads together will say, adds the
mean of its L_KD over the teachers. No paper has such a student.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from as2ray.errors import ConfigError, TrainingError
from as2ray.losses.base import Loss, StepContext, Targets
from as2ray.losses.pointwise import cross_entropy
from as2ray.outputs import output_names
from as2ray.tables.schema import TEACHER_LOGITS

if TYPE_CHECKING:
    from torch import Tensor

TeacherAssignment = Literal["per_head", "sum", "round_robin"]
"""Teachers of a head: its own one (CERBERUS), all (KD_Sum), or another at each step (KD_RR)."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DistillationLoss(Loss):
    """Distillation into one or several heads."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the labels; the paper's grid is 0, 0.1, 0.5, 0.9."""
    temperature: PositiveFloat = 1.0
    """tau; the paper's grid is 1, 3, 5."""
    teacher_assignment: TeacherAssignment = "per_head"
    """Which teachers a head learns from."""
    teacher_index: NonNegativeInt | None = None
    """Index of the one teacher of all heads, instead of `teacher_assignment`."""
    head_weights: tuple[float, ...] | None = None
    """lambda of each head; 1 by default, as in the paper."""
    unscaled_soft_loss: bool = False
    """Omits tau^2 if alpha is 0, as the paper's toolkit did, in contrast to its equation."""
    type: Literal["distillation"] = "distillation"
    """Name of the loss."""

    def forward_kwargs(self, context: StepContext) -> Mapping[str, Any]:
        """Returns all exits of a student with several."""
        return {"exit_indices": range(context.num_exits)} if context.num_exits > 1 else {}

    def compute(self, output: Tensor, targets: Targets, context: StepContext) -> Tensor:
        """Computes the loss summed over the batch.

        Args:
            output: Logits of each partial classifier, then of each head, shape
                [sequences, classifiers + heads, 2], or [sequences, 1 or 2] of a single head.
            targets: `label` [sequences] and `teacher_logits` [sequences, 2 * teachers].
            context: The step. All exits but the last have a partial classifier.

        Raises:
            ConfigError: Numbers of heads and teachers that do not fit these settings.
            TrainingError: Missing or non-finite logits of teachers.
        """
        import torch

        num_classifiers = max(0, context.num_exits - 1)
        outputs = [output] if output.ndim == 2 else list(output.unbind(1))
        heads, teachers = outputs[num_classifiers:], _read_teacher_logits(targets)
        self.check_counts(len(heads), len(teachers))
        if self.teacher_index is not None:
            teachers = [teachers[self.teacher_index]]
        weights = self.head_weights or [1.0] * len(heads)
        names = output_names(context.exit_layers, len(outputs))
        terms: list[Tensor] = []

        def add_term(index: int, teacher: Tensor, weight: float, count: int) -> None:
            hard, soft = self._head_losses(outputs[index], teacher, targets)
            terms.append(weight * (hard + soft) / count)
            context.add_part("hard", weight / count * hard)
            context.add_part("soft", weight / count * soft)
            if names[index]:
                context.add_part(names[index], terms[-1])

        for head_index, weight in enumerate(weights):
            for teacher in self._select_teachers(head_index, context.step, teachers):
                add_term(num_classifiers + head_index, teacher, weight, 1)
        for index in range(num_classifiers):
            for teacher in teachers:
                add_term(index, teacher, 1.0, len(teachers))
        return torch.stack(terms).sum()

    def check_counts(self, num_ranking_heads: int, num_teachers: int) -> None:
        """Raises an error if a student's heads and its teachers do not fit these settings.

        Args:
            num_ranking_heads: Heads of the student; 1 for a student with one classifier.
            num_teachers: Teachers of the student.

        Raises:
            ConfigError: The number of heads differs from that of `head_weights` or, with
                `per_head`, from that of teachers; or there is no teacher `teacher_index`.
        """
        if self.head_weights is not None and len(self.head_weights) != num_ranking_heads:
            problem = f"{len(self.head_weights)} head_weights for {num_ranking_heads} heads"
            raise ConfigError(problem)
        index = self.teacher_index
        if index is not None and index >= num_teachers:
            raise ConfigError(f"teacher_index {index} of {num_teachers} teachers; the first is 0")
        is_per_head = index is None and self.teacher_assignment == "per_head"
        if is_per_head and num_ranking_heads != num_teachers:
            raise ConfigError(
                f"{num_ranking_heads} heads and {num_teachers} teachers; with teacher_assignment "
                "'per_head' every head needs its own teacher",
                fix="set `teacher_index`, or use teacher_assignment 'sum'",
            )

    def _select_teachers(
        self, head_index: int, step: int, teachers: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        if self.teacher_assignment == "sum" or self.teacher_index is not None:
            return teachers
        is_round_robin = self.teacher_assignment == "round_robin"
        return [teachers[step % len(teachers) if is_round_robin else head_index]]

    def _head_losses(
        self, student: Tensor, teacher: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """Computes both terms of equation 1 for the logits of one head and one teacher."""
        from torch.nn import functional

        tau = self.temperature
        if student.shape[1] == 1:
            # A binary logit is that of an answer; the logit of "not an answer" is 0.
            student = functional.pad(student, (1, 0))
        log_q = (student.float() / tau).log_softmax(1)
        log_p = (teacher.float() / tau).log_softmax(1)
        soft_loss = functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
        scale = 1.0 if self.unscaled_soft_loss and self.alpha == 0.0 else tau**2
        hard_loss = cross_entropy(student, targets)
        return self.alpha * hard_loss, (1.0 - self.alpha) * scale * soft_loss


def _read_teacher_logits(targets: Targets) -> Sequence[Tensor]:
    """Returns the logits of each teacher, shape [sequences, 2].

    Raises:
        TrainingError: Missing or non-finite logits.
    """
    import torch

    if TEACHER_LOGITS not in targets:
        problem = f"batches with {sorted(targets)}; distillation needs {TEACHER_LOGITS!r}"
        raise TrainingError(problem, fix="score the training tables with the teachers first")
    logits = targets[TEACHER_LOGITS]
    num_bad = int((~torch.isfinite(logits)).any(1).sum())
    if num_bad:
        problem = f"{num_bad} of {len(logits)} sequences have missing or infinite teacher logits"
        raise TrainingError(problem, fix="score them again, in fp32 if the teachers overflow")
    return logits.unflatten(1, (-1, 2)).unbind(1)  # type: ignore[no-untyped-call, no-any-return]
