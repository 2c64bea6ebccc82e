"""Functions of the public API that need several packages, as the commands of the same names do."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from as2ray.checkpoints.packaged import MINILM_NAME

if TYPE_CHECKING:
    from as2ray.experiments.table_training import TrainingResult
    from as2ray.models.calibration import CalibrationResult
    from as2ray.models.ranker import Ranker
    from as2ray.retrieval.question_answering import QuestionAnswer
    from as2ray.retrieval.sentence_index import SentenceIndex


def distill(
    teacher: str | Path, table: Any, output: str | Path, **options: Any
) -> "TrainingResult":
    """Trains a smaller ranker on the scores of another and on labels; reports both.

    Args:
        teacher: Folder or hub id of the ranker.
        table: What to train on; see `load_table`.
        output: Folder of the ranker, the report and the stages.
        options: Other arguments of `train`, such as `model`, the encoder of the student.

    Raises:
        ConfigError: The teacher is something else; or see `train`.
    """
    from as2ray.errors import ConfigError
    from as2ray.experiments.table_training import train

    if not isinstance(teacher, str | Path):
        raise ConfigError(f"teacher={teacher!r:.200} is neither a folder nor a hub id")
    return train(table, output, teacher=teacher, **options)


def index(
    documents: str | Path,
    output: str | Path,
    *,
    encoder: str | None = MINILM_NAME,
    overwrite: bool = False,
    **settings: Any,
) -> "SentenceIndex":
    """Indexes the sentences of documents, and opens the index.

    Args:
        documents: A folder of text, Markdown, HTML, PDF, office, JSON lines or Parquet files.
        output: Folder of the index.
        encoder: Sentence encoder whose embeddings are stored; None or "none" for BM25 alone.
        overwrite: Whether an existing index is replaced.
        settings: Other settings of `IndexConfig`, such as `sentence_splitter`.
    """
    from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
    from as2ray.experiments.configuration import validate
    from as2ray.retrieval.index_writer import IndexConfig, write_index
    from as2ray.retrieval.sentence_index import SentenceIndex

    encoder = None if encoder == "none" else encoder  # as the command is told
    config = validate(IndexConfig, {"encoder": encoder, **settings})
    load_encoder = load_sentence_encoder if encoder else None
    options: dict[str, Any] = {"load_encoder": load_encoder, "with_subject_bound": True}
    write_index(documents, output, config, overwrite=overwrite, **options)
    return SentenceIndex.open(output, load_sentence_encoder)


def ask(
    question: str,
    index: "str | Path | SentenceIndex",
    model: "str | Path | Ranker | None" = None,
    top_k: int = 3,
) -> "QuestionAnswer":
    """Answers a question from an index, or says why there is no answer.

    Args:
        question: The question.
        index: An open index, or its folder. If it has embeddings, they find sentences and order
            answers, also where it was opened without their encoder.
        model: The folder of a ranker, with the way to score answers that was adapted with it; or a
            ranker, without that. Without one, BM25 and the similarity order the answers.
        top_k: Maximum number of answers.

    Raises:
        ConfigError: The index or the model is something else.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
    from as2ray.retrieval.answer_scoring import AnswerScoring
    from as2ray.retrieval.question_answering import QuestionAnswerer
    from as2ray.retrieval.sentence_index import SentenceIndex

    if isinstance(index, str | Path):
        index = SentenceIndex.open(index, load_sentence_encoder)
    stored = getattr(index, "stored_embeddings", None)
    if stored is not None and stored.load_encoder is None:
        embeddings = replace(stored, load_encoder=load_sentence_encoder)
        index = replace(index, stored_embeddings=embeddings)
    scoring = None
    if isinstance(model, str | Path):
        scoring = AnswerScoring.read(model)
        model = load(model) if scoring is None or scoring.uses_ranker else None
    return QuestionAnswerer(index, model, scoring=scoring).ask(question, top_k)


def calibrate(
    model: str | Path,
    table: Any,
    output: str | Path,
    *,
    method: Literal["temperature", "isotonic"] = "temperature",
    min_precision: float = 0.5,
    high_confidence: bool = False,
    columns: Mapping[str, str] | None = None,
) -> "CalibrationResult":
    """Turns the scores of a ranker into probabilities, and saves it in a new folder.

    Args:
        model: Folder or hub id of the ranker.
        table: A development table; see `load_table`.
        output: Folder of the calibrated ranker, which must not exist.
        method: One temperature, or an isotonic map.
        min_precision: Minimum share of right answers among those that are given.
        high_confidence: Whether new questions reach it with a probability of 90 %, for which far
            fewer get an answer.
        columns: Names of the table's columns.

    Returns:
        The errors before and after, on questions that are held out.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import check_new_path, save
    from as2ray.tables.loading import load_table

    folder, ranker = check_new_path(output), load(model)
    rows = load_table(table, columns=columns)
    result = ranker.calibrate(rows, method, min_precision, high_confidence=high_confidence)
    save(ranker, folder)
    return result


def serve(
    model: str | Path | None = None,
    index: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> None:
    """Serves a ranker, or answers from an index, over HTTP until the process is interrupted.

    Args:
        model: Folder or hub id of the ranker; without one, answers come from the index alone.
        index: Folder of an index, from which `/ask` answers.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one, which the line about the start names.

    Raises:
        ConfigError: The port is no integer, the model or the index is no path, or see
            `as2ray serve`.
    """
    from as2ray.cli.serve import serve as serve_command
    from as2ray.errors import ConfigError

    if not isinstance(port, int) or isinstance(port, bool):
        raise ConfigError(f"port={port!r} must be an integer")
    for name, path in {"model": model, "index": index}.items():
        if path is not None and not isinstance(path, str | Path):
            problem = f"{name}={path!r:.200} cannot be served: replicas open its folder"
            raise ConfigError(problem, fix="give the path of the folder, or a hub id")
    model, index = (None if path is None else str(path) for path in (model, index))
    serve_command(model, index=index, host=host, port=port)
