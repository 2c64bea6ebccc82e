"""Joint passage ranking and sentence selection (Two-in-One, equations 1 to 3).

    L = L_pass + L_sent + L_con + L_sim, summed over the passages of a batch:
    L_pass = (y' - y)^2, L_sent = sum over sentences (x' - x)^2, with labels +1 and -1
    L_con = (y' - max x')^2
    L_sim = mean over pairs of a relevant and an irrelevant sentence of a relevant passage
            max(d(v_p, v_r) - d(v_p, v_n) + margin, 0), where d is the Euclidean distance

With answers (the paper's future work, "Three-in-One") also L_ans, the cross entropy of the first
and last token of the answer among the tokens of the passage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from as2ray.losses.base import Loss, StepContext, Targets
from as2ray.outputs import PassageOutput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TwoInOneLoss(Loss):
    """The joint loss; its terms can be switched on and off (Table 2)."""

    passage_loss: bool = True
    """L_pass; False for a model that scores only sentences within passages."""
    sentence_loss: bool = True
    """L_sent; False for a model that scores only passages."""
    consistency_loss: bool = False
    """L_con."""
    similarity_loss: bool = False
    """L_sim."""
    margin: float = 1.0
    """Margin of L_sim."""
    mean_over_sentences: bool = False
    """Divides L_sent by the number of sentences of the passage, similar to the released code."""
    answer_loss: bool = False
    """L_ans, for answers that are part of a supporting sentence."""
    type: Literal["two_in_one"] = "two_in_one"
    """Name of the loss."""

    @model_validator(mode="after")
    def _check_terms(self) -> TwoInOneLoss:
        terms = ("passage_loss", "sentence_loss", "consistency_loss", "similarity_loss")
        if not any(getattr(self, name) for name in (*terms, "answer_loss")):
            raise ValueError("the joint loss has no term; set passage_loss or sentence_loss")
        return self

    def compute(self, output: PassageOutput, targets: Targets, context: StepContext) -> Tensor:
        """Computes the loss summed over the passages.

        Args:
            output: Scores and states of passages and sentences.
            targets: `passage_label` [passages] and `label` [sentences], 0 or 1; `window`
                [sentences], the number of each sentence's passage in the batch; for L_ans
                `answer_first` and `answer_last` [sentences], token positions in the batch, or -1.
            context: The step.
        """
        import torch

        passage_label, passage_index = targets["passage_label"], targets["window"].long()
        passage_scores = output.passage_scores.float()
        sentence_scores = output.sentence_scores.float()
        # Every head gets a gradient, if only of zeros: other workers' copies of it wait for one.
        heads = [passage_scores, sentence_scores]
        if output.span_logits is not None:
            heads.append(output.span_logits.float())
        zero = torch.stack([head.sum() for head in heads]).sum() * 0.0
        terms: dict[str, Tensor] = {}
        if self.passage_loss:
            errors = (passage_scores - _to_signed_labels(passage_label)).square()
            terms["passage"] = errors.sum()
        if self.sentence_loss:
            errors = (sentence_scores - _to_signed_labels(targets["label"])).square()
            if self.mean_over_sentences:
                num_sentences = torch.bincount(passage_index)
                errors = errors / num_sentences[passage_index]
            terms["sentence"] = errors.sum()
        if self.consistency_loss:
            lowest = torch.full_like(passage_scores, -torch.inf)
            max_scores = lowest.scatter_reduce(0, passage_index, sentence_scores, "amax")
            terms["consistency"] = (passage_scores - max_scores).square().sum()
        if self.similarity_loss:
            terms["similarity"] = self._compute_similarity_loss(output, targets, passage_index)
        if self.answer_loss:
            terms["answer"] = _compute_answer_loss(output, targets)
        for name, term in terms.items():
            context.add_part(name, term)
        return torch.stack([zero, *terms.values()]).sum()

    def _compute_similarity_loss(
        self, output: PassageOutput, targets: Targets, passage_index: Tensor
    ) -> Tensor:
        """Computes L_sim over the relevant passages that have sentences with both labels."""
        import torch

        passage_states = output.passage_states.float()[passage_index]
        squares = (passage_states - output.sentence_states.float()).square()
        # The square root has no gradient at 0, the distance of equal states.
        distance = (squares.sum(1) + 1e-12).sqrt()
        is_relevant = targets["label"] > 0
        total = distance.sum() * 0.0
        for passage in torch.nonzero(targets["passage_label"] > 0).flatten().tolist():
            is_inside = passage_index == passage
            relevant = distance[is_inside & is_relevant]
            irrelevant = distance[is_inside & ~is_relevant]
            if len(relevant) and len(irrelevant):
                differences = relevant[:, None] - irrelevant
                total = total + (differences + self.margin).clamp_min(0.0).mean()
        return total


def _compute_answer_loss(output: PassageOutput, targets: Targets) -> Tensor:
    """Computes L_ans; all occurrences of an answer in a passage count."""
    import torch

    assert output.span_logits is not None
    assert output.token_passage is not None  # models trained with `answer_loss` return both
    logits = output.span_logits.float()
    max_logit = logits.detach().max()
    zeros = torch.zeros(len(output.passage_scores), 2, device=logits.device)
    sums = zeros.index_add(0, output.token_passage, (logits - max_logit).exp())
    log_probabilities = logits - max_logit - sums.log()[output.token_passage]
    first, last = targets["answer_first"].long(), targets["answer_last"].long()
    log_likelihood = log_probabilities[first[first >= 0], 0].sum()
    log_likelihood = log_likelihood + log_probabilities[last[last >= 0], 1].sum()
    return -log_likelihood / 2.0


def _to_signed_labels(label: Tensor) -> Tensor:
    return label.float() * 2.0 - 1.0
