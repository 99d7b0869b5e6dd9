"""A small server of the calls of the Hugging Face Hub that `huggingface_hub` makes for a model repository.

It keeps repositories in memory, in a thread of its own, counts the bytes of files that go in and out, and can be told
to misbehave: to break off, to stop in the middle, to refuse. Large files are sent by redirection to another host, as
the Hub does it, which must not get the token.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse


OWNER, READER = "hf_ownerownerowner", "hf_readerreaderreader"
_LARGE = re.compile(r".*\.safetensors|.*/tensors\.json")
_PAGE = 5


class Repository:
    """Commits of one repository: files by path, each its bytes and whether they are in the large file storage."""

    def __init__(self, private):
        self.private = private
        self.commits = {}
        self.order = []
        self.commit({".gitattributes": (b"", False)}, "initial commit")

    @property
    def head(self):
        return self.order[-1]

    @property
    def files(self):
        return self.commits[self.head]

    def commit(self, files, message):
        oid = hashlib.sha1(f"{len(self.order)} {message}".encode()).hexdigest()
        self.commits[oid] = files
        self.order.append(oid)
        return oid

    def find(self, revision):
        return self.head if revision == "main" else revision if revision in self.commits else None

    def replace(self, path, content):
        """A commit that changes one file, as somebody else could make it; `None` removes it."""
        files = {**self.files}
        files.pop(path, None)
        if content is not None:
            files[path] = (content, bool(_LARGE.fullmatch(path)))
        return self.commit(files, f"replace {path}")


class HubServer:
    """The server; a context manager.

    Attributes:
        repositories: by id, `"user/agents"`.
        sent, received: bytes of files, by path and by digest.
        large: bytes of the large file storage by SHA-256.
        break_after: how many bytes of the answer to a range are sent before the connection is closed; the first
            `breaks` answers only.
        hold_after: how many bytes of a large file are taken or given before the server stops until `release`.
    """

    def __init__(self):
        self.repositories, self.large = {}, {}
        self.sent, self.received, self.tokens_on_storage = Counter(), Counter(), []
        self.listing, self.requests = None, []
        self.break_after, self.breaks, self.hold_after = None, 0, None
        self.holding, self.release = threading.Event(), threading.Event()
        self.before_commit = None
        self.lock = threading.Lock()
        server = self

        class Handler(_Handler):
            hub = server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def forget(self):
        """Count from zero."""
        self.sent.clear()
        self.received.clear()
        self.requests.clear()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        url = urlparse(self.path)
        path = unquote(url.path)
        self.hub.requests.append((self.command, path))
        if match := re.fullmatch(r"/storage/([0-9a-f]{64})", path):
            self.hub.tokens_on_storage.append(self.headers.get("Authorization"))
            return self.send_file(self.hub.large[match[1]], parse_qs(url.query)["name"][0])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            if (found := self.repository(match[1], match[2])) is None:
                return
            repository, commit = found
            return self.send_json({"id": match[1], "sha": commit, "private": repository.private, "siblings": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/(.+)", path):
            return self.send_tree(*match.groups(), parse_qs(url.query))
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if (found := self.repository(match[1], match[2])) is None:
                return
            repository, commit = found
            content, is_large = repository.commits[commit].get(match[3], (None, False))
            if content is None:
                return self.refuse(404, "EntryNotFound")
            if is_large:
                digest = hashlib.sha256(content).hexdigest()
                self.hub.large[digest] = content
                place = f"http://localhost:{self.hub.port}/storage/{digest}?name={match[3]}&Signature=secret"
                return self.answer(302, b"", {"Location": place})
            return self.send_file(content, match[3])
        self.refuse(404, None)

    do_HEAD = do_GET

    def do_POST(self):
        path, body = unquote(urlparse(self.path).path), self.body()
        self.hub.requests.append((self.command, path))
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            if self.repository(match[1], match[2], write=True) is None:
                return
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if _LARGE.fullmatch(file["path"]) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.send_json({"files": files})
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            if self.repository(match[1], "main", write=True) is None:
                return
            objects = [{"oid": asked["oid"], "size": asked["size"]} for asked in json.loads(body)["objects"]]
            for one in objects:
                if one["oid"] not in self.hub.large:
                    one["actions"] = {"upload": {"href": f"{self.hub.url}/storage/{one['oid']}"}}
            return self.send_json({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            return self.commit(match[1], match[2], [json.loads(line) for line in body.splitlines()])
        self.refuse(404, None)

    def do_PUT(self):
        digest = self.path.rpartition("/")[2]
        self.hub.requests.append((self.command, self.path))
        content = self.body()
        self.hub.received[digest] += len(content)
        if self.hub.hold_after is not None and len(content) > self.hub.hold_after:
            self.hold()
        assert hashlib.sha256(content).hexdigest() == digest
        self.hub.large[digest] = content
        self.answer(200, b"")

    def create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        if self.may() is None:
            return self.refuse(401, None, "Invalid username or password.")
        if self.may() != "write" or asked["organization"] != "user":
            return self.refuse(403, None, "You don't have the rights to create a model under this namespace")
        if name in self.hub.repositories:
            return self.refuse(409, None, "You already created this model repo")
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.repositories[name] = Repository(private)
        self.send_json({"url": f"{self.hub.url}/{name}"})

    def commit(self, name, revision, lines):
        if (found := self.repository(name, revision, write=True)) is None:
            return
        repository, _ = found
        with self.hub.lock:
            if self.hub.before_commit is not None:
                action, self.hub.before_commit = self.hub.before_commit, None
                action(repository)
            header, *operations = lines
            if header["value"].get("parentCommit", repository.head) != repository.head:
                return self.refuse(412, None, "A commit has happened since. Please refresh and try again.")
            files = {**repository.files}
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "file":
                    content = base64.b64decode(value["content"])
                    self.hub.received[value["path"]] += len(content)
                    files[value["path"]] = (content, False)
                elif operation["key"] == "lfsFile":
                    files[value["path"]] = (self.hub.large[value["oid"]], True)
                else:
                    return self.refuse(400, None, f"{operation['key']} is not known here")
            oid = repository.commit(files, header["value"]["summary"])
        self.send_json({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def send_tree(self, name, revision, folder, query):
        if (found := self.repository(name, revision)) is None:
            return
        repository, commit = found
        entries, folders = [], set()
        for path, (content, is_large) in sorted(repository.commits[commit].items()):
            if path.startswith(f"{folder}/"):
                entry = {"type": "file", "path": path, "size": len(content)}
                entry["oid"] = hashlib.sha1(content).hexdigest()
                if is_large:
                    entry["lfs"] = {
                        "oid": hashlib.sha256(content).hexdigest(),
                        "size": len(content),
                        "pointerSize": 130,
                    }
                entries.append(entry)
                folders.add(path.rpartition("/")[0])
        entries += [
            {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()} for path in folders
        ]
        if not entries:
            return self.refuse(404, "EntryNotFound")
        if self.hub.listing is not None:
            entries = self.hub.listing(entries)
        start = int(query.get("cursor", ["0"])[0])
        more = f"{self.hub.url}{urlparse(self.path).path}?recursive=True&expand=False&cursor={start + _PAGE}"
        headers = {"Link": f'<{more}>; rel="next"'} if start + _PAGE < len(entries) else {}
        self.send_json(entries[start : start + _PAGE], headers)

    def send_file(self, content, name):
        size = len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, size)
        if asked and start >= size:
            return self.refuse(416, None)
        body = content[start:stop]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{size}")
        self.end_headers()
        limit = len(body)
        if self.hub.breaks and self.hub.break_after is not None and limit > self.hub.break_after:
            self.hub.breaks -= 1
            limit = self.hub.break_after
        held = self.hub.hold_after if self.hub.hold_after is not None and limit > self.hub.hold_after else limit
        self.write(name, body[:held])
        if held < limit:
            self.hold()
            return
        self.write(name, body[held:limit])
        if limit < len(body):
            self.close_connection = True
            self.connection.close()

    def write(self, name, data):
        self.hub.sent[name] += len(data)
        self.wfile.write(data)
        self.wfile.flush()

    def hold(self):
        self.close_connection = True
        self.hub.holding.set()
        self.hub.release.wait(60)

    def repository(self, name, revision, write=False):
        """The repository and the commit that are asked for, or an answer that says why not."""
        repository, may = self.hub.repositories.get(name), self.may()
        if self.headers.get("Authorization") and may is None:
            return self.refuse(401, None, "Invalid credentials in Authorization header")
        if repository is None or (repository.private and may is None):
            return self.refuse(404 if may else 401, "RepoNotFound", "Repository not found")
        if write and may != "write":
            return self.refuse(403, None, "Forbidden: pass a token with write access")
        commit = repository.find(revision or "main")
        if commit is None:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit

    def may(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return {OWNER: "write", READER: "read"}.get(token)

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def refuse(self, status, code, message=""):
        headers = {"X-Error-Code": code} if code else {}
        if message:
            headers["X-Error-Message"] = message
        self.answer(status, json.dumps({"error": message}).encode(), headers)

    def send_json(self, content, headers=None):
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
