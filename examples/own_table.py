"""Trains a ranker on a CSV file: `python examples/own_table.py [ENCODER]`."""

import sys
from pathlib import Path

import as2ray

ENCODER = sys.argv[1] if sys.argv[1:] else "packaged:all-MiniLM-L6-v2"
OUTPUT = Path("output/examples/animals")

table = as2ray.load_table(
    Path(__file__).parent / "animals.csv",
    columns={"question": "q", "candidate": "text", "label": "y"},
)
# A tenth of the questions selects the checkpoint, and a tenth is reported.
training = {"epochs": 3, "global_batch_size": 8, "learning_rate": 1e-4}
result = as2ray.train(table, OUTPUT, model=ENCODER, max_length=64, training=training)
print(result)

for answer in result.load().rank(
    "What does a blue whale eat?",
    ["It lives in all oceans.", "It eats krill.", "The blue whale is blue-gray."],
):
    print(f"{answer.score:.3f}  {answer.text}")
