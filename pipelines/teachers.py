"""Teachers: large rankers, transferred and adapted, whose logits students learn from.

    python -m pipelines.teachers --config pipelines/recipes/cerberus_teachers.yaml --output DIR

A teacher is trained as TANDA trains any ranker, so this is `transfer_adapt` under the name that
CERBERUS's users look for; what makes a run large (sharding, gradient checkpointing, one encoder for
each step) stands in the recipe.
"""

from pipelines.transfer_adapt import main

if __name__ == "__main__":
    main()
