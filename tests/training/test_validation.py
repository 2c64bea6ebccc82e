import numpy as np
import pyarrow as pa
import pytest
import tiny

from as2ray.checkpoints.initialization import init_ranker
from as2ray.evaluation.measures import mean_average_precision
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.tables.schema import group_by_passage
from as2ray.training.validation import PassageEvalSet


@pytest.fixture
def passages() -> pa.Table:
    """Two passages for each of six questions: two sentences, and three."""
    table = tiny.candidates(6, each=5)
    names = [f"p{row // 5}-{row % 5 // 2 if row % 5 < 4 else 1}" for row in range(table.num_rows)]
    label = table["label"].to_numpy()
    relevant = [int(label[[n == name for n in names]].any()) for name in names]
    table = table.append_column("passage_id", pa.array(names))
    return group_by_passage(table.append_column("passage_label", pa.array(relevant)))


def test_passages_are_measured_by_the_heads_that_are_trained(checkpoint, passages):
    ranker = init_ranker(checkpoint("bert", None), max_length=60, is_joint=True).eval()
    of_passages, of_sentences = ranker.predict_passages(
        passages["question"].to_pylist(), passages["candidate"].to_pylist()
    )
    questions = np.array(passages["question_id"].to_pylist())
    repeated = np.repeat(questions, list(map(len, passages["candidate"].to_pylist())))
    sentence_labels = np.concatenate(passages["label"].to_pylist())
    aps = {
        "passage": mean_average_precision(questions, passages["passage_label"], of_passages),
        "sentence": mean_average_precision(repeated, sentence_labels, of_sentences),
    }
    assert len({*aps.values()}) == 2
    for heads in (["passage"], ["sentence"], ["passage", "sentence"]):
        loss = TwoInOneLoss(passage_loss="passage" in heads, sentence_loss="sentence" in heads)
        measures = PassageEvalSet.from_table(passages, ranker, 400, loss).evaluate(ranker)
        assert measures["AP"] == pytest.approx(np.mean([aps[head] for head in heads]))
        assert {f"AP/{head}": measures[f"AP/{head}"] for head in aps} == pytest.approx(
            {f"AP/{head}": value for head, value in aps.items()}
        )
        shares = {"passage": (of_passages > 0).mean(), "sentence": (of_sentences > 0).mean()}
        prefix = "share_predicted_positive/"
        assert {k: v for k, v in measures.items() if k.startswith(prefix)} == pytest.approx(
            {f"{prefix}{head}": shares[head] for head in heads}
        )
