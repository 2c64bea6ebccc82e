"""`as2ray index`: documents in, an index of their sentences out."""

from dataclasses import asdict

from as2ray.commands.shown import console
from as2ray.errors import RecipeError
from as2ray.retrieval.bm25 import BM25
from as2ray.retrieval.build import Settings, build
from as2ray.retrieval.documents import Columns


def index(
    source: str,
    output: str,
    k1: float = BM25.k1,
    b: float = BM25.b,
    splitter: str = "syntok",
    columns: dict[str, str] = {},  # noqa: B006
    shards: int = 1,
    cluster: bool = False,
    replace: bool = False,
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
    settings = Settings(BM25(k1, b), splitter, _columns(columns))
    if cluster:
        from as2ray.distributed.cluster import connected
        from as2ray.distributed.index import build_sharded

        with connected():
            made = build_sharded(source, output, settings, shards=shards, replace=replace)
    else:
        made = build(source, output, settings, shards=shards, replace=replace)
    console().print(
        f"{made['sentences']:,} sentences of {made['documents']:,} documents, "
        f"{made['words']:,} words, in {output}"
    )
    for reason, number in made["skipped"].items():
        console().print(f"skipped {number:,} {reason}, such as {made['examples'][reason]}")


def _columns(given: dict[str, str]) -> Columns:
    known = asdict(Columns())
    if unknown := sorted(given.keys() - known.keys()):
        raise RecipeError(
            f"columns {unknown}", expected=f"some of {list(known)}", mend="correct the names"
        )
    return Columns(**{**known, **given})
