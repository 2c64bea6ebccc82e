"""Corpora: a raw release in, a candidates table out. Must not know tokens, models or Ray."""

from as2ray.corpora.base import HUB, Corpus, Item, Published
from as2ray.corpora.discover import Check, Listing, data_root, found, list_corpora, verify_all
from as2ray.corpora.leaks import check_leaks, drop, near_duplicates, shared_questions
from as2ray.corpora.noise import flip_labels
from as2ray.corpora.registry import CORPORA, get
from as2ray.corpora.stats import Spread, Stats, stats
from as2ray.corpora.store import load, located, prepare, read
from as2ray.filters import FILTERS, apply_filter, filtered

__all__ = [
    "CORPORA",
    "FILTERS",
    "HUB",
    "Check",
    "Corpus",
    "Item",
    "Listing",
    "Published",
    "Spread",
    "Stats",
    "apply_filter",
    "check_leaks",
    "data_root",
    "drop",
    "filtered",
    "flip_labels",
    "found",
    "get",
    "list_corpora",
    "load",
    "located",
    "near_duplicates",
    "prepare",
    "read",
    "shared_questions",
    "stats",
    "verify_all",
]
