from as2ray.corpora.made_questions import made_questions
from as2ray.records import validate

DOCUMENTS = {
    "loops": [
        "A break statement terminates the nearest enclosing loop.",
        "The continue statement skips the remaining body of one iteration.",
        "Yes.",
    ],
    "alone": ["Every comparison returns a Boolean value unless overridden."],
}


def test_made_question_has_words_of_its_sentence_in_order_and_one_positive():
    table = validate(made_questions(DOCUMENTS, negatives=2), "made")
    rows = table.to_pylist()
    positives = [row for row in rows if row["label"]]
    assert [row["candidate"] for row in positives] == DOCUMENTS["loops"][:2]
    for row in positives:
        words = row["question"].split()
        text = row["candidate"].lower()
        assert len(words) >= 3
        assert [text.index(w) for w in words] == sorted(text.index(w) for w in words)
    assert len(rows) == 2 * 3


def test_made_questions_follow_the_seed_and_leave_out_short_and_lonely_sentences():
    assert made_questions(DOCUMENTS).equals(made_questions(DOCUMENTS))
    assert made_questions({"d": ["Yes.", "No."]}).num_rows == 0
    assert "alone" not in made_questions(DOCUMENTS)["document_id"].to_pylist()
