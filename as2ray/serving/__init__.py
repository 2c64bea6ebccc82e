"""The HTTP ranking service on Ray Serve.

`protocol` is the wire contract, `app` the FastAPI application, `batch_queue` and `engine` form and
rank batches, `deployment` holds the Ray Serve deployments, `static` the demo page. Only
`deployment`, `metrics` and `server` import Ray.
"""
