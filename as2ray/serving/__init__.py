"""The HTTP ranking service on Ray Serve.

`protocol` is the wire contract, `app` the FastAPI application, `middleware`, `admission` and
`request_body` bound what a request may cost, `batch_queue` and `engine` form and rank batches,
`deployment` holds the Ray Serve deployments, `proxy` the middleware of Serve's proxy, `static` the
demo page. Only `deployment`, `metrics` and `server` import Ray.
"""
