"""Measures building, searching and asking an index, beside bm25s + sentence-transformers.

The texts have the shape of ASNQ (see `asnq_shaped`). The first `--encoded` ones are encoded by the
packaged MiniLM. To reach the larger sizes without hours of encoding, the embeddings of the others
are those of the first ones plus noise of half their length. So times and sizes hold for any
embeddings; the recall of approximate search holds for real ones only where all are encoded. The
ranker has the size and the speed of a MiniLM, but is not trained.
"""

import resource
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bm25s
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.packaged import MINILM_NAME, packaged_minilm
from as2ray.checkpoints.saving import save
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.models.sentence_encoder import SentenceEncoder
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately, measure_rate
from as2ray.retrieval import embeddings
from as2ray.retrieval.answer_scoring import default_scoring
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.question_answering import QuestionAnswerer, find_candidates
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.parquet import ParquetTable
from as2ray.text.bm25 import BM25
from benchmarks import asnq_shaped
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report

TOP_K = 100

MAX_SIMILARITY_GAP = 0.2
"""Stage zero's bound; one that is fitted to labels may be higher or lower."""

PARTS = {"all": "", "int8": "/embedding", "faiss": "embeddings.faiss", "BM25": "/bm25/"}
"""Part of the name of each kind of file."""


class EnlargedEncoder:
    """The packaged encoder for the first texts; perturbed embeddings of theirs for the others.

    Args:
        encoder: The encoder.
        num_encoded: Number of texts that it encodes.
    """

    def __init__(self, encoder: SentenceEncoder, num_encoded: int) -> None:
        self.encoder, self.num_left = encoder, num_encoded
        self.name, self.dimension = encoder.name, encoder.dimension
        self.fingerprint = f"{encoder.fingerprint} {num_encoded}"
        self.encoded, self.encoding_s = np.zeros((0, self.dimension), np.float32), 0.0
        self.encode_queries = encoder.encode_queries

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Returns unit vectors, shape [texts, dimension]."""
        started_at = time.perf_counter()
        real = self.encoder.encode_documents(texts[: self.num_left])
        self.encoding_s += time.perf_counter() - started_at if len(real) else 0.0
        self.num_left -= len(real)
        self.encoded = np.concatenate([self.encoded, real])
        random = np.random.default_rng(len(texts))
        rows = random.integers(len(self.encoded), size=len(texts) - len(real))
        noise = random.standard_normal((len(rows), self.dimension), dtype=np.float32)
        noisy = self.encoded[rows] + 0.5 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
        noisy /= np.linalg.norm(noisy, axis=1, keepdims=True)
        return np.concatenate([real, noisy])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    limit_cores(args.cores)
    if not args.small and not asnq_shaped.has_source_files(args.data):
        sys.exit("skipped: needs the questions of ASNQ and the articles of SQuAD under --data")
    sizes = [600] if args.small else args.sentences
    num_encoded, num_queries, num_repeats = (60, 3, 1) if args.small else (args.encoded, 200, 3)
    embeddings.MIN_APPROXIMATE = 1  # type: ignore[misc]  # every size is searched both ways
    results: dict[str, Any] = {}
    for size in sizes:
        with TemporaryDirectory(prefix="as2ray-retrieval-") as folder:
            rows = asnq_shaped.write_corpus(
                Path(folder) / "rows", size, None if args.small else args.data
            )
            table = ParquetTable.open(rows).to_table()
            questions = list(dict.fromkeys(table["question"].to_pylist()))
            random = np.random.default_rng(0)
            queries = [questions[i] for i in random.integers(len(questions), size=num_queries)]
            texts = table["candidate"].to_pylist()
            measured = _measure_index(Path(folder), texts, queries, num_encoded)
            measured["to bm25s alone"] = _compare_bm25(texts, queries, num_repeats)
            results[f"{size:,}"] = measured
    results["encoding"] = _compare_encoding(*((texts[:8], 1) if args.small else (texts[:1_000], 5)))
    write_report("retrieval", args, _list_claims(results), results)


def _add_flags(parser: ArgumentParser) -> None:
    sizes = [10_000, 100_000, 1_000_000]
    parser.add_argument("--sentences", type=int, nargs="+", default=sizes, help="sizes, ascending")
    parser.add_argument("--encoded", type=int, default=10_000, help="texts that are encoded")


def _measure_index(
    folder: Path, texts: list[str], queries: list[str], num_encoded: int
) -> dict[str, Any]:
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet")
    encoder = EnlargedEncoder(load_sentence_encoder(), num_encoded)
    config = IndexConfig(sentence_splitter="lines", encoder=MINILM_NAME)
    started_at = time.perf_counter()
    write_index(folder / "texts.parquet", folder / "i", config, load_encoder=lambda _: encoder)
    duration_s = time.perf_counter() - started_at
    index = SentenceIndex.open(folder / "i", lambda _: encoder)
    files, stored = index.manifest["files"], index.embeddings
    vectors = [stored.encode_query(query) for query in queries]
    exact = [set(stored.search(vector, TOP_K, exact=True).tolist()) for vector in vectors]
    found = [set(stored.search(vector, TOP_K).tolist()) for vector in vectors]
    overlaps = [len(a & b) / len(a) for a, b in zip(exact, found)]
    peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ranker = save(init_ranker(packaged_minilm(), max_length=128), folder / "ranker")
    scoring = default_scoring(stored.info.fingerprint, has_ranker=True)
    stage_zero = replace(scoring, max_similarity_gap=MAX_SIMILARITY_GAP)
    scorings = {"ranker": scoring, "ranker, stage zero": stage_zero}
    asked = {
        name: QuestionAnswerer(index, load(ranker), TOP_K, scoring=scoring).ask
        for name, scoring in scorings.items()
    }
    kept = [len(find_candidates(index, stage_zero, query, TOP_K, 1).kept) for query in queries]
    stored_rows = np.concatenate([part.rows(slice(None)) for part in stored.shards])
    peer = Peer(texts, stored_rows, ranker)
    return {
        "encoded sentences": min(num_encoded, len(texts)),
        "encoding, sentences/s": min(num_encoded, len(texts)) / encoder.encoding_s,
        "rest of the build, s": duration_s - encoder.encoding_s,
        "bytes per sentence": {
            kind: sum(size for name, size in files.items() if part in name) / len(texts)
            for kind, part in PARTS.items()
        },
        "peak memory, MB": peak_memory,
        "recall@100 of approximate": float(np.mean(overlaps)),
        "candidates after stage zero": float(np.mean(kept)),
        "ms": {
            "BM25": _percentiles(lambda q: index.search(q, TOP_K), queries),
            "encode query": _percentiles(stored.encode_query, queries),
            "dense exact": _percentiles(lambda v: stored.search(v, TOP_K, exact=True), vectors),
            "dense approximate": _percentiles(lambda v: stored.search(v, TOP_K), vectors),
            "hybrid": _percentiles(lambda q: index.search_candidates(q, TOP_K, 1), queries),
            "hybrid, peer": _percentiles(peer.search, queries),
            "ask": _percentiles(QuestionAnswerer(index, None, TOP_K).ask, queries),
            **{f"ask, {name}": _percentiles(ask, queries) for name, ask in asked.items()},
            "ask, peer": _percentiles(peer.ask, queries[:50]),
        },
    }


class Peer:
    """What a user would write instead: bm25s, sentence-transformers and its CrossEncoder.

    Args:
        texts: Sentences.
        corpus_embeddings: Their embeddings, shape [sentences, dimension].
        ranker: Checkpoint of a ranker.
    """

    def __init__(self, texts: list[str], corpus_embeddings: np.ndarray, ranker: Path) -> None:
        from sentence_transformers import CrossEncoder, SentenceTransformer

        self.texts, self.k = texts, min(TOP_K, len(texts))
        self.retriever = bm25s.BM25()
        tokens = bm25s.tokenize(texts, stopwords=None, show_progress=False)
        self.retriever.index(tokens, show_progress=False)
        self.encoder = SentenceTransformer(str(packaged_minilm()), device="cpu")
        corpus = self.encoder.encode([""], convert_to_tensor=True)
        self.corpus = corpus.new_tensor(corpus_embeddings)
        self.ranker = CrossEncoder(str(ranker), device="cpu", max_length=128)

    def search(self, question: str) -> list[int]:
        """Returns the sentences that words or the similarity find."""
        from sentence_transformers import util

        words = bm25s.tokenize([question], stopwords=None, return_ids=False, show_progress=False)
        by_words = self.retriever.retrieve(words, k=self.k, show_progress=False).documents[0]
        query = self.encoder.encode(question, convert_to_tensor=True, show_progress_bar=False)
        by_similarity = util.semantic_search(query, self.corpus, top_k=self.k)[0]
        found = [*by_words[: TOP_K // 2].tolist(), *(hit["corpus_id"] for hit in by_similarity)]
        return list(dict.fromkeys(found))[:TOP_K]

    def ask(self, question: str) -> Any:
        """Returns the scores of the sentences that are found."""
        pairs = [(question, self.texts[i]) for i in self.search(question)]
        return self.ranker.predict(pairs, show_progress_bar=False)


def _compare_bm25(texts: list[str], queries: list[str], num_repeats: int) -> dict[str, SpeedRatio]:
    """Compares sentences and queries per second with those of bm25s alone, in turns."""
    bm25, alone = BM25(), bm25s.BM25(k1=BM25.k1, b=BM25.b)

    def index_alone() -> None:
        tokens = bm25s.tokenize(texts, stopwords=None, show_progress=False)
        alone.index(tokens, show_progress=False)

    def search_alone(query: str) -> Any:
        words = bm25s.tokenize([query], stopwords=None, return_ids=False, show_progress=False)
        return alone.retrieve(words, k=min(TOP_K, len(texts)), show_progress=False)

    build, build_alone = (
        partial(measure_rate, len(texts), function)
        for function in (partial(bm25.build_index, texts), index_alone)
    )
    (indexing,) = measure_alternately(build, [build_alone], num_repeats, warm_up=False)
    index = bm25.build_index(texts)
    search, search_by_peer = (
        partial(measure_rate, len(queries), lambda function=function: list(map(function, queries)))
        for function in (lambda query: index.search(query, TOP_K), search_alone)
    )
    (searching,) = measure_alternately(search, [search_by_peer], num_repeats)
    return {"index": indexing, "search": searching}


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
    fp32 = results["encoding"]["fp32"]
    claims = [
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
        Claim("encoding in the default precision", results["encoding"]["auto"]["shown"], None),
    ]
    for size, measured in results.items():
        if size == "encoding":
            continue
        ratios = measured.pop("to bm25s alone")
        measured["to bm25s alone"] = {name: ratio.as_json() for name, ratio in ratios.items()}
        for name, ratio in ratios.items():
            claim = f"{size} sentences: BM25 {name}, to bm25s alone: >= 0.9 x"
            claims.append(Claim(claim, str(ratio), ratio.median >= 0.9))
        claims += [
            Claim(
                f"{size} sentences: {name}, p50 and p99 in ms",
                f"{times['p50']:.1f}, {times['p99']:.1f}",
                None,
            )
            for name, times in measured["ms"].items()
        ]
        times = measured["ms"]["ask, ranker, stage zero"]
        claims.append(
            Claim(
                f"{size} sentences: ask with stage zero, p50 <= 60 ms and p99 <= 150 ms",
                f"{times['p50']:.1f}, {times['p99']:.1f}",
                times["p50"] <= 60 and times["p99"] <= 150,
            )
        )
        details = {k: v for k, v in measured.items() if k not in ("ms", "to bm25s alone")}
        claims.append(Claim(f"{size} sentences", _format_values(details), None))
    return claims


def _format_values(values: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} ({_format_values(value)})" if isinstance(value, dict) else f"{name} {value:,.4g}"
        for name, value in values.items()
    )


if __name__ == "__main__":
    main()
