"""Two-in-One (section 4.1): one encoder pass scores a passage and the sentences in it.

Knows the encoder and packed windows with markers. Must not know files or losses.

The first token stands for the passage, the marker in front of each sentence for the sentence; a
two-layer head scores either. A passage read in several windows has the highest of their scores, and
a sentence that stands in two of them the mean.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from as2ray.cascade.pruning import DropRatios, StagedScores
from as2ray.errors import CheckpointError
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.ranker import (
    CONFIG_KEY,
    Ranker,
    as_candidate_list,
    check_text,
    check_top_k,
    fp32_head,
)
from as2ray.models.span_extraction import ScoredSpan, best_spans
from as2ray.outputs import PassageOutput, RankedCandidate, RankedPassage, ShortAnswer
from as2ray.text.answer_spans import span_text
from as2ray.text.packing import PackedBatch
from as2ray.text.passage_windows import PassageWindows, encode_passages
from as2ray.text.tokenization import PairTokenizer


def build_score_head(hidden_size: int, dropout: float) -> nn.Sequential:
    """Two layers from a state [n, hidden] to a score [n, 1]."""
    return nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(hidden_size, hidden_size),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(hidden_size, 1),
    )


class TwoInOneNetwork(PreTrainedModel):  # type: ignore[misc]
    """An encoder with a head for passages and one for sentences, in Hugging Face format.

    Args:
        config: The encoder's.
    """

    base_model_prefix = "body"
    _supports_sdpa = True  # its encoder does; ours is set on it

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        bare = {} if config.model_type == "electra" else {"add_pooling_layer": False}
        self.body = AutoModel.from_config(config, **bare)
        self.passage = build_score_head(config.hidden_size, config.hidden_dropout_prob)
        self.sentence = build_score_head(config.hidden_size, config.hidden_dropout_prob)
        answers = getattr(config, CONFIG_KEY, {}).get("answers", False)
        self.answer = nn.Linear(config.hidden_size, 2) if answers else None
        self.post_init()

    @classmethod
    def from_encoder(
        cls, body: PreTrainedModel, extract_answers: bool = False
    ) -> "TwoInOneNetwork":
        """New heads on a trained body.

        Args:
            body: An encoder, or a model with a head around one.
            answers: Whether one of them finds short answers.
        """
        encoder = body.base_model
        config = deepcopy(encoder.config)
        setattr(config, CONFIG_KEY, {"ranker": "two_in_one", "answers": extract_answers})
        network = cls(config)
        weights = {k: v for k, v in encoder.state_dict().items() if not k.startswith("pooler.")}
        network.body.load_state_dict(weights)
        return network


class TwoInOneRanker(Ranker):
    """A joint model: ranks passages with the sentences that support the answer, or sentences.

    Args:
        network: The encoder with its heads.
        tokenizer: How texts become tokens; its `max_length` is the window.
    """

    text_only = True

    def __init__(self, network: TwoInOneNetwork, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        self.network = network
        self.encoders = [Encoder(network.body)]

    def forward(self, batch: PackedBatch) -> PassageOutput:  # type: ignore[override]
        """Scores and states of windows and of the sentences marked in them."""
        hidden, layout = self.encoder.embed(batch)
        marks = torch.from_numpy(batch.markers).to(hidden.device)
        if self.network.answer is None:
            tokens = torch.cat([layout.first_tokens, marks])
            states = self.encoder.run_to_tokens(tokens, hidden, layout)
            passage, sentence = states[: len(batch)], states[len(batch) :]
        else:
            hidden = self.encoder.run_layers(hidden, layout)
            passage, sentence = hidden[layout.first_tokens], hidden[marks]
        with fp32_head(hidden):
            of_passage = self.network.passage(passage.float())[:, 0]
            of_sentence = self.network.sentence(sentence.float())[:, 0]
            if self.network.answer is None:
                return PassageOutput(of_passage, of_sentence, passage, sentence)
            answer = self.network.answer(hidden.float())
        lengths = torch.from_numpy(batch.lengths).to(hidden.device)
        window = torch.repeat_interleave(lengths.long())
        return PassageOutput(of_passage, of_sentence, passage, sentence, answer, window)

    def checkpoint_settings(self) -> dict[str, Any]:
        """What its checkpoint says beside the network's configuration and lengths."""
        return {"ranker": "two_in_one", "answers": self.network.answer is not None}

    @torch.inference_mode()
    def predict_passages(
        self, questions: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores around 0 of passages and of all their sentences, float32.

        Args:
            questions: Of each passage, shape [passages].
            passages: Sentences of each, none empty, [passages][sentences].

        Returns:
            Shapes [passages] and [sentences], the sentences of all passages end to end.
        """
        if not passages:
            return np.zeros(0, np.float32), np.zeros(0, np.float32)
        windows = encode_passages(self.tokenizer, questions, passages)
        return merge_windows(windows, *self.predict_windows(windows, self._pack_windows(windows)))

    @torch.inference_mode()
    def predict_windows(
        self, windows: PassageWindows, batches: Iterable[PackedBatch]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores of windows and of the markers in them, float32; NaN where no batch has them.

        Args:
            windows: Of passages.
            batches: Some or all of them (`Windows.batches`).
        """
        of_window = np.full(len(windows.sequences), np.nan, np.float32)
        of_mark = np.full(len(windows.marker_sentence), np.nan, np.float32)

        def scored(batch: PackedBatch) -> tuple[PackedBatch, PassageOutput]:
            return batch, self(batch)

        with self.scoring():
            for batch, joint in self.map_batches(scored, batches):
                of_window[batch.sequence_data["number"]] = (
                    joint.passage_scores.float().cpu().numpy()
                )
                of_mark[batch.marker_data["mark"]] = joint.sentence_scores.float().cpu().numpy()
        return of_window, of_mark

    def rank_passages(
        self,
        question: str,
        passages: Sequence[Sequence[str]],
        top_k: int | None = None,
        threshold: float = 0.0,
        always_select_one: bool = False,
    ) -> list[RankedPassage]:
        """Passages, best first, each with the sentences selected in it.

        Args:
            question: The question.
            passages: Sentences of each; a passage without any has the lowest score.
            top_k: How many to return; all by default, 2 in the paper.
            threshold: Sentences above it are selected (the paper: 0, between labels -1 and 1).
            fallback: Where none is above, select the best; not in the paper, and raises recall.

        Raises:
            EvaluationError: One text in place of a list, or one that cannot be read.
            RecipeError: No passage asked for.
        """
        check_top_k(top_k)
        lists = [as_candidate_list(sentences) for sentences in passages]
        held = [number for number, sentences in enumerate(lists) if sentences]
        texts = [lists[number] for number in held]
        for text in [question, *(text for sentences in texts for text in sentences)]:
            check_text(text)
        scores, of_each = self.predict_passages([question] * len(held), texts)
        ends = np.cumsum([len(sentences) for sentences in texts])
        found = [RankedPassage(n, -np.inf, ()) for n, own in enumerate(lists) if not own]
        for number, score, sentences, end in zip(held, scores, texts, ends):
            own = of_each[end - len(sentences) : end]
            chosen = np.flatnonzero(own > threshold)
            chosen = np.array([own.argmax()]) if always_select_one and not len(chosen) else chosen
            chosen = chosen[np.argsort(-own[chosen], kind="stable")]
            selected = tuple(RankedCandidate(int(i), float(own[i]), sentences[i]) for i in chosen)
            found.append(RankedPassage(number, float(score), selected))
        return sorted(found, key=lambda passage: (-passage.score, passage.index))[:top_k]

    def extract_answer(
        self, question: str, passages: Sequence[Sequence[str]], **options: Any
    ) -> ShortAnswer | None:
        """The short answer, looked for in the selected sentences alone; None without one.

        Args:
            question: The question.
            passages: Sentences of each.
            how: `top_k`, `threshold` and `fallback` of `rank_passages`.
        """
        ranked = self.rank_passages(question, passages, **options)
        chosen = [p.index for p in ranked if p.sentences]
        selected = {(p.index, s.index) for p in ranked for s in p.sentences}
        found = self.extract_answers([question] * len(chosen), [passages[n] for n in chosen])
        answers = (replace(a, passage=chosen[a.passage_index]) for a in found)
        return max(
            (a for a in answers if (a.passage_index, a.sentence_index) in selected),
            key=lambda answer: answer.score,
            default=None,
        )

    @torch.inference_mode()
    def extract_answers(
        self, questions: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[ShortAnswer]:
        """The best span of every sentence, in order.

        Args:
            questions: Of each passage, shape [passages].
            passages: Sentences of each, none empty, [passages][sentences].

        Raises:
            CheckpointError: A model that was not trained to find answers.
        """
        if self.network.answer is None:
            raise CheckpointError(
                "answers asked of a joint model without them"
                "; expected one trained with the objective's `answers`",
                fix="train one, or ask for passages and sentences",
            )
        if not passages:
            return []
        windows = encode_passages(self.tokenizer, questions, passages)
        best: dict[int, ScoredSpan] = {}

        def spans(batch: PackedBatch) -> list[tuple[int, ScoredSpan]]:
            answer = self(batch).answer
            assert answer is not None
            return list(best_spans(answer.float().cpu().numpy(), batch))

        with self.scoring():
            for sentence, span in chain.from_iterable(
                self.map_batches(spans, self._pack_windows(windows))
            ):
                best[sentence] = max(span, best.get(sentence, span))
        texts = [(p, s, text) for p, own in enumerate(passages) for s, text in enumerate(own)]
        return [
            ShortAnswer(span_text(self.tokenizer, text, *best[n][1:]), best[n][0], p, s)
            for n, (p, s, text) in enumerate(texts)
            if n in best  # not a sentence of which the tokenizer knows nothing
        ]

    def _pack_windows(self, windows: PassageWindows) -> Iterator[PackedBatch]:
        return windows.iter_batches(self.balanced_budget(windows.sequences.lengths))

    def predict_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """Sentences alone, each a passage of its own, as numbers from 0 to 1; shape [pairs, 1].

        The sentence's score lies around -1 to 1 and is no probability; a sigmoid keeps its order.
        """
        _, scores = self.predict_passages(questions, [[text] for text in candidates])
        return np.asarray(1.0 / (1.0 + np.exp(-2.0 * scores)), np.float32)[:, None]

    def predict_pairs(
        self,
        questions: Sequence[str],
        candidates: Sequence[str],
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
    ) -> StagedScores:
        """Sentences alone; see `score_exits` and `Ranker.score_pairs`."""
        self.check_no_drop_ratios(drop_ratios)
        return StagedScores(self.predict_exits(questions, candidates)[:, 0])

    def predict_batch(self, batch: PackedBatch) -> Tensor:
        """Not of a batch without markers; see `score_passages`."""
        raise _passages_required_error()

    def binary_logits(self, batch: PackedBatch) -> Tensor:
        """Not of a joint model, which has scores and no logits: it can teach nobody."""
        raise _passages_required_error()


def _passages_required_error() -> CheckpointError:
    return CheckpointError(
        "pairs without markers for a joint model; expected passages of sentences",
        fix="call score_pairs, rank or rank_passages; as a teacher take a ranker of pairs",
    )


def merge_windows(
    windows: PassageWindows, window_scores: np.ndarray, marker_scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of passages, the highest of their windows', and of sentences, the mean of theirs.

    Args:
        windows: Of passages.
        of_window: Scores, shape [windows].
        of_mark: Scores, shape [markers].

    Returns:
        Shapes [passages] and [sentences].
    """
    passage = np.full(windows.window_passage[-1] + 1, -np.inf, np.float32)
    np.maximum.at(passage, windows.window_passage, window_scores)
    sentence = np.bincount(windows.marker_sentence, marker_scores) / np.bincount(
        windows.marker_sentence
    )
    return passage, sentence.astype(np.float32)
