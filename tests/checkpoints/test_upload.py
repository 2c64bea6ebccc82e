"""Uploads with the hub's own client to a server that keeps what it is sent."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

import as2ray
from as2ray.errors import CheckpointError

TOKEN = "hf_of_this_test"


class Hub(BaseHTTPRequestHandler):
    """The requests of an upload; every file is small enough for the commit itself."""

    def do_POST(self):
        body = self.read_body()
        if self.refuse():
            return
        if self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.endpoint}/owner/ranker"})
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            kinds = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.answer({"files": [{"path": path, **kinds} for path in files]})
        else:
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    value = entry["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            address = f"{self.server.endpoint}/owner/ranker/commit/{'1' * 40}"
            commit = {"commitUrl": address, "commitOid": "1" * 40}
            self.answer({**commit, "success": True})

    def read_body(self):
        if "content-length" in self.headers:
            return self.rfile.read(int(self.headers["content-length"]))
        chunks = []  # a stream
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def do_GET(self):
        if not self.refuse():
            self.answer({"id": "owner/ranker", "sha": "0" * 40, "siblings": []})

    def refuse(self):
        is_refused = self.headers["authorization"] != f"Bearer {TOKEN}"
        if is_refused:
            self.answer({"error": "Invalid credentials"}, 401)
        return is_refused

    def answer(self, value, status=200):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.created, server.files = [], {}
        server.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_pushed_folder_is_uploaded_whole_and_loads_again(hub, checkpoint, tmp_path):
    ranker = as2ray.load(checkpoint("bert", 1), dtype="fp32", device="cpu")
    folder = as2ray.save(ranker, tmp_path / "ranker")
    (folder / "README.md").write_text("# A card\n")
    (folder / "notes.log").write_text("not of the checkpoint")
    address = as2ray.push_to_hub(
        folder, "owner/ranker", private=True, token=TOKEN, endpoint=hub.endpoint
    )
    assert address.endswith("/commit/" + "1" * 40)
    [created] = hub.created
    assert (created["name"], created["visibility"]) == ("ranker", "private")
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".log"}
    assert hub.files == kept
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in hub.files.items():
        (copy / name).write_bytes(content)
    texts = ["Kovarin.", "Badesso."]
    again = as2ray.load(copy, dtype="fp32", device="cpu")
    assert again.rank("Kovarin?", texts) == ranker.rank("Kovarin?", texts)


def test_ranker_in_memory_is_uploaded_and_a_refusal_is_one_error(hub, checkpoint, tmp_path):
    ranker = as2ray.load(checkpoint("bert", 1), dtype="fp32", device="cpu")
    as2ray.push_to_hub(ranker, "owner/ranker", token=TOKEN, endpoint=hub.endpoint)
    as2ray.push_to_hub(ranker, "owner/mine", private=True, token=TOKEN, endpoint=hub.endpoint)
    visibility = {created["name"]: created.get("visibility", "public") for created in hub.created}
    assert visibility == {"ranker": "public", "mine": "private"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.files.keys()
    with pytest.raises(CheckpointError, match="hf auth login"):
        as2ray.push_to_hub(ranker, "owner/ranker", token="wrong", endpoint=hub.endpoint)
    with pytest.raises(CheckpointError, match="cannot be uploaded"):
        as2ray.push_to_hub(ranker, "no id/of/a hub", token=TOKEN, endpoint=hub.endpoint)
    with pytest.raises(CheckpointError, match="has no config"):
        as2ray.push_to_hub(tmp_path, "owner/ranker", token=TOKEN, endpoint=hub.endpoint)
