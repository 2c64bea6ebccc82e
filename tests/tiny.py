"""Tiny tokenizers, checkpoints and corpora, generated instead of downloaded.

Everything follows from seeds and is the same in every process. Torch and transformers are imported
only inside the functions that build models, because pytest-xdist's controller builds none.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import pre_tokenizers

from as2ray.tables.schema import CANDIDATE_SCHEMA, from_rows

if TYPE_CHECKING:
    import transformers

FAMILIES = (
    "bert",
    "roberta",
    "electra",
    "albert",
    "xlm-roberta",
    "distilbert",
    "modernbert",
    "gte",
    "nomic_bert",
    "deberta-v2",
    "qwen3",
    "qwen2",
    "gemma",
    "llama",
)

TOPICS = ("kovarin", "zelimut", "badesso", "quintol")
"""Rare words: a question and each sentence that answers it share one."""

_SYLLABLES = [c + v for c in "bdfglmnprst" for v in "aeiou"]
_random = Random(7)
WORDS = ["".join(_random.choices(_SYLLABLES, k=_random.randint(1, 4))) for _ in range(60)]


def copied(build: Callable) -> Callable:
    """Calls a function once with the same arguments; each caller gets a copy of what it made.

    Copying a tiny ranker takes a fifth of the time of loading its checkpoint.
    """
    built: dict[str, object] = {}

    @wraps(build)
    def copy(*args: object, **kwargs: object) -> object:
        key = repr((args, kwargs))
        if key not in built:
            built[key] = build(*args, **kwargs)
        return deepcopy(built[key])

    return copy


def sentence(random: Random, words: int, topic: str | None = None) -> str:
    """Returns a sentence of made-up words; `topic`, if given, stands twice among them."""
    chosen_words = random.choices(WORDS, k=words)
    if topic is not None:
        for position in (random.randint(0, words), 0):
            chosen_words.insert(position, topic)
    return " ".join(chosen_words).capitalize() + "."


def candidates(questions: int, each: int = 5, seed: int = 0) -> pa.Table:
    """Returns a candidates table; the positive candidate shares the rare word of its question."""
    random = Random(seed)
    rows = []
    for q in range(questions):
        topic = random.choice(TOPICS)
        question = f"What is {topic} {random.choice(WORDS)}?"
        positive = random.randrange(each)
        for c in range(each):
            text = sentence(random, random.randint(2, 6), topic if c == positive else None)
            rows.append((f"q{q}", question, f"q{q}-{c}", text, int(c == positive)))
    return from_rows(rows, CANDIDATE_SCHEMA)


def with_distinct_questions(table: pa.Table) -> pa.Table:
    """Returns a candidates table in which no two questions have the same text."""
    texts = [f"{row['question']} {row['question_id']}" for row in table.to_pylist()]
    return table.set_column(table.column_names.index("question"), "question", [texts])


def numbered_rows() -> pa.Table:
    """199 rows; the label of a row is its number."""
    table = candidates(40).slice(0, 199)
    return table.set_column(4, "label", pa.array(np.arange(199, dtype=np.float32)))


def write_corpus(
    folder: Path, table: pa.Table, files: int = 1, row_group: int | None = None
) -> Path:
    """Writes the table as Parquet files of about equal size, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = [table.num_rows * i // files for i in range(files + 1)]
    for number, (start, end) in enumerate(pairwise(bounds)):
        piece = table.slice(start, end - start)
        pq.write_table(piece, folder / f"part-{number:03}.parquet", row_group_size=row_group)
    return folder


def write_qrels(path: Path, table: pa.Table, relevance: str = "label") -> Path:
    """Writes `question 0 candidate relevance` in TREC's format, one candidate per line."""
    columns = ("question_id", "candidate_id", relevance)
    rows = zip(*(table[name].to_pylist() for name in columns))
    path.write_text(
        "".join(f"{question} 0 {candidate} {grade}\n" for question, candidate, grade in rows)
    )
    return path


# Vocabularies are written by hand: the trainers of `tokenizers` order tokens differently in each
# process, which would change the last digits of every trained network.
_WHOLE = [*TOPICS, "what", "is", *WORDS[:40]]
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_SIGNS = "?.,-()'\"“”–\u0301漢字é"


def _wordpiece() -> dict[str, int]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *_LETTERS, *(f"##{c}" for c in _LETTERS), *_SIGNS, *_WHOLE, "##in", "ba"]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def _bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    # Merges build each word from its first letter on: Ġ k, Ġk o, Ġko v, ...
    words = [f"Ġ{word}" for word in _WHOLE]
    merges = dict.fromkeys((w[:end], w[end]) for w in words for end in range(1, len(w)))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*special, *alphabet, *(left + right for left, right in merges)]
    return {piece: number for number, piece in enumerate(pieces)}, list(merges)


