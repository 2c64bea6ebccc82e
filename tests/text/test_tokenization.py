import json
import pickle
import subprocess
import sys

import pytest

from as2ray.errors import CheckpointError, ConfigError
from as2ray.text import tokenization
from as2ray.text.tokenization import PairTokenizer

QUESTION = "What is kovarin?"
ODD_TEXTS = [
    "Badesso lala, “quoted” – naïve café!",
    "ＦＵＬＬ width ﬁ ligature e\u0301 combined",
    "漢字 かな 한국어 العربية 🙂👩‍👩‍👧",
    "tab\tnew\nline \u00a0 nbsp \u200b zero",
    "[SEP] </s> [CLS] written out",
    "x" * 50,
    "   spaces around   ",
]


@pytest.fixture
def pair_tokenizer(published, family):
    return create_tokenizer(published(family))


def create_tokenizer(tokenizer, max_length=60, max_question_length=30) -> PairTokenizer:
    return PairTokenizer(tokenizer.backend_tokenizer.to_str(), max_length, max_question_length)


def split(sequences) -> list[tuple[list[int], list[int]]]:
    """Ids and types of each sequence."""
    sequence_list, start = [], 0
    for length in sequences.lengths.tolist():
        part = slice(start, start + length)
        sequence_list.append(
            (sequences.token_ids[part].tolist(), sequences.token_types[part].tolist())
        )
        start += length
    assert start == len(sequences.token_ids)
    return sequence_list


def reference(tokenizer, question, candidate, **options) -> tuple[list[int], list[int]]:
    encoded = tokenizer(question, candidate, return_token_type_ids=True, **options)
    return encoded["input_ids"], encoded["token_type_ids"]


def test_encode_pairs_that_fit_equals_the_published_tokenizer(published, family, pair_tokenizer):
    texts = ["Lutetu muri me bodafupo tu.", "Quintol tosipo (so) 3.14?", *ODD_TEXTS]
    tokenizer = published(family)
    pairs = [(q, c) for q in [QUESTION, "muri?", *ODD_TEXTS] for c in texts]
    pairs = [p for p in pairs if len(tokenizer(*p)["input_ids"]) <= 400]
    encoded = split(create_tokenizer(tokenizer, 500, 240).encode(*map(list, zip(*pairs))))
    assert encoded == [reference(tokenizer, *pair) for pair in pairs]
    assert len(pairs) > 60


def test_encode_long_candidate_is_cut_as_only_second_cuts(published, family, pair_tokenizer):
    tokenizer, long = published(family), "lutetu muri me bodafupo tu " * 30
    encoded = split(pair_tokenizer.encode([QUESTION, "muri me?"], [long, long]))
    options = {"truncation": "only_second", "max_length": 60}
    assert encoded == [reference(tokenizer, q, long, **options) for q in (QUESTION, "muri me?")]
    assert [len(ids) for ids, _ in encoded] == [60, 60]


def test_candidate_is_cut_at_a_length_of_its_own_whatever_the_question(published):
    """Of 512 tokens a document takes 445 (Mokrii et al., section 4)."""
    tokenizer, long = published("bert"), "lutetu muri me bodafupo tu " * 300
    encoded = PairTokenizer(tokenizer.backend_tokenizer.to_str(), 512, 64, 445)
    lengths = encoded.encode(["muri?", long], [long, long]).lengths.tolist()
    question = len(tokenizer("muri?", add_special_tokens=False)["input_ids"])
    assert lengths == [question + 445 + 3, 64 + 445 + 3]


def test_encode_long_question_keeps_its_first_tokens_and_room_for_the_candidate(
    published, family, pair_tokenizer
):
    tokenizer, long = published(family), "lutetu muri me bodafupo tu " * 30
    question = tokenizer(long, add_special_tokens=False)["input_ids"][:30]
    [(ids, _)] = split(pair_tokenizer.encode([long], [long]))
    room = 60 - 30 - tokenizer.num_special_tokens_to_add(pair=True)
    assert len(ids) == 60
    assert ids[1:31] == question
    assert ids[-room - 1 : -1] == question[:room]


def test_tokens_of_the_vocabulary_have_names(published, pair_tokenizer, family):
    tokenizer = published(family)
    names = [pair_tokenizer.id_to_token(token_id) for token_id in range(5, 9)]
    assert names == tokenizer.convert_ids_to_tokens(range(5, 9))


