"""Measures building, searching and asking an index, beside bm25s + sentence-transformers.

The corpus is that of `search_corpus`: 98,304 real sentences, and others made of their halves. Each
size's result is written when it is there. What is measured on how much:

- encoding: 600 sentences, in turns with sentence-transformers, 5 turns in each precision;
- build: all sentences but for encoding. The real ones are encoded once, in blocks that stay under
  `--work`, and the embedding of a sentence made of halves is the mean of its two sources'. So the
  recall of approximate search holds for these. The index stays under `--work`, too;
- search: 200 queries for the first 100, 50 of them also without approximation; BM25 in 3 turns with
  bm25s, which searches the same index, and builds one of up to 50,000 sentences;
- ask: 200 questions of SQuAD dev whose answers are in the index, with the ranker of `--ranker`
  (by default one of the speed of a MiniLM that is not trained). Stage zero is fitted on questions
  of other articles, once, and also measured with at most `--max_ranked` candidates;
- peer: 20 questions.

`--parts` names the ones to measure: with a time limit, they can run one after the other.
"""

import resource
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bm25s
import numpy as np
import torch
from scipy.stats import binomtest

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import MINILM_NAME, packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.experiments.documents import label_parts, retrieve_parts
from as2ray.models.precision import resolve_dtype
from as2ray.models.sentence_encoder import SentenceEncoder
from as2ray.profiling.speed_ratio import measure_alternately, measure_rate
from as2ray.retrieval import embeddings
from as2ray.retrieval.answer_fitting import fit_max_ranked, fit_similarity_gap
from as2ray.retrieval.answer_scoring import AnswerScoring, default_scoring
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.question_answering import QuestionAnswerer, find_candidates
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.text.bm25 import BM25
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.search_corpus import (
    LabeledQuestion,
    SearchCorpus,
    build_corpus,
    has_source_files,
    read_questions,
)

TOP_K = 100

ALL_RANKED, STAGE_ZERO = "all candidates ranked", "stage zero"
"""Systems that are compared: the second one ranks `--max_ranked` candidates at most."""

ANSWER_RANK = 3
"""An answer among this many is a hit."""

PARTS = ("build", "search", "ask", "peer", "encoding")

FILE_KINDS = {"all": "", "int8": "/embedding", "faiss": "embeddings.faiss", "BM25": "/bm25/"}
"""Part of the name of each kind of file."""

NUM_PEER_QUESTIONS = 20
NUM_EXACT_QUERIES = 50
"""Queries of exact search over all embeddings."""

NUM_INDEXED = 50_000
"""Sentences of a turn in which building BM25 is compared."""

NUM_ENCODED = 600
"""Sentences of a turn in which encoding is compared."""


