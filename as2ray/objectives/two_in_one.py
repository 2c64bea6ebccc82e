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

from as2ray.errors import RecipeError
from as2ray.joint import Joint
from as2ray.objectives.base import Moment, Task


@dataclass(frozen=True)
class TwoInOne:
    """The joint loss; its parts can be switched (Table 2)."""

    passages: bool = True
    """L_pass; without it a model of sentences within passages (Table 1's reads each alone)."""
    sentences: bool = True
    """L_sent; without it a model of passages alone."""
    consistency: bool = False
    """L_con."""
    similarity: bool = False
    """L_sim."""
    margin: float = 1.0
    """Of L_sim."""
    mean_over_sentences: bool = False
    """L_sent as the mean over a passage's sentences, near to what the released code does."""
    answers: bool = False
    """L_ans, where the answer stands in a supporting sentence."""

    def __post_init__(self) -> None:
        parts = (self.passages, self.sentences, self.consistency, self.similarity, self.answers)
        if not any(parts):
            raise RecipeError(
                "a joint objective without any part",
                expected="passages or sentences, or both",
                mend="switch one on",
            )

    def at(self, moment: Moment) -> Task:
        """The same loss at every step."""
        return Task(self.loss, {})

    def loss(self, joint: Joint, targets: Mapping[str, Tensor]) -> Tensor:
        """Summed over the passages.

        Args:
            joint: What the model says.
            targets: `passage_label` [passages] and `label` [sentences], 0 or 1, and `window`
                [sentences], the number of each sentence's passage in the batch; for L_ans
                `answer_first` and `answer_last` [sentences], tokens of the batch, or -1.
        """
        relevant, window = targets["passage_label"], targets["window"].long()
        passage, sentence = joint.passage.float(), joint.sentence.float()
        # Every head has a gradient, if of zeros: copies of the model on other workers wait for it.
        heads = [passage, sentence, *([] if joint.answer is None else [joint.answer.float()])]
        parts = [torch.stack([head.sum() for head in heads]).sum() * 0.0]
        if self.passages:
            parts.append((passage - _signed(relevant)).square().sum())
        if self.sentences:
            errors = (sentence - _signed(targets["label"])).square()
            if self.mean_over_sentences:
                errors = errors / torch.bincount(window, minlength=len(passage))[window]
            parts.append(errors.sum())
        if self.consistency:
            lowest = torch.full_like(passage, -torch.inf)
            highest = lowest.scatter_reduce(0, window, sentence, "amax")
            parts.append((passage - highest).square().sum())
        if self.similarity:
            parts.append(self._similarity(joint, targets, window))
        if self.answers:
            parts.append(_answers(joint, targets))
        return torch.stack(parts).sum()

    def _similarity(self, joint: Joint, targets: Mapping[str, Tensor], window: Tensor) -> Tensor:
        """L_sim of every relevant passage that has sentences of both kinds."""
        # The root has no gradient at 0: a floor for states that are equal.
        apart = (joint.passage_state.float()[window] - joint.sentence_state.float()).square()
        distance = (apart.sum(-1) + 1e-12).sqrt()
        answers = targets["label"] > 0
        total = distance.sum() * 0.0
        for number in torch.nonzero(targets["passage_label"] > 0).flatten().tolist():
            own = window == number
            near, far = distance[own & answers], distance[own & ~answers]
            if len(near) and len(far):
                total = total + (near[:, None] - far + self.margin).clamp_min(0.0).mean()
        return total


def _answers(joint: Joint, targets: Mapping[str, Tensor]) -> Tensor:
    """L_ans; a passage with several places of the answer counts each."""
    assert joint.answer is not None
    assert joint.window is not None  # the objective makes the model that has them
    logits = joint.answer.float()
    highest = logits.detach().max()
    shape = (len(joint.passage), 2)
    sums = torch.zeros(shape, device=logits.device).index_add(
        0, joint.window, (logits - highest).exp()
    )
    logs = logits - highest - sums.log()[joint.window]
    places = [targets[f"answer_{end}"].long() for end in ("first", "last")]
    found = torch.stack([logs[place[place >= 0], n].sum() for n, place in enumerate(places)])
    return -found.sum() / 2.0


def _signed(label: Tensor) -> Tensor:
    return label.float() * 2.0 - 1.0