def _unigram() -> list[tuple[str, float]]:
    special = [(piece, 0.0) for piece in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")]
    letters = [(piece, -9.0) for piece in ("▁", *_LETTERS, *_SIGNS)]
    words = [(f"▁{word}", -3.0 - number / 100) for number, word in enumerate(dict.fromkeys(_WHOLE))]
    return [*special, *letters, *words, ("in", -4.0), ("ba", -4.5)]


def published_tokenizer(family: str) -> transformers.PreTrainedTokenizerBase:
    """Returns a small tokenizer of the family's class in transformers."""
    import transformers

    if family == "roberta":
        vocabulary, merges = _bpe()
        return transformers.RobertaTokenizer(vocab=vocabulary, merges=merges)
    if family == "albert":
        return transformers.AlbertTokenizer(vocab=_unigram())
    if family in ("xlm-roberta", "gte"):
        special = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
        pieces = [*special, *_unigram()[5:], ("<mask>", 0.0)]
        return transformers.XLMRobertaTokenizer(vocab=pieces)
    if family == "deberta-v2":
        special = [(piece, 0.0) for piece in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
        return transformers.DebertaV2Tokenizer(vocab=[*special, *_unigram()[5:], ("[MASK]", 0.0)])
    if family in DECODERS or family == "modernbert":
        return _decoder_tokenizer() if family in DECODERS else _modernbert_tokenizer()
    return transformers.BertTokenizer(vocab=_wordpiece())


DECODERS = ("qwen3", "qwen2", "gemma", "llama")
"""Families whose pairs stand in a prompt, which is longer than the lengths of most tests."""


def _decoder_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Returns byte-level BPE as Qwen's: no special tokens around texts, merges across words."""
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    vocabulary, merges = _bpe()
    merges = [*merges, ("?", "Ċ"), (".", "Ċ"), ("Ċ", "Ċ"), (":", "Ġ"), (">", ":"), (">:", "Ġ")]
    merges += [("y", "e"), ("ye", "s"), ("n", "o"), ("Y", "e"), ("Ye", "s")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    # Its words begin with a space, which the first word of a text has not.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )


def _modernbert_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Returns byte-level BPE with BERT's special tokens, and without token types."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, processors

    names = {"<s>": "[CLS]", "<pad>": "[PAD]", "</s>": "[SEP]", "<unk>": "[UNK]"}
    names["<mask>"] = "[MASK]"
    vocabulary, merges = _bpe()
    vocabulary = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name[1:-1].lower()}_token": name for name in names.values()},
    )


def config_of(family: str, vocabulary: int, **changes: object) -> transformers.PreTrainedConfig:
    """Returns the configuration of a network with a few thousand weights."""
    import transformers

    common = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 66,
    }
    family_settings = {
        "bert": {},
        "roberta": {"type_vocab_size": 1, "pad_token_id": 1},
        "electra": {"embedding_size": 16},
        "albert": {"embedding_size": 16},
        "xlm-roberta": {"type_vocab_size": 1, "pad_token_id": 1},
        "distilbert": {},
        # Every third layer is global; the others reach as far as 4 tokens.
        "modernbert": {
            "local_attention": 8,
            "classifier_pooling": "mean",
            "pad_token_id": 1,
            **dict.fromkeys(("bos_token_id", "cls_token_id"), 0),
            **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
        },
        "gte": {"pad_token_id": 1},
        # Two heads share their keys.
        **{name: {"pad_token_id": 1, "num_key_value_heads": 2, "head_dim": 8} for name in DECODERS},
        "nomic_bert": {},
        # As DeBERTa-v3: no positions and types in the embeddings, distances in growing buckets.
        "deberta-v2": {
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["c2p", "p2c"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    }[family]
    settings = {**common, **family_settings, **changes}
    names = _CONFIG_NAMES.get(family, {})
    settings = {names.get(name, name): value for name, value in settings.items()}
    return transformers.AutoConfig.for_model(family, **settings)


_CONFIG_NAMES = {
    "distilbert": {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    "modernbert": {
        "hidden_dropout_prob": "mlp_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
}
"""What a family's configuration calls the settings of BERT's."""


def network_of(
    family: str, vocabulary: int, labels: int | None = 2, seed: int = 0, **changes: object
) -> transformers.PreTrainedModel:
    """Returns a random classifier, or an encoder without a head if `labels` is None."""
    import torch
    import transformers

    torch.manual_seed(seed)
    if labels is None:
        return transformers.AutoModel.from_config(config_of(family, vocabulary, **changes)).eval()
    changes = {"num_labels": labels, "initializer_range": 0.2, **changes}
    config = config_of(family, vocabulary, **changes)
    network = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake would not show
        for weights in network.parameters():
            if weights.ndim == 1:
                weights.add_(torch.randn_like(weights) * 0.1)
    return network


def write_checkpoint(
    folder: Path,
    family: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    labels: int | None = 2,
    **changes: object,
) -> Path:
    """Writes a Hugging Face checkpoint folder with transformers."""
    network_of(family, len(tokenizer), labels, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_wikiqa(folder: Path, split: str, seed: int, questions: int) -> None:
    """Writes a made-up split of WikiQA in the format of its release."""
    folder.mkdir(parents=True, exist_ok=True)
    header = ["QuestionID", "Question", "DocumentID", "DocumentTitle", "SentenceID"]
    header += ["Sentence", "Label"]
    with (folder / f"WikiQA-{split}.tsv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
        writer.writerow(header)
        for row in candidates(questions, seed=seed).to_pylist():
            question = f"{row['question']} {split}"
            writer.writerow(
                [
                    row["question_id"],
                    question,
                    "D1",
                    "T",
                    row["candidate_id"],
                    row["candidate"],
                    row["label"],
                ]
            )


def write_seq2seq(folder: Path) -> Path:
    """Writes a random T5 that says something about everything."""
    import torch
    import transformers

    tokenizer = published_tokenizer("bert")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        **{"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        decoder_start_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():  # as it is born it repeats its first token, which is no word
        for weights in model.parameters():
            weights.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