class StoredEncoder:
    """The packaged encoder, whose embeddings of the real sentences are stored.

    Args:
        encoder: The encoder.
        corpus: The sentences that it is asked for.
        folder: Where the embeddings are.
    """

    def __init__(self, encoder: SentenceEncoder, corpus: SearchCorpus, folder: Path) -> None:
        self.encoder, self.corpus, self.folder = encoder, corpus, folder
        self.name, self.dimension = encoder.name, encoder.dimension
        self.fingerprint, self.encode_queries = encoder.fingerprint, encoder.encode_queries

    @cached_property
    def real_embeddings(self) -> np.ndarray:
        """Embeddings of the real sentences, shape [sentences, dimension]."""
        self.folder.mkdir(parents=True, exist_ok=True)
        blocks, size = [], embeddings.BLOCK_SIZE
        for start in range(0, self.corpus.num_real, size):
            texts = self.corpus.sentences[start : min(start + size, self.corpus.num_real)]
            file = self.folder / f"{self.fingerprint}-{start}-{len(texts)}.npy"
            if not file.exists():
                np.save(file, self.encoder.encode_documents(texts))
            blocks.append(np.load(file))
        return np.concatenate(blocks)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Row of each sentence in the corpus."""
        return {text: row for row, text in enumerate(self.corpus.sentences)}

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Returns unit vectors, shape [texts, dimension]."""
        rows = np.array([self.row_of[text] for text in texts])
        real, num_real = self.real_embeddings, self.corpus.num_real
        result, is_real = np.empty((len(texts), self.dimension), np.float32), rows < num_real
        result[is_real] = real[rows[is_real]]
        means = real[self.corpus.halves[rows[~is_real] - num_real]].mean(1)
        result[~is_real] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return result


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    limit_cores(args.cores)
    if not args.small and not has_source_files(args.data):
        sys.exit("skipped: needs the articles of SQuAD under --data")
    sizes = [300] if args.small else args.sentences
    embeddings.MIN_APPROXIMATE = 1  # type: ignore[misc]  # every size is searched both ways
    work = nullcontext(args.work) if args.work else TemporaryDirectory(prefix="as2ray-retrieval-")
    results: dict[str, Any] = {}
    with work as folder:
        for size in sizes if {*args.parts} - {"encoding"} else ():
            results[f"{size:,}"] = _measure_size(Path(folder), size, args)
            write_report("retrieval", args, _list_claims(results), results)
    if "encoding" in args.parts:
        data, num_texts = (None, 8) if args.small else (args.data, NUM_ENCODED)
        texts = build_corpus(num_texts, data).sentences
        results["encoding"] = _compare_encoding(texts, 1 if args.small else 5)
        write_report("retrieval", args, _list_claims(results), results)


def _add_flags(parser: ArgumentParser) -> None:
    sizes = [10_000, 100_000, 1_000_000]
    parser.add_argument("--sentences", type=int, nargs="+", default=sizes, help="sizes, ascending")
    parser.add_argument("--work", type=Path, help="folder of indexes and embeddings, which stay")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--ranker", type=Path, help="checkpoint of the ranker")
    parser.add_argument("--max_ranked", type=int, default=8, help="candidates after stage zero")
    parser.add_argument("--questions", type=int, default=200, help="questions that are asked")


def _measure_size(work: Path, size: int, args: Namespace) -> dict[str, Any]:
    data = None if args.small else args.data
    corpus = build_corpus(size, data)
    encoder = StoredEncoder(load_sentence_encoder(), corpus, work / "embeddings")
    folder, measured = work / f"index-{size}", {}
    if not folder.exists():
        measured["build"] = _build_index(folder, corpus, encoder)
    index = SentenceIndex.open(folder, lambda _: encoder)
    sentences = set(corpus.sentences)
    num_read = 5 * args.questions // 2  # half of them to fit, half to measure, and some to spare
    labeled = [q for q in read_questions(data, num_read) if q.answers & sentences]
    tests = [q for q in labeled if q.article % 2 == 0][: 2 if args.small else args.questions]
    queries = [q.question for q in tests]
    num_repeats = 1 if args.small else 3
    ranker = args.ranker or work / "untrained"
    if not ranker.exists():
        save(init_ranker(packaged_minilm(), max_length=128), ranker)
    if "search" in args.parts:
        measured["search"] = _measure_search(index, queries)
        measured["to bm25s alone"] = _compare_bm25(index, corpus, queries, num_repeats)
    if "ask" in args.parts:
        fitted_on = [q for q in labeled if q.article % 2][: len(tests)]
        measured["ask"] = _measure_ask(index, ranker, fitted_on, tests, args.max_ranked)
    if "peer" in args.parts:
        stored_rows = np.concatenate([p.rows(slice(None)) for p in index.embeddings.shards])
        peer, few = Peer(index, corpus, stored_rows, ranker), queries[:NUM_PEER_QUESTIONS]
        measured["peer"] = {
            "hybrid": _percentiles(peer.search, few),
            "ask": _percentiles(peer.ask, few),
        }
    return measured


