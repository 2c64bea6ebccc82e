"""Slow clients, many clients, foreign names and Serve's own errors: who is refused, and how."""

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
from ray.serve._private.http_util import RequestIdMiddleware
from served import CANDIDATES, QUESTION
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.testclient import TestClient

from as2ray.serving import admission, proxy
from as2ray.serving.proxy import ProxyMiddleware
from as2ray.serving.settings import Limits, Settings
from as2ray.serving.types import RequestError

RANK = {"question": QUESTION, "candidates": CANDIDATES}
OF_DIALECTS = {
    "/rank": {"error", "message", "fix"},
    "/rerank": {"error", "error_type"},
    "/v1/rerank": {"message", "detail"},
    "/v2/rerank": {"message"},
}


def open_slow(address: str, count: int, sent: bytes = b"{") -> list[socket.socket]:
    """Connections that have sent the first byte of a body of a thousand."""
    host, port = address.removeprefix("http://").split(":")
    head = f"POST /rank HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connections = []
    for _ in range(count):
        connection = socket.create_connection((host, int(port)), timeout=30)
        connection.sendall(f"{head}content-length: 1000\r\n\r\n".encode() + sent)
        connections.append(connection)
    return connections


def read_status(connection: socket.socket) -> int:
    return int(connection.recv(100).split()[1])


def test_a_body_in_pieces_is_bounded_by_their_sum():
    gate = admission.Admission(Settings(limits=Limits(max_body_bytes=4_000)))

    async def receive():
        return {"type": "http.request", "body": b" " * 1_000, "more_body": True}

    async def read():
        with gate.admit(receive, "a client") as body:
            for _ in range(4):
                await body()
            assert gate.num_buffered_bytes == 4_000
            with pytest.raises(RequestError, match="over the limit of 4,000 bytes"):
                await body()
        assert gate.num_buffered_bytes == gate.num_ongoing == gate.num_receiving == 0

    asyncio.run(read())


def receive_messages(*bodies: bytes, more_body: bool = False):
    """An ASGI `receive` of the parts of a body; what follows the last one is a disconnection."""
    messages = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
    messages[-1]["more_body"] = more_body
    following = iter([*messages, {"type": "http.disconnect"}])

    async def receive():
        return next(following)

    return receive


def test_as_many_requests_are_ranked_as_replicas_take_and_a_gateway_queues():
    settings = Settings.model_validate(
        {
            "batching": {"max_ongoing_requests": 2, "max_queued_requests": 1},
            "replicas": {"max_replicas": 3},
        }
    )
    gate = admission.Admission(settings)
    assert gate.max_ranking == 7

    async def rank() -> None:
        with ExitStack() as requests:
            for _ in range(7):
                body = requests.enter_context(gate.admit(receive_messages(b"{}"), "a client"))
                assert (await body())["body"] == b"{}"
                assert (await body())["type"] == "http.disconnect"  # what comes after the body
            assert (gate.num_ongoing, gate.num_receiving, gate.num_buffered_bytes) == (7, 0, 14)
            one_more = requests.enter_context(gate.admit(receive_messages(b"{}"), "a client"))
            with pytest.raises(RequestError, match="7 requests are being ranked") as refused:
                await one_more()
            assert (refused.value.code, refused.value.retry_after) == ("overloaded", 1)
        assert (gate.num_ongoing, gate.num_receiving, gate.num_buffered_bytes) == (0, 0, 0)

    asyncio.run(rank())
    assert gate.num_received == 8


def test_bytes_of_all_bodies_are_bounded_by_sixteen_of_the_longest():
    gate = admission.Admission(Settings(limits=Limits(max_body_bytes=2_000)))

    async def read() -> None:
        with ExitStack() as requests:
            for _ in range(16):
                body = requests.enter_context(gate.admit(receive_messages(b" " * 2_000), "a"))
                await body()
            body = requests.enter_context(gate.admit(receive_messages(b" "), "a"))
            with pytest.raises(RequestError, match="too many bytes") as refused:
                await body()
            assert (refused.value.code, refused.value.retry_after) == ("overloaded", 1)

    asyncio.run(read())
    assert gate.num_buffered_bytes == 0


