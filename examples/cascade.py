"""Makes a cascade of a finished ranker: `python examples/cascade.py RANKER`.

Here a fixed share of the candidates leaves after each exit. Without `drop_ratios` the cascade drops
by margins whose loss is bounded; that takes some hundred questions, and no labels.
"""

import sys
from pathlib import Path

import as2ray

RANKER = sys.argv[1]

table = as2ray.load_table(
    Path(__file__).parent / "animals.csv",
    columns={"question": "q", "candidate": "text", "label": "y"},
)
num_layers = as2ray.load(RANKER).network.config.num_hidden_layers
config = as2ray.CascadeConfig(exit_layers=(num_layers // 2, num_layers), drop_ratios=(0.4,))
cascade = as2ray.make_cascade(RANKER, table, config=config)

for answer in cascade.rank(
    "What does a giant panda eat?",
    [
        "It lives in the mountains of China.",
        "It eats bamboo.",
        "The giant panda is black and white.",
    ],
):
    print(f"{answer.score:.3f}  after layer {answer.exit_layer}  {answer.text}")