def _build_index(folder: Path, corpus: SearchCorpus, encoder: StoredEncoder) -> dict[str, Any]:
    documents = folder.with_name(f"{folder.name}.parquet")
    folder.parent.mkdir(parents=True, exist_ok=True)
    corpus.write(documents)
    _ = encoder.real_embeddings, encoder.row_of  # not a part of what is measured
    config, num_texts = (
        IndexConfig(sentence_splitter="lines", encoder=MINILM_NAME),
        len(corpus.sentences),
    )
    started_at = time.perf_counter()
    manifest = write_index(documents, folder, config, load_encoder=lambda _: encoder)
    duration_s = time.perf_counter() - started_at
    return {
        "without encoding, sentences/s": num_texts / duration_s,
        "bytes per sentence": {
            kind: sum(size for name, size in manifest["files"].items() if part in name) / num_texts
            for kind, part in FILE_KINDS.items()
        },
        "peak memory of the process, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _measure_search(index: SentenceIndex, queries: list[str]) -> dict[str, Any]:
    stored = index.embeddings
    vectors = [stored.encode_query(query) for query in queries]
    few = vectors[:NUM_EXACT_QUERIES]
    exact = [set(stored.search(vector, TOP_K, exact=True).tolist()) for vector in few]
    approximate = [set(stored.search(vector, TOP_K).tolist()) for vector in few]
    overlaps = [len(a & b) / len(a) for a, b in zip(exact, approximate)]
    return {
        "recall@100 of approximate": float(np.mean(overlaps)),
        "ms": {
            "BM25": _percentiles(lambda q: index.search(q, TOP_K), queries),
            "encode query": _percentiles(stored.encode_query, queries),
            "dense exact": _percentiles(lambda v: stored.search(v, TOP_K, exact=True), few),
            "dense approximate": _percentiles(lambda v: stored.search(v, TOP_K), vectors),
            "hybrid": _percentiles(lambda q: index.search_candidates(q, TOP_K, 1), queries),
        },
    }


def _measure_ask(
    index: SentenceIndex,
    ranker_path: Path,
    fitted_on: Sequence[LabeledQuestion],
    tests: Sequence[LabeledQuestion],
    max_ranked: int,
) -> dict[str, Any]:
    ranker, encoder = load(ranker_path), index.embeddings.info.fingerprint
    with_ranker = default_scoring(encoder, has_ranker=True)
    fitted = _fit_stage_zero(index, ranker, with_ranker, fitted_on, ranker_path.name)
    systems = {
        "without a ranker": (None, default_scoring(encoder, has_ranker=False)),
        ALL_RANKED: (ranker, with_ranker),
        "fitted": (ranker, fitted),
        STAGE_ZERO: (ranker, replace(fitted, max_ranked=max_ranked)),
    }
    measured: dict[str, dict[str, Any]] = {}
    for name, (model, scoring) in systems.items():
        answerer = QuestionAnswerer(index, model, TOP_K, scoring=scoring)
        times, hits = _ask_all(answerer, tests)
        kept = [len(find_candidates(index, scoring, q.question, TOP_K, 1).kept) for q in tests[:50]]
        measured[name] = {
            "ms": times,
            "hits": hits,
            "hit@3": float(np.mean(hits)),
            "ranked": float(np.mean(kept)) if model else 0.0,
        }
    baseline = np.array(measured[ALL_RANKED]["hits"], int)
    for values in measured.values():
        differences = np.array(values.pop("hits"), int) - baseline
        gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
        p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
        values["to all ranked"] = {"gained": gained, "lost": lost, "p": p}
    bounds = {"max_ranked": fitted.max_ranked, "max_similarity_gap": fitted.max_similarity_gap}
    return {"questions": len(tests), "fitted bounds": bounds, "systems": measured}


def _ask_all(
    answerer: QuestionAnswerer, tests: Sequence[LabeledQuestion]
) -> tuple[dict[str, float], list[bool]]:
    """Returns p50 and p99 of an answer's milliseconds, and which questions are hits."""
    hits: dict[str, bool] = {}

    def ask(test: LabeledQuestion) -> None:
        answers = answerer.ask(test.question, ANSWER_RANK).answers
        hits[test.question] = any(answer.text in test.answers for answer in answers)

    return _percentiles(ask, tests), [hits[test.question] for test in tests]


def _fit_stage_zero(
    index: SentenceIndex,
    ranker: Any,
    scoring: AnswerScoring,
    questions: Sequence[LabeledQuestion],
    name: str,
) -> AnswerScoring:
    """Fits what reaches the ranker, or reads what was fitted before."""
    folder = index.folder.with_name(f"{index.folder.name}-{name}")
    if (stored := AnswerScoring.read(folder)) is not None:
        return stored
    texts = [q.question for q in questions]
    retrieved = retrieve_parts(index, texts, scoring, ranker)
    labeled = label_parts(texts, retrieved, {q.question: set(q.answers) for q in questions})
    fitted = replace(scoring, max_similarity_gap=fit_similarity_gap(labeled))
    fitted = replace(fitted, max_ranked=fit_max_ranked(fitted, labeled))
    folder.mkdir(exist_ok=True)
    fitted.write(folder)
    return fitted


class Peer:
    """What a user would write instead: bm25s, sentence-transformers and its CrossEncoder.

    Args:
        index: An index, whose bm25s it searches; in one shard.
        corpus: Its sentences.
        corpus_embeddings: Their embeddings, shape [sentences, dimension].
        ranker: Checkpoint of a ranker.
    """

    def __init__(
        self,
        index: SentenceIndex,
        corpus: SearchCorpus,
        corpus_embeddings: np.ndarray,
        ranker: Path,
    ) -> None:
        from sentence_transformers import CrossEncoder, SentenceTransformer

        self.texts, self.k = corpus.sentences, min(TOP_K, len(corpus.sentences))
        self.retriever = index.shards[0].bm25.retriever
        self.encoder = SentenceTransformer(str(packaged_minilm()), device="cpu")
        self.corpus_embeddings = torch.from_numpy(corpus_embeddings)
        self.ranker = CrossEncoder(str(ranker), device="cpu", max_length=128)

    def search(self, question: str) -> list[int]:
        """Returns the sentences that words or the similarity find."""
        from sentence_transformers import util

        words = bm25s.tokenize([question], stopwords=None, return_ids=False, show_progress=False)
        by_words = self.retriever.retrieve(words, k=self.k, show_progress=False).documents[0]
        query = self.encoder.encode(question, convert_to_tensor=True, show_progress_bar=False)
        by_similarity = util.semantic_search(query, self.corpus_embeddings, top_k=self.k)[0]
        found = [*by_words[: TOP_K // 2].tolist(), *(hit["corpus_id"] for hit in by_similarity)]
        return list(dict.fromkeys(found))[:TOP_K]

    def ask(self, question: str) -> Any:
        """Returns the scores of the sentences that are found."""
        pairs = [(question, self.texts[i]) for i in self.search(question)]
        return self.ranker.predict(pairs, show_progress_bar=False)


def _compare_bm25(
    index: SentenceIndex, corpus: SearchCorpus, queries: list[str], num_repeats: int
) -> dict[str, Any]:
    """Compares sentences and queries per second with those of bm25s alone, in turns."""
    texts, alone = corpus.sentences[:NUM_INDEXED], bm25s.BM25(k1=BM25.k1, b=BM25.b)
    retriever, k = index.shards[0].bm25.retriever, min(TOP_K, len(corpus.sentences))

    def index_alone() -> None:
        tokens = bm25s.tokenize(texts, stopwords=None, show_progress=False)
        alone.index(tokens, show_progress=False)

    def search_alone(query: str) -> Any:
        words = bm25s.tokenize([query], stopwords=None, return_ids=False, show_progress=False)
        return retriever.retrieve(words, k=k, show_progress=False)

    build, build_alone = (
        partial(measure_rate, len(texts), function)
        for function in (partial(BM25().build_index, texts), index_alone)
    )
    (indexing,) = measure_alternately(build, [build_alone], num_repeats, warm_up=False)
    search, search_by_peer = (
        partial(measure_rate, len(queries), lambda function=function: list(map(function, queries)))
        for function in (lambda query: index.search(query, TOP_K), search_alone)
    )
    (searching,) = measure_alternately(search, [search_by_peer], num_repeats)
    ratios = {"index": indexing, "search": searching}
    return {name: {**ratio.as_json(), "shown": str(ratio)} for name, ratio in ratios.items()}


def _percentiles(function: Callable[[Any], Any], arguments: Sequence[Any]) -> dict[str, float]:
    """Returns p50 and p99 of the milliseconds of a call."""
    function(arguments[0])
    times_ms = []
    for argument in arguments:
        started_at = time.perf_counter()
        function(argument)
        times_ms.append(1e3 * (time.perf_counter() - started_at))
    return {name: float(np.percentile(times_ms, q)) for name, q in (("p50", 50), ("p99", 99))}


def _compare_encoding(texts: list[str], num_repeats: int) -> dict[str, Any]:
    """Compares sentences per second with sentence-transformers', in turns."""
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(packaged_minilm()), device="cpu")
    results = {}
    for dtype in ("fp32", "auto"):
        encoder = load_sentence_encoder(dtype=dtype)  # type: ignore[arg-type]
        workload, baseline = (
            partial(measure_rate, len(texts), model.encode, texts) for model in (encoder, peer)
        )
        (ratio,) = measure_alternately(workload, [baseline], num_repeats)
        difference = np.abs(encoder.encode(texts) - peer.encode(texts)).max()
        results[dtype] = {**ratio.as_json(), "difference": float(difference), "shown": str(ratio)}
    return results


def _list_claims(results: dict[str, Any]) -> list[Claim]:
    claims = []
    for size, measured in results.items():
        if size == "encoding":
            claims += _list_encoding_claims(measured)
            continue
        for name, ratio in measured.get("to bm25s alone", {}).items():
            claim = f"{size} sentences: BM25 {name}, to bm25s alone: >= 0.9 x"
            claims.append(Claim(claim, ratio["shown"], ratio["ratio"]["median"] >= 0.9))
        claims += [
            Claim(f"{size} sentences: {part}", _format_values(values), None)
            for part, values in measured.items()
            if part != "to bm25s alone"
        ]
        if "ask" in measured:
            values = measured["ask"]["systems"][STAGE_ZERO]
            times, change = values["ms"], values["to all ranked"]
            claims += [
                Claim(
                    f"{size} sentences: ask with stage zero, p50 <= 60 ms and p99 <= 150 ms",
                    f"{times['p50']:.1f}, {times['p99']:.1f}",
                    times["p50"] <= 60 and times["p99"] <= 150,
                ),
                Claim(
                    f"{size} sentences: hit@3 is not lower with stage zero (p > 0.05)",
                    _format_values(change),
                    change["gained"] >= change["lost"] or change["p"] > 0.05,
                ),
            ]
    return claims


def _list_encoding_claims(results: dict[str, Any]) -> list[Claim]:
    fp32, default = results["fp32"], results["auto"]
    return [
        Claim(
            "encoding in fp32, to sentence-transformers: >= 1.2 x",
            fp32["shown"],
            fp32["ratio"]["median"] >= 1.2,
        ),
        Claim(
            "largest difference of embeddings in fp32: <= 1e-5",
            f"{fp32['difference']:.1e}",
            fp32["difference"] <= 1e-5,
        ),
        Claim(
            "encoding in the default precision, to sentence-transformers: >= 3 x in bf16",
            default["shown"],
            default["ratio"]["median"] >= 3 if resolve_dtype("auto") == torch.bfloat16 else None,
        ),
    ]


def _format_values(values: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} ({_format_values(value)})"
        if isinstance(value, dict)
        else f"{name} {'-' if value is None else f'{value:,.4g}'}"
        for name, value in values.items()
    )


if __name__ == "__main__":
    main()
