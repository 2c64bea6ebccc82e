"""`as2ray index`: documents in, an index of their sentences out."""

from dataclasses import asdict

from as2ray.cli.console import create_console
from as2ray.errors import ConfigError
from as2ray.retrieval.documents import DocumentColumns
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.text.bm25 import BM25


def index(
    documents: str,
    output: str,
    k1: float = BM25.k1,
    b: float = BM25.b,
    sentence_splitter: str = "syntok",
    columns: dict[str, str] = {},  # noqa: B006
    num_shards: int = 1,
    use_ray: bool = False,
    overwrite: bool = False,
) -> None:
    """Makes an index of the sentences of documents.

    Args:
        source: A folder of text, Markdown, HTML, JSON lines or Parquet files, or one of them.
        output: Where the index goes.
        k1: How soon a repeated word stops to count.
        b: How much a long sentence is marked down, 0 to 1.
        splitter: What cuts text into sentences.
        columns: Names of a table's columns, such as {"text": "body", "id": "url"}.
        shards: Parts that are built apart; the index answers as if it were one.
        cluster: Whether Ray builds the parts: on RAY_ADDRESS, or on this machine's cores.
        replace: Whether an older index at `output` is replaced.
    """
    settings = IndexConfig(BM25(k1, b), sentence_splitter, _parse_columns(columns))
    if use_ray:
        from as2ray.distributed.cluster import ray_session
        from as2ray.distributed.index import build_sharded

        with ray_session():
            made = build_sharded(
                documents, output, settings, num_shards=num_shards, overwrite=overwrite
            )
    else:
        made = write_index(documents, output, settings, num_shards=num_shards, overwrite=overwrite)
    create_console().print(
        f"{made['sentences']:,} sentences of {made['documents']:,} documents, "
        f"{made['words']:,} words, in {output}"
    )
    for reason, number in made["skipped"].items():
        create_console().print(f"skipped {number:,} {reason}, such as {made['examples'][reason]}")


def _parse_columns(column_names: dict[str, str]) -> DocumentColumns:
    known = asdict(DocumentColumns())
    if unknown := sorted(column_names.keys() - known.keys()):
        raise ConfigError(
            f"columns {unknown}; expected some of {list(known)}",
        )
    return DocumentColumns(**{**known, **column_names})
