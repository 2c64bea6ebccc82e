"""`as2ray index`: builds an index of the sentences of documents, with their embeddings."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from as2ray.checkpoints.packaged import MINILM_NAME
from as2ray.cli.console import create_console
from as2ray.console.configuration import console_log

if TYPE_CHECKING:
    from as2ray.retrieval.embeddings import LoadEncoder


def index(  # noqa: PLR0913 - every argument is a flag
    *,
    documents: str,
    output: str,
    k1: float = 0.9,
    b: float = 0.4,
    stop_words: bool = False,
    lemmas: bool = False,
    sentence_splitter: str = "syntok",
    columns: dict[str, str] = {},  # noqa: B006
    encoder: str = MINILM_NAME,
    num_shards: int = 1,
    use_ray: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    json_log: bool = False,
) -> None:
    """Builds an index of the sentences of documents.

    Args:
        documents: A folder of text, Markdown, HTML, JSON lines or Parquet files, or one file.
        output: Folder of the index.
        k1: BM25's k1: how soon further occurrences of a word stop to count.
        b: BM25's b: how much a long sentence is penalized, 0 to 1.
        stop_words: Whether BM25 leaves out English stop words.
        lemmas: Whether BM25 replaces English words by their lemmas: "mice" by "mouse".
        sentence_splitter: Name of the sentence splitter.
        columns: Names of a table's columns, such as {"text": "body", "id": "url"}.
        encoder: Sentence encoder whose embeddings find candidates beside BM25: a folder of
            sentence-transformers, a hub id, the packaged MiniLM, or `none`.
        num_shards: Parts of the index that are built independently. They do not change the scores.
        use_ray: Whether Ray builds the shards, on RAY_ADDRESS or on the cores of this machine.
        overwrite: Whether an existing index is replaced.
        quiet: Show warnings, errors and results alone.
        verbose: Show the log of other libraries and of each step, too.
        json_log: Write the log as one JSON object per line.
    """
    from as2ray.retrieval.index_writer import IndexConfig, write_index
    from as2ray.retrieval.sentence_index import MIN_SIMILARITY

    settings = {
        "bm25": {"k1": k1, "b": b, "stop_words": stop_words, "lemmas": lemmas},
        "sentence_splitter": sentence_splitter,
        "columns": columns,
        "encoder": None if encoder == "none" else encoder,
    }
    # Validated as one tree, so that an error names the path, such as columns.body.
    config = TypeAdapter(IndexConfig).validate_python(settings)
    with console_log(quiet=quiet, verbose=verbose, json_log=json_log):
        load_encoder: LoadEncoder | None = None
        if config.encoder is not None:
            from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

            load_encoder = load_sentence_encoder
        with ExitStack() as stack:
            write: Callable[..., dict[str, Any]] = write_index
            if use_ray:
                from as2ray.distributed.cluster import ray_session
                from as2ray.distributed.index import build_sharded

                stack.enter_context(ray_session())
                write = build_sharded
            manifest = write(
                documents,
                output,
                config,
                num_shards=num_shards,
                overwrite=overwrite,
                load_encoder=load_encoder,
                with_subject_bound=True,
            )
    console = create_console()
    console.print(
        f"{manifest['sentences']:,} sentences of {manifest['documents']:,} documents, "
        f"{manifest['words']:,} words, in {output}"
    )
    for reason, count in manifest["skipped"].items():
        console.print(f"skipped {count:,} {reason}, such as {manifest['examples'][reason]}")
    if (min_similarity := manifest.get(MIN_SIMILARITY)) is not None:
        console.print(f"questions below a similarity of {min_similarity:.2f} get no answer")
