"""Joint passage ranking and sentence selection (Two-in-One, equations 1 to 3).

Knows scores and states of passages and their sentences. Must not know models.

    L = L_pass + L_sent + L_con + L_sim, summed over the passages of a batch:
    L_pass = (y' - y)^2, L_sent = sum over sentences (x' - x)^2, with labels +1 and -1
    L_con = (y' - max x')^2
    L_sim = mean over pairs of a relevant and another sentence of a relevant passage
            max(d(v_p, v_r) - d(v_p, v_n) + margin, 0), d the Euclidean distance

With answers (the paper's future work, "Three-in-One") also L_ans, the cross entropy of their first
and last tokens among the tokens of the passage.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from as2ray.errors import ConfigError
from as2ray.losses.base import StepContext, StepLoss
from as2ray.outputs import PassageOutput


@dataclass(frozen=True)
class TwoInOneLoss:
    """The joint loss; its parts can be switched (Table 2)."""

    passage_loss: bool = True
    """L_pass; without it a model of sentences within passages (Table 1's reads each alone)."""
    sentence_loss: bool = True
    """L_sent; without it a model of passages alone."""
    consistency_loss: bool = False
    """L_con."""
    similarity_loss: bool = False
    """L_sim."""
    margin: float = 1.0
    """Of L_sim."""
    mean_over_sentences: bool = False
    """L_sent as the mean over a passage's sentences, near to what the released code does."""
    answer_loss: bool = False
    """L_ans, where the answer stands in a supporting sentence."""

    def __post_init__(self) -> None:
        parts = (
            self.passage_loss,
            self.sentence_loss,
            self.consistency_loss,
            self.similarity_loss,
            self.answer_loss,
        )
        if not any(parts):
            raise ConfigError(
                "a joint objective without any part; expected passages or sentences, or both",
                fix="switch one on",
            )

    def for_step(self, context: StepContext) -> StepLoss:
        """The same loss at every step."""
        return StepLoss(self.loss, {})

    def loss(self, output: PassageOutput, targets: Mapping[str, Tensor]) -> Tensor:
        """Summed over the passages.

        Args:
            joint: What the model says.
            targets: `passage_label` [passages] and `label` [sentences], 0 or 1, and `window`
                [sentences], the number of each sentence's passage in the batch; for L_ans
                `answer_first` and `answer_last` [sentences], tokens of the batch, or -1.
        """
        relevant, window = targets["passage_label"], targets["window"].long()
        passage, sentence = output.passage_scores.float(), output.sentence_scores.float()
        # Every head has a gradient, if of zeros: copies of the model on other workers wait for it.
        heads = [
            passage,
            sentence,
            *([] if output.span_logits is None else [output.span_logits.float()]),
        ]
        parts = [torch.stack([head.sum() for head in heads]).sum() * 0.0]
        if self.passage_loss:
            parts.append((passage - _to_signed_labels(relevant)).square().sum())
        if self.sentence_loss:
            errors = (sentence - _to_signed_labels(targets["label"])).square()
            if self.mean_over_sentences:
                errors = errors / torch.bincount(window, minlength=len(passage))[window]
            parts.append(errors.sum())
        if self.consistency_loss:
            lowest = torch.full_like(passage, -torch.inf)
            highest = lowest.scatter_reduce(0, window, sentence, "amax")
            parts.append((passage - highest).square().sum())
        if self.similarity_loss:
            parts.append(self._compute_similarity_loss(output, targets, window))
        if self.answer_loss:
            parts.append(_compute_answer_loss(output, targets))
        return torch.stack(parts).sum()

    def _compute_similarity_loss(
        self, output: PassageOutput, targets: Mapping[str, Tensor], sentence_passage: Tensor
    ) -> Tensor:
        """L_sim of every relevant passage that has sentences of both kinds."""
        # The root has no gradient at 0: a floor for states that are equal.
        apart = (
            output.passage_states.float()[sentence_passage] - output.sentence_states.float()
        ).square()
        distance = (apart.sum(-1) + 1e-12).sqrt()
        answers = targets["label"] > 0
        total = distance.sum() * 0.0
        for number in torch.nonzero(targets["passage_label"] > 0).flatten().tolist():
            own = sentence_passage == number
            near, far = distance[own & answers], distance[own & ~answers]
            if len(near) and len(far):
                total = total + (near[:, None] - far + self.margin).clamp_min(0.0).mean()
        return total


def _compute_answer_loss(output: PassageOutput, targets: Mapping[str, Tensor]) -> Tensor:
    """L_ans; a passage with several places of the answer counts each."""
    assert output.span_logits is not None
    assert output.token_passage is not None  # the objective makes the model that has them
    logits = output.span_logits.float()
    highest = logits.detach().max()
    shape = (len(output.passage_scores), 2)
    sums = torch.zeros(shape, device=logits.device).index_add(
        0, output.token_passage, (logits - highest).exp()
    )
    logs = logits - highest - sums.log()[output.token_passage]
    places = [targets[f"answer_{end}"].long() for end in ("first", "last")]
    found = torch.stack([logs[place[place >= 0], n].sum() for n, place in enumerate(places)])
    return -found.sum() / 2.0


def _to_signed_labels(label: Tensor) -> Tensor:
    return label.float() * 2.0 - 1.0
