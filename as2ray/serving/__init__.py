"""The ranker as a service: `protocol` (wire contract), `web` (HTTP), `line` and `desk` (batches),
`deployment` (Ray Serve), `page`.

Only `deployment` imports Ray; it holds no ranking logic.
"""