def test_requests_are_refused_while_the_service_shuts_down_or_too_many_bodies_arrive(monkeypatch):
    monkeypatch.setattr(admission, "MAX_RECEIVING", 2)
    gate = admission.Admission(Settings())
    gate.check_ready()
    with ExitStack() as requests:
        for _ in range(2):
            requests.enter_context(gate.admit(receive_messages(b""), "a client"))
        with pytest.raises(RequestError, match="being received") as refused:
            requests.enter_context(gate.admit(receive_messages(b""), "a client"))
        assert (refused.value.code, refused.value.retry_after) == ("overloaded", 1)
    assert (gate.num_received, gate.num_ongoing, gate.num_receiving) == (3, 0, 0)
    gate.is_draining = True
    with gate.admit(receive_messages(b""), "a client"):  # it is still accepted
        pass
    gate.is_closed = True
    for refuse in (gate.check_ready, gate.admit(receive_messages(b""), "a client").__enter__):
        with pytest.raises(RequestError) as refused:
            refuse()
        assert (refused.value.code, refused.value.retry_after) == ("unavailable", 5)


def test_slow_bodies_of_a_client_are_counted_until_they_are_complete(monkeypatch):
    monkeypatch.setattr(admission, "SLOW_AFTER_S", 0.0)
    monkeypatch.setattr(admission, "MAX_SLOW_PER_CLIENT", 2)
    gate = admission.Admission(Settings())

    async def read() -> None:
        sent = asyncio.Event()

        async def receive_late():
            await sent.wait()
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def read_body(client: str) -> None:
            with gate.admit(receive_late, client) as body:
                await body()

        slow = [asyncio.create_task(read_body(client)) for client in ("a", "a", "b")]
        while gate.num_slow.total() < 3:
            await asyncio.sleep(0.001)
        assert gate.num_slow == {"a": 2, "b": 1}
        with pytest.raises(RequestError, match="2 others of this address are as slow") as refused:
            await read_body("a")
        assert (refused.value.code, refused.value.retry_after) == ("body_timeout", 1)
        assert gate.num_slow == {"a": 2, "b": 1}
        sent.set()
        await asyncio.gather(*slow)

    asyncio.run(read())
    assert not gate.num_slow  # clients without slow bodies are forgotten
    assert gate.num_ongoing == gate.num_receiving == gate.num_buffered_bytes == 0


def test_slow_bodies_keep_nobody_from_an_answer_and_are_given_up(address, monkeypatch):
    monkeypatch.setattr(admission, "SLOW_AFTER_S", 0.2)
    monkeypatch.setattr(admission, "BODY_TIMEOUT_S", 2.0)
    monkeypatch.setattr(admission, "MAX_SLOW_PER_CLIENT", 4)
    connections = open_slow(address, 40)
    started_at = time.monotonic()
    for _ in range(3):
        assert httpx.get(f"{address}/health", timeout=20).status_code == 200
        assert httpx.post(f"{address}/rank", json=RANK, timeout=20).status_code == 200
    statuses = [read_status(connection) for connection in connections]
    assert set(statuses) == {408}
    assert time.monotonic() - started_at >= 2.0 - 0.2  # the last four had their time
    for connection in connections:
        connection.close()


