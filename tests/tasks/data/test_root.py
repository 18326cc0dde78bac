"""Where data lies and how it is fetched, from a server on this machine."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rabo.tasks.data.root import DownloadBar, data_root, fetch

CONTENT = bytes(range(256)) * 2000
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """Serves /whole, breaks off in /broken, and has nothing else."""

    def do_GET(self) -> None:
        known = self.path in ("/whole", "/broken")
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(CONTENT) if known else 0))
        self.end_headers()
        if known:
            self.wfile.write(CONTENT if self.path == "/whole" else CONTENT[:70_000])

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_given_root_goes_before_the_environment_and_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user_cache: Path
):
    monkeypatch.delenv("RABO_DATA", raising=False)
    assert data_root(None) == user_cache
    monkeypatch.setenv("RABO_DATA", str(tmp_path / "from-environment"))
    assert data_root(None) == tmp_path / "from-environment"
    assert data_root(str(tmp_path / "given")) == tmp_path / "given"


def test_a_root_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"must be a folder, got the file .*--data-root"):
        data_root(tmp_path / "file")


def test_a_fetched_file_is_what_the_server_has(server: str, tmp_path: Path):
    path = fetch(f"{server}/whole", MD5, tmp_path / "new" / "set.zip")
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["set.zip"]


def test_a_wrong_checksum_leaves_nothing_and_says_where_to_put_the_file(
    server: str, tmp_path: Path
):
    path = tmp_path / "new" / "set.zip"
    with pytest.raises(ValueError, match=rf"checksum md5:0+[^0].*by hand to {path}.*--data-root"):
        fetch(f"{server}/whole", "md5:" + "0" * 32, path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("page", ["broken", "missing"])
def test_a_failed_download_leaves_nothing_and_says_where_to_put_the_file(
    page: str, server: str, tmp_path: Path
):
    path = tmp_path / "new" / "set.zip"
    with pytest.raises((ValueError, OSError), match=rf"{page}.*by hand to {path}.*--data-root"):
        fetch(f"{server}/{page}", MD5, path)
    assert list(path.parent.iterdir()) == []


def test_a_file_that_is_there_is_kept_and_no_server_is_asked(tmp_path: Path):
    path = tmp_path / "set.zip"
    path.write_bytes(CONTENT)
    assert fetch("http://127.0.0.1:9/nobody", MD5, path) == path
    path.write_bytes(b"my own")
    with pytest.raises(ValueError, match=r"must have the md5 checksum .* delete it"):
        fetch("http://127.0.0.1:9/nobody", MD5, path)
    assert path.read_bytes() == b"my own"


def test_the_bar_counts_bytes_and_knows_that_no_length_is_not_length_zero():
    with DownloadBar("set.zip", show=False) as bar:
        bar.total = 0
        assert bar.total is None
        bar.total = 10
        bar.update(4)
        assert bar.progress.tasks[0].completed == 4
        bar.reset()
        bar.update(10)
        assert bar.progress.tasks[0].finished
