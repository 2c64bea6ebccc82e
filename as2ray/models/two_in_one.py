"""Two-in-One (section 4.1): one encoder pass scores a passage and its sentences.

The first token represents the passage, and the marker before each sentence represents the sentence;
a two-layer head scores each. If a passage is longer than a window, its score is the maximum over
its windows. A sentence in two windows has the mean of its two scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from as2ray.errors import CheckpointError
from as2ray.models.encoder.encoder import Encoder, build_encoder, copy_encoder_weights
from as2ray.models.encoder.families import dense_dropout
from as2ray.models.feed_forward import build_feed_forward
from as2ray.models.precision import fp32_head
from as2ray.models.ranker import CONFIG_KEY, Ranker, as_candidate_list
from as2ray.models.span_extraction import ScoredSpan, best_spans
from as2ray.outputs import PassageOutput, RankedCandidate, RankedPassage, ShortAnswer
from as2ray.text.answer_spans import span_text
from as2ray.text.input_checks import check_text, check_top_k
from as2ray.text.packing import PackedBatch
from as2ray.text.passage_windows import PassageWindows, encode_passages
from as2ray.text.tokenization import PairTokenizer


class TwoInOneNetwork(PreTrainedModel):  # type: ignore[misc]
    """An encoder with a head for passages and a head for sentences, in Hugging Face format.

    Args:
        config: Configuration of the encoder. Its entry `as2ray` has `extract_answers`.
    """

    base_model_prefix = "body"
    _supports_sdpa = True  # the encoder supports it; `Encoder` sets packed attention

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.body = build_encoder(config)
        hidden_size, dropout = config.hidden_size, dense_dropout(config)
        self.passage = build_feed_forward(hidden_size, 1, dropout, num_hidden_layers=1)
        self.sentence = build_feed_forward(hidden_size, 1, dropout, num_hidden_layers=1)
        extract_answers = getattr(config, CONFIG_KEY, {}).get("extract_answers", False)
        self.answer = nn.Linear(hidden_size, 2) if extract_answers else None
        self.post_init()

    @classmethod
    def from_encoder(
        cls, body: PreTrainedModel, extract_answers: bool = False
    ) -> "TwoInOneNetwork":
        """Creates a joint model with new heads from a trained encoder.

        Args:
            body: An encoder, or a model with a head around one.
            extract_answers: Whether the model gets a head that extracts short answers.
        """
        config = deepcopy(body.base_model.config)
        setattr(config, CONFIG_KEY, {"ranker": "two_in_one", "extract_answers": extract_answers})
        network = cls(config)
        copy_encoder_weights(body, network.body)
        return network


class TwoInOneRanker(Ranker):
    """A joint model that ranks passages with their supporting sentences, or single sentences.

    Args:
        network: The encoder with its heads.
        tokenizer: Turns texts into tokens; its `max_length` is the size of a window.
    """

    def __init__(self, network: TwoInOneNetwork, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        self.network = network
        self.encoders = [Encoder(network.body)]

    def forward(self, batch: PackedBatch) -> PassageOutput:
        """Returns scores and states of windows and of the sentences marked in them."""
        hidden, layout = self.encoder.embed(batch)
        markers = torch.from_numpy(batch.markers).to(hidden.device)
        if self.network.answer is None:
            tokens = torch.cat([layout.first_tokens, markers])
            states = self.encoder.run_to_tokens(tokens, hidden, layout)
            passage_states, sentence_states = states[: len(batch)], states[len(batch) :]
        else:
            hidden = self.encoder.run_layers(hidden, layout)
            passage_states, sentence_states = hidden[layout.first_tokens], hidden[markers]
        with fp32_head(hidden):
            passage_scores = self.network.passage(passage_states.float())[:, 0]
            sentence_scores = self.network.sentence(sentence_states.float())[:, 0]
            output = PassageOutput(passage_scores, sentence_scores, passage_states, sentence_states)
            if self.network.answer is None:
                return output
            span_logits = self.network.answer(hidden.float())
        lengths = torch.from_numpy(batch.lengths).to(hidden.device)
        token_passage = torch.repeat_interleave(lengths.long())
        return output._replace(span_logits=span_logits, token_passage=token_passage)

    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without lengths and calibration."""
        return {"ranker": "two_in_one", "extract_answers": self.network.answer is not None}

    def predict_passages(
        self,
        questions: Sequence[str],
        passages: Sequence[Sequence[str]],
        spans: dict[int, ScoredSpan] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores of passages and of all their sentences; float32, around -1 to 1.

        Args:
            questions: Question of each passage, shape [passages].
            passages: Sentences of each passage, none of them empty, [passages][sentences].
            spans: Gets the best span of each sentence, by its index among all sentences.

        Returns:
            Shapes [passages] and [sentences], where the sentences of all passages are end to end.
        """
        if not passages:
            return np.zeros(0, np.float32), np.zeros(0, np.float32)
        windows = encode_passages(self.tokenizer, questions, passages)
        batches = windows.iter_batches(self.balanced_budget(windows.sequences.lengths))
        return merge_windows(windows, *self.predict_windows(windows, batches, spans))

    @torch.inference_mode()
    def predict_windows(
        self,
        windows: PassageWindows,
        batches: Iterable[PackedBatch],
        spans: dict[int, ScoredSpan] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores of windows and of their markers; float32, NaN if they are in no batch.

        Args:
            windows: Windows of passages.
            batches: Some or all of them, packed.
            spans: Gets the best span of each sentence, by its index among all sentences.
        """
        window_scores = np.full(len(windows.sequences), np.nan, np.float32)
        marker_scores = np.full(len(windows.marker_sentence), np.nan, np.float32)

        best = {} if spans is None else spans

        def run(batch: PackedBatch) -> tuple[PackedBatch, PassageOutput, list[Any]]:
            output = self(batch)
            logits = None if spans is None else output.span_logits.float().cpu().numpy()
            return batch, output, [] if logits is None else list(best_spans(logits, batch))

        with self.scoring():
            for batch, output, batch_spans in self.map_batches(run, batches):
                for sentence, span in batch_spans:
                    best[sentence] = max(span, best.get(sentence, span))
                window_index = batch.sequence_data["number"]
                window_scores[window_index] = output.passage_scores.float().cpu().numpy()
                marker_index = batch.marker_data["marker"]
                marker_scores[marker_index] = output.sentence_scores.float().cpu().numpy()
        return window_scores, marker_scores

    def rank_passages(
        self,
        question: str,
        passages: Sequence[Sequence[str]],
        top_k: int | None = None,
        threshold: float = 0.0,
        always_select_one: bool = False,
    ) -> list[RankedPassage]:
        """Ranks passages, best first, and selects sentences in each.

        Args:
            question: The question.
            passages: Sentences of each passage. A passage without sentences is ranked last.
            top_k: Number of passages to return; by default all, 2 in the paper.
            threshold: Sentences with a higher score are selected (paper: 0, between the labels -1
                and 1).
            always_select_one: Whether the best sentence is selected if none is above the threshold.
                This is not in the paper; it raises recall.

        Raises:
            EvaluationError: A text is empty or not valid Unicode, or a string was passed instead of
                a list of sentences.
            ConfigError: `top_k` is below 1.
        """
        check_top_k(top_k)
        passages = [as_candidate_list(sentences) for sentences in passages]
        indices = [index for index, sentences in enumerate(passages) if sentences]
        texts = [passages[index] for index in indices]
        for text in [question, *chain.from_iterable(texts)]:
            check_text(text)
        passage_scores, sentence_scores = self.predict_passages([question] * len(indices), texts)
        ends = np.cumsum([len(sentences) for sentences in texts])
        score_parts = np.split(sentence_scores, ends[:-1])
        empty_indices = [index for index, sentences in enumerate(passages) if not sentences]
        ranked = [RankedPassage(index, -np.inf, ()) for index in empty_indices]
        for index, score, sentences, scores in zip(indices, passage_scores, texts, score_parts):
            selected = np.flatnonzero(scores > threshold)
            if always_select_one and not len(selected):
                selected = np.array([scores.argmax()])
            order = selected[np.argsort(-scores[selected], kind="stable")].tolist()
            candidates = (RankedCandidate(i, float(scores[i]), sentences[i]) for i in order)
            ranked.append(RankedPassage(index, float(score), tuple(candidates)))
        return sorted(ranked, key=lambda passage: (-passage.score, passage.index))[:top_k]

    def extract_answer(
        self, question: str, passages: Sequence[Sequence[str]], **options: Any
    ) -> ShortAnswer | None:
        """Extracts the best short answer from the selected sentences; None if there is none.

        Args:
            question: The question.
            passages: Sentences of each passage.
            options: `top_k`, `threshold` and `always_select_one` of `rank_passages`.

        Raises:
            CheckpointError: The model was not trained to extract answers.
        """
        ranked = self.rank_passages(question, passages, **options)
        indices = [passage.index for passage in ranked if passage.sentences]
        selected = {(p.index, s.index) for p in ranked for s in p.sentences}
        texts = [passages[index] for index in indices]
        answers = [
            replace(answer, passage_index=indices[answer.passage_index])
            for answer in self.extract_answers([question] * len(indices), texts)
        ]
        answers = [a for a in answers if (a.passage_index, a.sentence_index) in selected]
        return max(answers, key=lambda answer: answer.score, default=None)

    def extract_answers(
        self, questions: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[ShortAnswer]:
        """Returns the best span of every sentence, in order.

        Args:
            questions: Question of each passage, shape [passages].
            passages: Sentences of each passage, none of them empty, [passages][sentences].

        Raises:
            CheckpointError: The model was not trained to extract answers.
        """
        if self.network.answer is None:
            raise CheckpointError(
                "this joint model was not trained to extract answers",
                fix="train one with the loss option `answer_loss`",
            )
        spans: dict[int, ScoredSpan] = {}
        self.predict_passages(questions, passages, spans)
        return self.read_spans(passages, spans)

    def read_spans(
        self, passages: Sequence[Sequence[str]], spans: Mapping[int, ScoredSpan]
    ) -> list[ShortAnswer]:
        """Returns the texts of the spans that `predict_passages` found, sentence by sentence."""
        answers, sentence = [], 0
        for passage_index, sentences in enumerate(passages):
            for sentence_index, text in enumerate(sentences):
                if sentence in spans:  # the tokenizer may know no token of a sentence
                    score, first, last = spans[sentence]
                    answer = span_text(self.tokenizer, text, first, last)
                    answers.append(ShortAnswer(answer, score, passage_index, sentence_index))
                sentence += 1
        return answers

    def predict_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """Returns scores from 0 to 1 of sentences, each as a passage of its own; shape [pairs, 1].

        The score of a sentence is around -1 to 1 and no probability; a sigmoid keeps the order.
        """
        _, scores = self.predict_passages(questions, [[text] for text in candidates])
        return np.asarray(1.0 / (1.0 + np.exp(-2.0 * scores)), np.float32)[:, None]


def merge_windows(
    windows: PassageWindows, window_scores: np.ndarray, marker_scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores of passages (maximum over windows) and of sentences (mean over markers).

    Args:
        windows: Windows of passages.
        window_scores: Shape [windows].
        marker_scores: Shape [markers].

    Returns:
        Shapes [passages] and [sentences].
    """
    passage_scores = np.full(windows.window_passage[-1] + 1, -np.inf, np.float32)
    np.maximum.at(passage_scores, windows.window_passage, window_scores)
    marker_sentence = windows.marker_sentence
    sentence_scores = np.bincount(marker_sentence, marker_scores) / np.bincount(marker_sentence)
    return passage_scores, sentence_scores.astype(np.float32)
