"""Prefix reuse over HTTP: who shares with whom, and what usage says about it."""

from typing import Any

from moonlet.serve.settings import hash_key
from moonlet.testing import tiny_config, tiny_model
from tests.serve.running import Running, serving

TEXT = "a text that two requests have in common, long enough for a hash unit or two " * 3


def cached(running: Running, *, key: str = "none", **body: Any) -> int:
    """Cached tokens of a completion; usage and header say the same."""
    response = running.http.post(
        "/v1/completions",
        json={"model": "alias", "prompt": TEXT, "max_tokens": 2, **body},
        headers={"Authorization": f"Bearer {key}"},
    )
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    count = usage["prompt_tokens_details"]["cached_tokens"]
    assert count <= usage["prompt_tokens"]
    assert response.headers["x-msh-usage-cached-tokens"] == str(count)
    return count


def test_a_salt_shares_with_itself_only() -> None:
    with serving(tiny_model(tiny_config())) as running:
        first, again = cached(running), cached(running)
        assert first == 0
        assert again >= 128
        assert cached(running, cache_salt="a") == 0
        assert cached(running, cache_salt="b") == 0
        assert cached(running, cache_salt="a") == again


def test_keys_are_tenants() -> None:
    keys = {"api_key_hashes": (hash_key("one"), hash_key("two"))}
    with serving(tiny_model(tiny_config()), **keys) as running:
        assert cached(running, key="one") == 0
        assert cached(running, key="two") == 0
        assert cached(running, key="two") >= 128
        # a salt that spells the other key's is another salt all the same
        assert cached(running, key="two", cache_salt="one") == 0
