"""as2ray trains, distils and serves fast answer-sentence rankers on Ray."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from as2ray.api import ask, calibrate, distill, index, serve
    from as2ray.checkpoints.initialization import init_ranker
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import save
    from as2ray.checkpoints.upload import push_to_hub
    from as2ray.corpora.registry import register_corpus
    from as2ray.evaluation.measures import evaluate
    from as2ray.experiments.table_training import TrainingResult, train
    from as2ray.models.ranker import Ranker
    from as2ray.outputs import RankedCandidate, RankedPassage, Ranking
    from as2ray.retrieval.question_answering import QuestionAnswerer
    from as2ray.retrieval.sentence_index import SentenceIndex
    from as2ray.tables.loading import load_table
    from as2ray.text.bm25 import BM25
    from as2ray.training.cascade_config import CascadeConfig
    from as2ray.training.config import TrainingConfig
    from as2ray.training.frozen_cascade import make_cascade
    from as2ray.training.job import ModelSpec, TrainingJob

__version__ = "0.1.0"

_MODULES = {
    "serve": "as2ray.api",
    "index": "as2ray.api",
    "distill": "as2ray.api",
    "calibrate": "as2ray.api",
    "ask": "as2ray.api",
    "BM25": "as2ray.text.bm25",
    "CascadeConfig": "as2ray.training.cascade_config",
    "ModelSpec": "as2ray.training.job",
    "QuestionAnswerer": "as2ray.retrieval.question_answering",
    "RankedCandidate": "as2ray.outputs",
    "RankedPassage": "as2ray.outputs",
    "Ranker": "as2ray.models.ranker",
    "Ranking": "as2ray.outputs",
    "SentenceIndex": "as2ray.retrieval.sentence_index",
    "TrainingConfig": "as2ray.training.config",
    "TrainingJob": "as2ray.training.job",
    "TrainingResult": "as2ray.experiments.table_training",
    "evaluate": "as2ray.evaluation.measures",
    "init_ranker": "as2ray.checkpoints.initialization",
    "load": "as2ray.checkpoints.loading",
    "load_table": "as2ray.tables.loading",
    "make_cascade": "as2ray.training.frozen_cascade",
    "push_to_hub": "as2ray.checkpoints.upload",
    "register_corpus": "as2ray.corpora.registry",
    "save": "as2ray.checkpoints.saving",
    "train": "as2ray.experiments.table_training",
}
"""Where each public name is defined. Imported on first use: tasks that tokenize need no torch."""

__all__ = [
    "BM25",
    "CascadeConfig",
    "ModelSpec",
    "QuestionAnswerer",
    "RankedCandidate",
    "RankedPassage",
    "Ranker",
    "Ranking",
    "SentenceIndex",
    "TrainingConfig",
    "TrainingJob",
    "TrainingResult",
    "__version__",
    "ask",
    "calibrate",
    "distill",
    "evaluate",
    "index",
    "init_ranker",
    "load",
    "load_table",
    "make_cascade",
    "push_to_hub",
    "register_corpus",
    "save",
    "serve",
    "train",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'as2ray' has no attribute {name!r}")
