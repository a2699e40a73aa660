"""What happens around the handlers: keys, request ids, failures, and clients that misbehave."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from moonlet.serve.http_protocol import MAX_HEAD_BYTES, BoundedHttpProtocol
from moonlet.serve.settings import hash_key
from tests.patience import PATIENCE_S
from tests.serve.running import MODEL, USER, Running, answer, error_of, serving

POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(answer("t", "ok")) as running:
        yield running


def connect(running: Running) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def until_closed(connection: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """Read to the end; return the status line and the fields of the error body."""
    received = b""
    while part := connection.recv(65_536):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"x-request-id:" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param"}
    return head.split(b"\r\n")[0], error


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        POST.encode() + b"Content-Length: many\r\n\r\n",
        POST.encode() + b"Content-Length: -1\r\n\r\n",
        POST.encode() + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST.encode() + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    ],
    ids=["tls", "length", "negative", "both", "chunks"],
)
def test_what_is_no_http_gets_the_error_body(running: Running, sent: bytes) -> None:
    with connect(running) as connection:
        connection.sendall(sent)
        status, error = until_closed(connection)
    assert b" 400 " in status
    assert error["type"] == "invalid_request_error"
    assert running.chat().status_code == 200


def test_endless_headers_are_cut_off(running: Running) -> None:
    with connect(running) as connection:
        connection.sendall(POST.encode() + b"X-Long: " + b"a" * MAX_HEAD_BYTES)
        status, error = until_closed(connection)
    assert b" 431 " in status
    assert str(MAX_HEAD_BYTES) in error["message"]


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.05)
    with serving(answer("t", "ok")) as running:
        for sent in (b"", POST.encode()):
            with connect(running) as connection:
                connection.sendall(sent)
                assert connection.recv(100) == b""


def test_a_body_that_does_not_come_frees_its_place() -> None:
    with serving(answer("t", "ok"), body_timeout_s=0.05, max_requests=1) as running:
        with connect(running) as connection:
            connection.sendall(POST.encode() + b"Content-Length: 100\r\n\r\n{")
            status, error = until_closed(connection)
        assert b" 408 " in status
        assert error["code"] == "body_timeout"
        assert running.server._service.num_requests == 0


def test_keys_are_needed_where_one_is_set() -> None:
    hashes = (hash_key("right"), hash_key("second"))
    with serving(answer("t", "ok"), api_key_hashes=hashes) as running:
        for header in (None, "Basic right", "Bearer", "right"):
            headers = {} if header is None else {"Authorization": header}
            response = running.get("/v1/models", headers=headers)
            assert error_of(response, 401)["type"] == "invalid_authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("wrong", "righ", "rightx", "RIGHT", "é"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            # nothing of a body is read before the key was checked
            for response in (
                running.get("/v1/models", headers=headers),
                running.post("/v1/chat/completions", content=b"{", headers=headers),
                running.post("/tokenize", content=b"{", headers=headers),
            ):
                assert error_of(response, 401)["type"] == "incorrect_api_key_error"
        for key in ("right", "second"):
            assert running.client(key).models.list().data[0].id == MODEL
        with pytest.raises(openai.AuthenticationError):
            running.client("wrong").models.list()
        assert running.get("/health").status_code == 200
        assert running.get("/ready").status_code == 200


def test_request_ids_are_echoed_or_made(running: Running) -> None:
    response = running.get("/health", headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    bad = running.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
    made = running.get("/health").headers["x-request-id"]
    assert len({bad, made, "a b"}) == 3


def test_an_unexpected_failure_is_a_500_that_names_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(answer("t", "ok")) as running:
        tokenizer = running.server._service.tokenizer

        def broken(segments: Any) -> list[int]:
            raise ZeroDivisionError("a secret detail")

        monkeypatch.setattr(tokenizer, "encode_segments", broken)
        response = running.post(
            "/v1/chat/completions",
            {"model": MODEL, "messages": USER},
            headers={"X-Request-Id": "lost-one"},
        )
        error = error_of(response, 500)
    assert error["type"] == "server_error"
    assert "lost-one" in error["message"]
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "lost-one"
    assert any("lost-one" in record.getMessage() for record in caplog.records)


def test_a_client_that_leaves_while_sending_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(answer("t", "ok")) as running:
        with connect(running) as connection:
            head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Length: 100", "", "")
            connection.sendall("\r\n".join(head).encode() + b"{")
        assert running.chat().status_code == 200
    # the server has stopped, so whatever it wanted to say is said
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_closed_engine_is_not_ready() -> None:
    with serving(answer("t", "ok")) as running:
        assert running.get("/ready").status_code == 200
        running.engine.close()
        assert running.get("/ready").status_code == 503
        assert error_of(running.chat(), 503)["type"] == "server_error"
