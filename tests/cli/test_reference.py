"""The command-line page is what the commands say."""

from docs.reference.make_cli import TARGET, page


def test_the_page_is_up_to_date() -> None:
    assert page() == TARGET.read_text(encoding="utf-8")
