import numpy as np
import pyarrow as pa
import pytest
import tiny

from as2ray.checkpoints.initialization import init_ranker
from as2ray.evaluation.measures import mean_average_precision, validation_measures
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.tables.schema import group_by_passage
from as2ray.training.validation import EvalSet, PassageEvalSet, validate


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


def test_pairs_are_measured_by_all_outputs_and_all_tables_by_name(checkpoint):
    table = tiny.candidates(6, each=5)
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=(1, 3)).eval()
    texts = table["question"].to_pylist(), table["candidate"].to_pylist()
    exits = ranker.predict_exits(*texts)
    # A batch has at least the longest pair.
    eval_set = EvalSet.from_table(table, ranker, 1)
    assert max(batch.num_tokens for batch in eval_set.batches) <= 60
    assert len(eval_set.batches) > len(EvalSet.from_table(table, ranker, 400).batches) > 1
    scores = eval_set.compute_scores(ranker)
    np.testing.assert_allclose(scores[:, :2], exits, atol=1e-5)
    np.testing.assert_allclose(scores[:, 2], exits[:, 1], atol=1e-5)
    measures = eval_set.evaluate(ranker)
    columns = table["question_id"].to_numpy(), table["label"].to_numpy()
    expected = validation_measures(*columns, scores[:, 2])
    assert measures == {
        **expected,
        "AP/exit_1": validation_measures(*columns, scores[:, 0])["AP"],
        "AP/exit_3": expected["AP"],
        "share_predicted_positive": np.mean(scores[:, 2] > 0.5),
    }
    pointwise = init_ranker(checkpoint("bert", 2), max_length=60).eval()
    named = validate(pointwise, {"dev": eval_set, "test": eval_set})
    assert set(named) == {
        f"{name}/{measure}"
        for name in ("dev", "test")
        for measure in (*expected, "share_predicted_positive")
    }
