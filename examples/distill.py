"""Trains a small ranker on a large one's scores: `python examples/distill.py TEACHER STUDENT`.

TEACHER is a ranker (a folder or hub id), STUDENT an encoder such as `prajjwal1/bert-mini`.
"""

import sys
from pathlib import Path

import as2ray

TEACHER, STUDENT = sys.argv[1:]

table = as2ray.load_table(
    Path(__file__).parent / "animals.csv",
    columns={"question": "q", "candidate": "text", "label": "y"},
)
training = {"epochs": 3, "global_batch_size": 8, "learning_rate": 1e-4}
options = {"max_length": 64, "training": training}
result = as2ray.distill(TEACHER, table, "output/examples/student", model=STUDENT, **options)
print(result)
