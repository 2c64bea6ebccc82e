"""Stages of BM25: tuned k1 and b, indexes, pseudo-labels, and retrieved candidates."""

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from as2ray.corpora.sampling import sample_questions
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.tune import run_grid
from as2ray.errors import ConfigError
from as2ray.experiments.stage import digest, manifest, stage
from as2ray.retrieval.documents import list_parts
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig, Query, generate_pseudo_labels
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.schema import CANDIDATE_SCHEMA, count_table, question_offsets
from as2ray.text.bm25 import BM25
from pipelines.steps import TABLE, table
from pipelines.trials import MEASURE, keywords
from tune_spaces import bm25

log = logging.getLogger(__name__)

INDEX = "index"


def tune_bm25(folder: Path, dev: Path, in_process: bool) -> BM25:
    """Makes a stage with the best of the grid's 56 points on a dev table.

    Args:
        folder: Folder of the stage.
        dev: Stage of the table.
        in_process: Whether this process tries all points; otherwise Ray Tune distributes them.
    """

    def make(part: Path) -> dict[str, Any]:
        rows = table(dev)
        data = rows, BM25().count_terms(rows["candidate"].to_pylist())
        choices = [
            list(points) for _, points in groupby(bm25.param_grid(), key=lambda point: point[0])
        ]
        if in_process:
            found = [one for points in choices for one in keywords(points, data)]
        else:
            with ray_session():
                found = run_grid(keywords, choices, data, part.resolve() / "tune")
        best = max(found, key=lambda one: one[2])
        log.info("BM25: dev %s %.4f with k1 %g, b %g", MEASURE, best[2], best[0], best[1])
        return {"k1": best[0], "b": best[1], MEASURE: best[2], "grid": found}

    inputs = {"dev": manifest(dev)["outputs"]["fingerprint"], "grid": bm25.param_grid()}
    found = manifest(stage(folder, inputs, make))["outputs"]
    return BM25(found["k1"], found["b"])


def index_documents(folder: Path, source: Path, settings: IndexConfig, num_shards: int = 1) -> Path:
    """Makes a stage with an index of documents; other documents under the same name are an error.

    Args:
        folder: Folder of the stage.
        source: A folder of documents, or a table.
        settings: Settings of the index.
        num_shards: Number of its shards.
    """
    whole = hashlib.sha256()
    for path in sorted({piece.path for piece in list_parts(source)}):
        # Names may be invalid Unicode, and files unreadable: the index reports them.
        whole.update(os.fsencode(path.removeprefix(str(source))) + b"\0")
        with suppress(OSError), open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    inputs = {"documents": whole.hexdigest()[:16], "settings": settings.to_dict()}

    def make(part: Path) -> dict[str, Any]:
        shutil.rmtree(part / INDEX, ignore_errors=True)
        made = write_index(source, part / INDEX, settings, num_shards=num_shards)
        told = {name: made[name] for name in ("documents", "sentences", "skipped", "fingerprint")}
        log.info("index: %s", told)
        return told

    return stage(folder, inputs, make)


def index_candidates(folder: Path, tables: Sequence[Path], how: BM25) -> Path:
    """Makes a stage with an index of the candidates of tables; each text is a sentence.

    Args:
        folder: Folder of the stage.
        tables: Stages of the tables.
        how: BM25's settings.
    """
    inputs = {
        "tables": [manifest(path)["outputs"]["fingerprint"] for path in tables],
        "bm25": how,
    }

    def make(part: Path) -> dict[str, Any]:
        shutil.rmtree(part / INDEX, ignore_errors=True)
        texts = (text for path in tables for text in table(path)["candidate"].to_pylist())
        distinct = list(dict.fromkeys(" ".join(text.split()) for text in texts))
        pq.write_table(pa.table({"text": distinct}), part / "texts.parquet")
        settings = IndexConfig(how, sentence_splitter="lines")
        made = write_index(part / "texts.parquet", part / INDEX, settings)
        (part / "texts.parquet").unlink()
        return {"sentences": made["sentences"], "fingerprint": made["fingerprint"]}

    return stage(folder, inputs, make)


def label_queries(
    folder: Path,
    index: Path,
    queries: Sequence[Query],
    how: PseudoLabelConfig,
    divides: bool = False,
) -> Path:
    """Makes a stage with a candidates table of questions that BM25 labels.

    Args:
        folder: Folder of the stage.
        index: Stage of the index.
        queries: The questions.
        how: Settings of the labels.
        divides: Whether the table will be split with `split_train_dev`.

    Raises:
        CorpusError: No question has a positive and a negative.
        ConfigError: Only one question has both, and the table will be split.
    """
    asked = hashlib.sha256("\n".join(f"{q.id} {q.text}" for q in queries).encode())
    inputs = {
        "index": digest(index),
        "questions": asked.hexdigest()[:16],
        "pseudo_labels": asdict(how),
    }

    def make(part: Path) -> Mapping[str, Any]:
        found = generate_pseudo_labels(SentenceIndex.open(index / INDEX), queries, how)
        counts, left_out = count_table(found.table), dict(found.skipped)
        log.info("%s: %s, left out %s", folder.name, counts, left_out)
        if divides and counts.num_questions < 2:
            raise too_few(
                f"{counts.num_questions} questions that BM25 can label of {len(queries)}, "
                f"left out {left_out}"
            )
        return {**_written(part, found.table), "left_out": left_out}

    return stage(folder, inputs, make)


