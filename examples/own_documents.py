"""Answers questions from a folder of documents: `python examples/own_documents.py [ENCODER]`."""

import sys
from pathlib import Path

import as2ray

ENCODER = sys.argv[1] if sys.argv[1:] else "packaged:all-MiniLM-L6-v2"
FOLDER = Path("output/examples/documents")

FOLDER.mkdir(parents=True, exist_ok=True)
(FOLDER / "whales.md").write_text(
    "# Blue whale\n\nThe blue whale is the largest animal. Adults are up to 30 meters long.\n\n"
    "## Food\n\nBlue whales eat krill. An adult eats up to four tons of it in a day.\n"
)

index = as2ray.index(FOLDER, FOLDER.with_name("index"), encoder=ENCODER, overwrite=True)
print(index)
for question in ("What do blue whales eat?", "How long is a blue whale?"):
    answers = as2ray.ask(question, index).answers
    print(question, "->", answers[0].text if answers else "no answer")