def test_a_body_that_drips_is_given_up_although_it_makes_progress(address, monkeypatch):
    monkeypatch.setattr(admission, "SLOW_AFTER_S", 0.1)
    monkeypatch.setattr(admission, "BODY_TIMEOUT_S", 1.0)
    [connection] = open_slow(address, 1)
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.2):
            connection.send(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    assert read_status(connection) == 408
    ended.set()
    thread.join()
    connection.close()


def test_a_slow_body_that_comes_in_time_is_ranked(address, monkeypatch):
    monkeypatch.setattr(admission, "SLOW_AFTER_S", 0.05)
    body = json.dumps(RANK).encode()

    def halves():
        yield body[:20]
        time.sleep(0.5)
        yield body[20:]

    headers = {"content-type": "application/json"}
    assert httpx.post(f"{address}/rank", content=halves(), headers=headers).status_code == 200


def test_client_that_leaves_while_its_body_arrives_is_no_error(serve, caplog):
    service = serve()

    async def leave():
        raise OSError("cancelled, as Ray Serve says it")

    async def request() -> None:
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/rank", "headers": headers}
        await service.app({**scope, "query_string": b""}, leave, None)

    asyncio.run(request())
    assert service.service.records[-1].status_code == 499
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_while_too_much_is_received_others_are_told_to_come_again(address, monkeypatch):
    monkeypatch.setattr(admission, "BODY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(admission, "MAX_RECEIVING", 5)
    connections = open_slow(address, 5)
    time.sleep(0.3)
    request_body = {"query": "q", "documents": ["a"]}
    answer = httpx.post(f"{address}/v1/rerank", json=request_body, timeout=60)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert set(answer.json()) == OF_DIALECTS["/v1/rerank"]
    assert httpx.get(f"{address}/health", timeout=60).status_code == 200
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("path", OF_DIALECTS)
def test_while_no_ranker_responds_requests_are_refused_at_once_with_the_reason(serve, path):
    client = serve()
    client.service.problem = RequestError("unavailable", "no ranker", "come again", 5)
    answer = client.post(path, content=b"unread")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert set(answer.json()) == OF_DIALECTS[path]
    assert "no ranker" in answer.text
    for probe in ("/health", "/ready"):
        assert client.get(probe).status_code == 503
    assert client.get("/").status_code == 200


def test_client_that_reads_nothing_is_given_up_and_meanwhile_large_responses_are_refused(
    monkeypatch,
):
    monkeypatch.setattr(proxy, "READ_TIMEOUT_S", 1.0)
    monkeypatch.setattr(proxy, "MAX_UNREAD_BYTES", 1_000_000)
    sizes = {"/large": 2_000_000, "/small": 1_000}

    async def app(scope, receive, send):
        await PlainTextResponse("a" * sizes[scope["path"]])(scope, receive, send)

    proxied_app = ProxyMiddleware(app)

    async def request(path: str, reads: bool = True) -> tuple[int, int]:
        """Status and number of bytes that were sent."""
        messages, never = [], asyncio.Event()

        async def send(message):
            messages.append(message)
            if message["type"] == "http.response.body" and not reads:
                await never.wait()

        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        await proxied_app(scope, None, send)
        start, *bodies = messages
        if reads:  # A server sends nothing after the part that says that it is the last one.
            more = [message.get("more_body", False) for message in bodies]
            assert more == [True] * (len(bodies) - 1) + [False]
        return start["status"], sum(len(message["body"]) for message in bodies)

    async def run() -> None:
        assert await request("/large") == (200, 2_000_000)
        unread = asyncio.create_task(request("/large", reads=False))
        while not proxied_app.num_unread_bytes:
            await asyncio.sleep(0)
        status, num_bytes = await request("/large")
        assert (status, num_bytes < 1_000) == (429, True)
        assert await request("/small") == (200, 1_000)
        assert await unread == (200, proxy.PIECE_BYTES)
        assert await request("/large") == (200, 2_000_000)

    asyncio.run(run())


def test_head_is_answered_without_a_body(serve):
    client = serve(tokens=["secret"])
    for path in ("/", "/health", "/ready"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


def test_names_of_other_hosts_are_refused_and_probes_need_none(serve):
    client = serve(allowed_hosts=["localhost", "[::1]"])
    for host, status in (
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("", 421),
    ):
        assert client.post("/rank", json=RANK, headers={"host": host}).status_code == status
        assert client.get("/", headers={"host": host}).status_code == status
        assert client.get("/health", headers={"host": host}).status_code == 200


def test_the_log_has_one_line_of_a_request_with_a_safe_id_and_none_for_the_console(serve, caplog):
    ids = {"mine-1": True, "a" * 128: True, "a" * 129: False, "a b": False, "\x1b[31m": False}
    for given, is_kept in ids.items():
        caplog.clear()
        with caplog.at_level("INFO", logger="ray.serve.as2ray"):
            serve().post("/rank", json=RANK, headers={"x-request-id": given.encode()})
        [record] = caplog.records
        assert (json.loads(record.message)["request_id"] == given) is is_kept
        assert record.log_to_stderr is False
        assert "\x1b" not in record.message


def proxied(app) -> TestClient:
    """A client of an application behind Serve's middleware and ours, as Serve applies them."""
    return TestClient(ProxyMiddleware(RequestIdMiddleware(app)), raise_server_exceptions=False)


async def fail(scope, receive, send) -> None:
    raise OSError("/a/path")


async def say_nothing(scope, receive, send) -> None:
    pass


@pytest.mark.parametrize("path", OF_DIALECTS)
@pytest.mark.parametrize(
    ("app", "status"),
    [
        (PlainTextResponse("Request 1 timed out after 60s.", 408), 503),
        (PlainTextResponse("full", 429, {"retry-after": "3"}), 429),
        (PlainTextResponse("no replica", 503), 503),
        (PlainTextResponse("Internal Server Error", 500), 500),
        (fail, 500),
        (say_nothing, 500),
    ],
)
def test_serve_s_own_errors_come_in_the_dialect_of_the_path(path, app, status):
    answer = proxied(app).post(path, json={})
    expected = 424 if (path, status) == ("/rerank", 500) else status
    assert answer.status_code == expected
    assert set(answer.json()) == OF_DIALECTS[path]
    assert ("retry-after" in answer.headers) is (status in (429, 503))
    assert "path" not in answer.text.replace("this path", "")


def test_what_the_application_says_passes_the_proxy_unchanged():
    answer = proxied(JSONResponse({"error": "mine"}, 429)).post("/rank")
    assert (answer.status_code, answer.json()) == (429, {"error": "mine"})


def test_refusal_of_a_page_of_another_origin_passes_the_proxy_unchanged(serve):
    app = serve(cors_origins=["https://example.org"]).app
    headers = {"origin": "https://example.com", "access-control-request-method": "POST"}
    answer = proxied(app).options("/rank", headers=headers)
    assert (answer.status_code, answer.text) == (400, "Disallowed CORS origin")


def test_unsafe_ids_and_headers_for_serve_do_not_pass_the_proxy():
    seen = []

    async def app(scope, receive, send):
        seen.append(dict(scope["headers"]))
        await PlainTextResponse("ok")(scope, receive, send)

    for given, is_kept in (("mine", True), ("x" * 129, False), ("a\xe9", False)):
        headers = {"x-request-id": given.encode("latin-1"), "x-request-timeout-seconds": b"-1"}
        answer = proxied(app).get("/", headers=headers)
        assert (answer.headers["x-request-id"] == given) is is_kept
        assert seen[-1][b"x-request-id"].decode() == answer.headers["x-request-id"]
        assert b"x-request-timeout-seconds" not in seen[-1]


def test_a_service_that_drains_answers_what_it_has_and_accepts_no_more(serve):
    client = serve()
    [middleware] = [m for m in client.app.user_middleware if "admission" in m.kwargs]
    gate = middleware.kwargs["admission"]
    entered, released = threading.Event(), asyncio.Event()
    rank = client.service.rank

    async def wait_and_rank(request):
        entered.set()
        await released.wait()
        return await rank(request)

    client.service.rank = wait_and_rank
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.post("/rank", json=RANK)))
    thread.start()
    assert entered.wait(20)
    gate.is_draining = True
    assert client.get("/ready").status_code == 503
    assert client.post("/ask").status_code == 404  # still accepted
    gate.is_closed = True
    assert gate.num_ongoing == 1
    assert gate.num_buffered_bytes > 0  # the body is held until the request ends
    refused = client.post("/rank", json=RANK)
    assert (refused.status_code, refused.json()["error"]) == (503, "unavailable")
    assert client.get("/health").status_code == 200
    client.portal.call(released.set)
    thread.join()
    assert answers[0].status_code == 200
    assert gate.num_ongoing == gate.num_receiving == gate.num_buffered_bytes == 0