def test_encode_repeated_texts_give_repeated_sequences(pair_tokenizer):
    questions = [QUESTION, "muri?", QUESTION, QUESTION]
    texts = ["badesso.", "badesso.", "lala ne.", "badesso."]
    together = split(pair_tokenizer.encode(questions, texts))
    alone = [split(pair_tokenizer.encode([q], [t]))[0] for q, t in zip(questions, texts)]
    assert together == alone
    assert together[0] == together[3]


def test_encode_text_that_normalises_to_nothing_leaves_its_place_empty(
    published, family, pair_tokenizer
):
    texts = ["\u200b", "\u0000", " ", "badesso."]
    encoded = split(pair_tokenizer.encode([QUESTION] * 4, texts))
    assert encoded == [reference(published(family), QUESTION, text) for text in texts]


def test_encode_text_in_many_scripts_stays_within_max_length(pair_tokenizer):
    texts = [text * 9 for text in ODD_TEXTS]
    encoded = pair_tokenizer.encode(texts, texts[::-1])
    assert len(encoded) == len(texts)
    assert encoded.lengths.max() <= 60


def test_texts_of_several_batches_are_tokenized_in_order(pair_tokenizer, monkeypatch):
    texts = ["muri?", "badesso.", "muri?", "lala ne.", "kovarin", "tu"]
    expected = split(pair_tokenizer.encode(texts, texts[::-1]))
    monkeypatch.setattr(tokenization, "TOKENIZE_BATCH", 2)
    assert split(pair_tokenizer.encode(texts, texts[::-1])) == expected


def test_tokenizer_of_a_folder_has_the_settings_that_are_given(published, tmp_path):
    published("bert").save_pretrained(tmp_path)
    settings = {"max_length": 50, "max_question_length": 9, "single_separator": True}
    read = PairTokenizer.from_folder(tmp_path, **settings)
    assert {name: getattr(read, name) for name in settings} == settings
    assert read == PairTokenizer(read.tokenizer_json, 50, 9, single_separator=True)


def test_encode_no_pairs_gives_no_sequences(pair_tokenizer):
    encoded = pair_tokenizer.encode([], [])
    assert len(encoded) == 0
    assert len(encoded.token_ids) == 0


def test_encode_with_padding_and_truncation_in_the_definition_ignores_both(published):
    tokenizer = published("bert")
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    definition["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    pair = (QUESTION, "Lutetu muri me bodafupo tu.")
    encoded = PairTokenizer(json.dumps(definition), 60, 30).encode(*([text] for text in pair))
    assert split(encoded) == [reference(tokenizer, *pair)]


@pytest.mark.parametrize(
    ("max_length", "max_question_length"), [(60, 0), (60, -1), (60, 57), (3, 1)]
)
def test_pair_tokenizer_without_room_for_both_texts_is_refused(
    published, max_length, max_question_length
):
    with pytest.raises(ConfigError, match=f"max_question_length={max_question_length}"):
        create_tokenizer(published("bert"), max_length, max_question_length)


def test_pair_tokenizer_with_room_for_one_candidate_token_is_accepted(published):
    [(ids, _)] = split(
        create_tokenizer(published("bert"), 60, 56).encode(["muri " * 99], ["badesso lala"])
    )
    assert len(ids) == 60


def test_from_folder_without_a_fast_tokenizer_names_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        PairTokenizer.from_folder(tmp_path)


def test_from_folder_encodes_as_the_checkpoint_does(checkpoint, published, family):
    tokenizer = PairTokenizer.from_folder(checkpoint(family), max_length=60, max_question_length=30)
    encoded = split(tokenizer.encode([QUESTION], ["Badesso lala."]))
    assert encoded == [reference(published(family), QUESTION, "Badesso lala.")]


def test_pair_tokenizer_after_use_travels_to_another_process(pair_tokenizer):
    before = split(pair_tokenizer.encode([QUESTION], ["Badesso lala."]))
    copy = pickle.loads(pickle.dumps(pair_tokenizer))
    assert copy == pair_tokenizer
    assert split(copy.encode([QUESTION], ["Badesso lala."])) == before


def test_text_modules_import_neither_torch_nor_transformers_nor_ray():
    code = (
        "import sys, as2ray.text.tokenization, as2ray.text.packing, as2ray.data.pair_reader\n"
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"
