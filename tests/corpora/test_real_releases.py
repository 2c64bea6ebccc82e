"""Published numbers and known leaks of the real releases; skipped where they are absent."""

import re

import pytest

from as2ray.corpora.leaks import check_leaks, remove_leaks, shared_questions
from as2ray.corpora.preparation import read_split
from as2ray.corpora.sampling import flip_labels
from as2ray.corpora.stats import compute_stats
from as2ray.corpora.verification import verify_releases
from as2ray.errors import LeakError


def test_real_releases_have_every_published_number(real):
    checks = verify_releases(real)
    assert len(checks) >= 36
    assert [check for check in checks if not check.is_ok] == []


def test_real_wikiqa_noise_flips_the_numbers_of_the_paper(real):
    train = read_split("wikiqa", "train", real / "wikiqa", "no_all_negative")
    before = train["label"].to_numpy()
    flipped = [(flip_labels(train, f, 0)["label"].to_numpy() != before).sum() for f in (0.1, 0.2)]
    assert flipped == [867, 1734]


def test_real_wikiqa_has_one_question_in_train_and_test(real):
    splits = {s: read_split("wikiqa", s, real / "wikiqa") for s in ("train", "dev", "test")}
    with pytest.raises(
        LeakError, match=r"1 questions in both 'train' and 'test', such as .*homebrew"
    ):
        check_leaks(splits)
    check_leaks({**splits, "train": remove_leaks(splits["train"], splits["dev"], splits["test"])})


def test_real_trecqa_splits_share_no_question(real):
    check_leaks({s: read_split("trecqa", s, real / "trecqa") for s in ("train-all", "dev", "test")})


def test_real_trecqa_leaves_no_treebank_token(real):
    texts = read_split("trecqa", "test", real / "trecqa")["candidate"].to_pylist()
    left = re.compile(r"``|''|-[LR][RSC]B-| [,.;:?!%]( |$)| n't")
    assert [t for t in texts if left.search(t)] == []


def test_real_qnli_dev_is_made_from_squad_dev(real):
    squad = read_split("squad", "dev", real / "squad", candidate_scope="paragraph")
    qnli = read_split("qnli", "dev", real / "qnli")
    assert len(shared_questions(squad, qnli)) == compute_stats(qnli).counts.num_questions == 4100


def test_real_squad_every_question_keeps_its_answers_under_a_cap(real):
    drawn = compute_stats(read_split("squad", "train", real / "squad", max_candidates=5))
    assert drawn.num_all_negative == 0
    assert drawn.counts.num_questions == 11_877
    assert (
        drawn.counts.num_positives == 11_895
    )  # 18 more than questions: answers across two sentences
    assert drawn.candidates_per_question.max == 5
