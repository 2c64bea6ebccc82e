"""Writes the model card of a saved ranker: `README.md` with the metadata of the hub."""

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

USAGE = """\
```python
import as2ray

as2ray.load("{name}").rank("How long is a whale?", ["It is 30 m long.", "It is blue."])

from sentence_transformers import CrossEncoder

CrossEncoder("{name}").rank("How long is a whale?", ["It is 30 m long.", "It is blue."])

from transformers import pipeline

pair = {{"text": "How long is a whale?", "text_pair": "It is 30 m long."}}
pipeline("text-classification", "{name}")(pair)
```

Text Embeddings Inference: `text-embeddings-router --model-id {name}`, then `POST /rerank`."""
"""How other libraries load a ranker with one label. The score is the probability of an answer."""


def write_model_card(
    folder: Path,
    base: str,
    measures: Mapping[str, float],
    dataset: str,
    sections: Mapping[str, str],
) -> None:
    """Writes the model card of a pointwise ranker with one label.

    Args:
        folder: Its checkpoint.
        base: The model that it was trained from.
        measures: Mean of each measure on the reported table.
        dataset: Name of that table.
        sections: Text of each further section, by heading.
    """
    metadata = ModelCardData(
        library_name="as2ray",
        pipeline_tag="text-ranking",
        tags=["cross-encoder", "answer-sentence-selection"],
        model_name=folder.name,
        eval_results=[
            EvalResult("text-ranking", "table", dataset, name, value)
            for name, value in measures.items()
        ],
    )
    all_sections = {"Use": USAGE.format(name=folder.name), **sections}
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in all_sections.items())
    text = f"Ranks sentences by how well they answer a question. Trained by as2ray from `{base}`."
    (folder / "README.md").write_text(
        f"---\n{metadata.to_yaml()}\n---\n\n# {folder.name}\n\n{text}\n\n{body}\n", encoding="utf-8"
    )