def too_few(problem: str) -> ConfigError:
    """Returns the error of a table that cannot be split."""
    return ConfigError(
        f"{problem}; at least two are needed, one to train on and one to select the checkpoint",
        fix="give a file of questions, or more documents",
    )


def split_train_dev(folder: Path, source: Path, share: int) -> dict[str, Path]:
    """Splits the questions of a table into stages `train` and `dev`, at least one in each.

    Args:
        folder: Folder of both stages.
        source: Stage of the table, which has at least two questions.
        share: About one of this number of questions goes to dev. It is chosen by a hash of the
            text, so it does not depend on the other questions.
    """
    ids: dict[str, list[str]] = {"train": [], "dev": []}
    for query in questions_of(source):
        number = int.from_bytes(hashlib.sha256(query.text.encode()).digest()[:4])
        ids["dev" if number % share == 0 else "train"].append(query.id)
    for own, other in (("train", "dev"), ("dev", "train")):
        if not ids[own]:
            ids[own].append(ids[other].pop())

    def one(name: str) -> Path:
        def make(part: Path) -> Mapping[str, Any]:
            rows = table(source)
            kept = pc.is_in(rows["question_id"], value_set=pa.array(ids[name]))
            return _written(part, rows.filter(kept))

        found = manifest(source)["outputs"]["fingerprint"]
        return stage(folder / name, {"table": found, "part": name, "share": share}, make)

    return {name: one(name) for name in ids}


def questions_of(stage: Path) -> list[Query]:
    """Reads the questions of a table."""
    rows = table(stage)
    firsts = rows.take(pa.array(question_offsets(rows["question_id"])))
    pairs = zip(firsts["question_id"].to_pylist(), firsts["question"].to_pylist())
    return [Query(id, text) for id, text in pairs]


def retrieve_candidates(
    folder: Path, source: Path, index: Path, depth: int, complete: bool
) -> Path:
    """Makes a stage with the candidates that BM25 retrieves, instead of each question's own.

    The manifest counts the questions for which BM25 finds nothing, which the table cannot contain,
    and those for which it misses all positives, which `no_all_negative` removes.

    Args:
        folder: Folder of the stage.
        source: Stage of a table; its positives are recognized by their text.
        index: Stage of the index.
        depth: Number of candidates to retrieve.
        complete: Whether positives that BM25 missed are appended, as for training.
    """
    inputs = {
        "table": manifest(source)["outputs"]["fingerprint"],
        "index": digest(index),
        "depth": depth,
        "complete": complete,
    }

    def make(part: Path) -> Mapping[str, Any]:
        rows, held = table(source), SentenceIndex.open(index / INDEX)
        right: dict[str, dict[str, None]] = {}
        for id, text, label in zip(*(rows[n].to_pylist() for n in _JUDGED)):
            if label:
                right.setdefault(id, {}).setdefault(" ".join(text.split()))
        found: list[tuple[str, str, str, str, int]] = []
        told = {"finds nothing": 0, "misses all positives": 0}
        for id, question, *_ in questions_of(source):
            texts = dict.fromkeys(held.texts([h.index for h in held.search(question, depth)]))
            own = right.get(id, {})
            told["finds nothing"] += not texts
            told["misses all positives"] += bool(own) and own.keys().isdisjoint(texts)
            texts |= own if complete else {}
            found += [(id, question, f"{id}-{k}", t, int(t in own)) for k, t in enumerate(texts)]
        log.info("%s: of BM25's first %d, %s", folder.name, depth, told)
        columns = list(zip(*found)) or [()] * len(CANDIDATE_SCHEMA)
        rows = [pa.array(c, f.type) for c, f in zip(columns, CANDIDATE_SCHEMA)]
        return {**_written(part, pa.table(rows, CANDIDATE_SCHEMA)), "bm25": told}

    return stage(folder, inputs, make)


def retrieval_scores(rows: pa.Table, index: Path, depth: int) -> np.ndarray:
    """Returns BM25 scores of candidates of `retrieve_candidates`, from their index, shape [rows].

    Args:
        rows: The table.
        index: Stage of the index.
        depth: Number of retrieved candidates; all others have the score 0.
    """
    held, found = SentenceIndex.open(index / INDEX), dict[str, dict[str, float]]()
    pairs = list(zip(rows["question"].to_pylist(), rows["candidate"].to_pylist()))
    for question in dict.fromkeys(question for question, _ in pairs):
        hits = held.search(question, depth)
        found[question] = dict(zip(held.texts([h.index for h in hits]), (h.score for h in hits)))
    return np.array([found[question].get(text, 0.0) for question, text in pairs])


def sample_table(folder: Path, source: Path, num_questions: int, seed: int, nested: bool) -> Path:
    """Makes a stage with a sample of a table's questions; see `corpora.sampling`."""
    drawn = {"num_questions": num_questions, "seed": seed, "nested": nested}
    inputs = {"table": manifest(source)["outputs"]["fingerprint"], **drawn}

    def make(part: Path) -> Mapping[str, Any]:
        return _written(part, sample_questions(table(source), num_questions, None, seed, nested))

    return stage(folder, inputs, make)


_JUDGED = ("question_id", "candidate", "label")


def _written(part: Path, rows: pa.Table) -> dict[str, Any]:
    """Writes a stage's table; returns its entries in the manifest."""
    pq.write_table(rows, part / TABLE, row_group_size=4_096, compression="zstd")
    return {"counts": asdict(count_table(rows)), "fingerprint": fingerprint(rows)}
