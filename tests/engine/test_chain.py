"""Hashes of prefixes: one name per prefix, tenant, model and image."""

from hypothesis import given
from hypothesis import strategies as st

from moonlet.engine.cache.chain import MediaSpan, PrefixChain, root_hash

IMAGE = MediaSpan(start=5, stop=9, digest=b"a" * 32)


def keys_of(tokens, root=b"", size=4, media=()):
    chain = PrefixChain(root, size, media)
    chain.extend(tokens, 0)
    return chain.keys


@given(st.lists(st.integers(0, 163839), max_size=40), st.lists(st.integers(1, 9), max_size=8))
def test_growing_in_any_pieces_gives_the_same_hashes(tokens, pieces):
    chain, done = PrefixChain(b"r", 4), 0
    for piece in [*pieces, len(tokens)]:
        stop = min(len(tokens), done + piece)
        chain.extend(tokens[done:stop], done)
        done = len(chain.keys) * 4
    assert chain.keys == keys_of(tokens, b"r")
    assert len(chain.keys) == len(tokens) // 4


@given(st.lists(st.integers(0, 3), min_size=12, max_size=24), st.integers(0, 11))
def test_a_changed_token_changes_its_unit_and_all_after_it(tokens, place):
    other = [*tokens]
    other[place] += 7
    same = [a == b for a, b in zip(keys_of(tokens), keys_of(other), strict=True)]
    assert same == [i < place // 4 for i in range(len(same))]


def test_tenants_and_models_share_nothing():
    tokens = range(12)
    roots = [root_hash(b"m", ""), root_hash(b"m", "s"), root_hash(b"n", ""), root_hash(b"ms", "")]
    keys = [key for root in roots for key in keys_of(tokens, root)]
    assert len(set(keys)) == len(keys)


def test_an_image_counts_from_the_first_unit_that_it_touches():
    tokens = list(range(16))
    plain, shown = keys_of(tokens), keys_of(tokens, media=[IMAGE])
    assert plain[0] == shown[0]
    assert not set(plain[1:]) & set(shown[1:])
    moved = MediaSpan(start=6, stop=10, digest=IMAGE.digest)
    other = MediaSpan(start=5, stop=9, digest=b"b" * 32)
    for media in ([moved], [other], [IMAGE, moved]):
        assert not set(keys_of(tokens, media=media)[1:]) & set(shown[1:])


def test_hashes_are_fixed():
    # prefixes kept on disk must be found by a later version of this code, or refused by its format
    keys = keys_of([0, 1, 2, 163839], root_hash(b"model", "salt"))
    assert keys[0].hex().startswith("f824ab22c8cbac9d5c94ce4c")
